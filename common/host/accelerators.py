"""Selection of accelerators by name, given what a machine has, and what their failures mean."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from fedstrata.common.errors import InvalidExperiment

OPTION: Final = "--accelerator"
_NAMES: Final = re.compile(r"auto|cpu|cuda|cuda:\d+")
# Device files of GPU drivers: Nvidia's, those of its Tegra boards (Jetson), AMD's, Windows' below
# WSL.
_DRIVERS: Final = ("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "nvmap", "kfd", "dxg")
# GPUs on which fedstrata does not compute
_UNUSED: Final[Mapping[str, str]] = {"mps": "Apple", "xpu": "Intel"}
# Failures to allocate that torch raises as plain RuntimeErrors, by who names them: patterns of
# their texts. The libraries' are their documented status, of cuDNN 9 and of earlier releases.
_NO_MEMORY_OF: Final[Mapping[str, str]] = {
    # outside torch's allocator
    "runtime and driver": r"\b(CUDA|HIP) (driver )?(error: )?out of memory",
    "libraries": r"\b(CU|HIP)[A-Z_]*ALLOC(ATION)?_FAILED",
    # a handle for which there was no memory
    "handles": r"\b(CU|HIP)(BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED",
    # no memory for any algorithm
    "cuDNN's choice": r"unable to find an engine|Unable to find a valid cuDNN algorithm",
    # torch asks NVML for the text of its own lack of memory: Tegra has none, or too old a one
    "torch's own text": r"NVML_SUCCESS == r INTERNAL ASSERT",
    # Tegra's driver, whose memory is the host's
    "Tegra": r"\bNvMapMem(Alloc|HandleAlloc)",
}
_NO_MEMORY: Final = re.compile("|".join(_NO_MEMORY_OF.values()))
# Failures after which each call in the process fails, by the CUDA runtime's documentation of its
# error codes, and those by which the libraries report one of them.
_LOST: Final = re.compile(
    r"\b(CUDA|HIP) (driver )?error: (an illegal (memory access|instruction)|unspecified launch "
    r"failure"
    r"|misaligned address|device-side assert|invalid program counter|operation not supported on "
    r"global/shared"
    r"|hardware stack error|the launch timed out|uncorrectable ECC error|context is "
    r"destroyed|unknown error)"
    r"|_STATUS_EXECUTION_FAILED\b"
)

log = logging.getLogger("fedstrata.accelerators")


def choose(name: str, there: Sequence[str], *, key: str = OPTION) -> tuple[str, ...]:
    """Return the accelerators selected by 'cpu', 'cuda' (all GPUs), 'cuda:N' or 'auto' (all GPUs,
    else the CPU).

    `there`: the accelerators of this machine; `key`: what has the name. Raises InvalidExperiment.
    """
    check_name(name, key=key)
    unused = tuple(each for each in there if each in _UNUSED)
    there = [each for each in there if each not in unused]
    gpus = tuple(each for each in there if each != "cpu")
    if name == "auto":
        if unused and not gpus:
            _warn_of(unused)
        return gpus or ("cpu",)
    chosen = gpus if name == "cuda" else tuple(each for each in there if each == name)
    if not chosen:
        raise InvalidExperiment(
            key,
            name,
            "this machine has no such accelerator",
            f"It has {', '.join(there)}; or use auto.",
        )
    return chosen


def check_name(name: str, *, key: str = OPTION) -> None:
    """Raise InvalidExperiment for what is no name of accelerators."""
    if not _NAMES.fullmatch(name):
        raise InvalidExperiment(
            key,
            name,
            "no accelerator has this name",
            "Use cpu, cuda, cuda:N (a GPU's number) or auto.",
        )


@cache  # once in a process
def _warn_of(unused: Sequence[str]) -> None:
    for name in unused:
        log.warning(
            "the %s GPU of this machine (%s) is not used: fedstrata computes on the CPU",
            _UNUSED[name],
            name,
        )


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an accelerator's lack of memory, in torch or in a library below
    it.
    """
    # Of torch, which not every process has.
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return isinstance(error, RuntimeError) and (named or _NO_MEMORY.search(str(error)) is not None)


def is_lost(error: BaseException) -> bool:
    """Return whether each call of the accelerator fails after this error, until its process
    ends.
    """
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def may_have_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether a GPU driver is present, so that asking torch, which takes seconds, makes
    sense.
    """
    return any(found for driver in _DRIVERS for found in devices.glob(driver))
