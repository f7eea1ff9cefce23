"""This machine's accelerators according to torch, and the settings of a process that computes on one."""

from __future__ import annotations

import os

import torch

from common.errors import InvalidExperiment
from common.experiment.training import TrainingSettings
from device.accelerators import choose


def accelerators() -> list[str]:
    """Return the names of this machine's accelerators, the CPU first."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{i}" for i in range(gpus))]


def resolve_accelerator(name: str) -> torch.device:
    """Return the first device selected by 'cpu', 'cuda', 'cuda:N' or 'auto'. Raises InvalidExperiment."""
    return torch.device(choose(name, accelerators())[0])


def use_one_thread(accelerator: torch.device) -> None:
    """Make this thread compute alone, so that sums do not depend on the number of cores.

    The setting is each thread's own once the thread has computed, so it is checked before every training.
    """
    if accelerator.type == "cpu" and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def set_up(accelerator: torch.device, training: TrainingSettings) -> None:
    """Apply the experiment's settings to this process before its first computation. Raises InvalidExperiment."""
    use_one_thread(accelerator)
    if accelerator.type != "cuda":
        return
    if training.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(accelerator)
        raise InvalidExperiment("training.precision", "bf16", f"{name} does not support it", "Use fp32.")
    if training.deterministic:
        # cuBLAS reads it on its first use; without it torch rejects matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(training.deterministic)
    torch.backends.cudnn.deterministic = training.deterministic
