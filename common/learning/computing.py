"""This machine's accelerators according to torch, and the settings of a process that computes on one."""

from __future__ import annotations

import os
import re
import warnings
from typing import Final

import torch

from common.errors import InvalidExperiment
from common.experiment.training import TrainingSettings
from common.host.accelerators import OPTION, choose

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


def resolve_accelerator(name: str, *, key: str = OPTION) -> torch.device:
    """Return the first device selected by 'cpu', 'cuda', 'cuda:N' or 'auto'. Raises InvalidExperiment naming `key`."""
    return torch.device(choose(name, accelerators(), key=key)[0])


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether the error is an accelerator's failure to allocate memory, in torch or in a library below it."""
    return isinstance(error, torch.OutOfMemoryError) or _ALLOCATION_FAILED.search(str(error)) is not None


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, which has many with torch, or the name of its type without a text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def set_up(accelerator: torch.device, training: TrainingSettings) -> None:
    """Apply an experiment's settings to this thread and its process. Raises InvalidExperiment.

    Sums must not depend on the number of cores, and a call that names no GPU would open a context on the first one. The
    number of threads and the current GPU are each thread's own, and the process may train for other experiments too. So
    all is applied before every training.
    """
    if accelerator.type == "cpu" and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if accelerator.type != "cuda":
        return
    torch.cuda.set_device(accelerator)
    if training.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(accelerator)
        raise InvalidExperiment("training.precision", "bf16", f"{name} does not support it", "Use fp32.")
    _set_up_gpu(tf32=training.precision == "tf32", deterministic=training.deterministic)


def set_up_evaluation(accelerator: torch.device) -> None:
    """Make this thread evaluate in fp32 on this GPU; on a CPU leave everything as it is."""
    if accelerator.type == "cuda":
        torch.cuda.set_device(accelerator)
        _set_up_gpu(tf32=False, deterministic=False)


def _set_up_gpu(*, tf32: bool, deterministic: bool) -> None:
    # Releases of torch before 2.10 look for it at the process's first matrix product, and refuse deterministic ones
    # later, though it has been set meanwhile.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports the compiler's settings
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    # By default torch computes convolutions and recurrent layers in TF32. Of its two interfaces this is the older: it
    # sets what both return. After the newer one alone, torch's compiler fails where it reads the older.
    warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
