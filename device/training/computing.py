"""This machine's accelerators according to torch, and the settings of a process that computes on one."""

from __future__ import annotations

import os
import re
from typing import Final

import torch

from common.errors import InvalidExperiment
from common.experiment.training import TrainingSettings
from device.accelerators import choose

# Failures to allocate that torch raises as plain RuntimeErrors: those of the libraries, by their documented status (of
# cuDNN 9 and of earlier releases), and those of CUDA's runtime and driver outside torch's allocator.
_ALLOCATION_FAILED: Final = re.compile(
    r"CU(DNN|BLAS)_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED"
    r"|CUDA (driver )?error: out of memory|CUDA out of memory"
)


def accelerators() -> list[str]:
    """Return the names of this machine's accelerators, the CPU first."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{i}" for i in range(gpus))]


def resolve_accelerator(name: str) -> torch.device:
    """Return the first device selected by 'cpu', 'cuda', 'cuda:N' or 'auto'. Raises InvalidExperiment."""
    return torch.device(choose(name, accelerators())[0])


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether the error is an accelerator's failure to allocate memory, in torch or in a library below it."""
    return isinstance(error, torch.OutOfMemoryError) or _ALLOCATION_FAILED.search(str(error)) is not None


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, which has many with torch, or the name of its type without a text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def set_up_thread(accelerator: torch.device) -> None:
    """Make this thread compute alone on a CPU, or by default on this GPU.

    Sums must not depend on the number of cores, and a call that names no GPU would open a context on the first one.
    Both settings are each thread's own, so they are applied before every training.
    """
    if accelerator.type == "cuda":
        torch.cuda.set_device(accelerator)
    elif accelerator.type == "cpu" and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def set_up(accelerator: torch.device, training: TrainingSettings) -> None:
    """Apply the experiment's settings to this process before its first computation. Raises InvalidExperiment."""
    set_up_thread(accelerator)
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
