"""Selection of accelerators by name, given what a machine has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from common.errors import InvalidExperiment

OPTION: Final = "--accelerator"
_NAMES: Final = re.compile(r"auto|cpu|cuda|cuda:\d+")
# Device files of GPU drivers: Nvidia's, AMD's, Windows' below WSL.
_DRIVERS: Final = ("nvidia[0-9]*", "kfd", "dxg")


def choose(name: str, there: Sequence[str], *, key: str = OPTION) -> tuple[str, ...]:
    """Return the accelerators selected by 'cpu', 'cuda' (all GPUs), 'cuda:N' or 'auto' (all GPUs, else the CPU).

    `there`: the accelerators of this machine; `key`: what has the name. Raises InvalidExperiment.
    """
    check_name(name, key=key)
    gpus = tuple(each for each in there if each != "cpu")
    if name == "auto":
        return gpus or ("cpu",)
    chosen = gpus if name == "cuda" else tuple(each for each in there if each == name)
    if not chosen:
        raise InvalidExperiment(
            key, name, "this machine has no such accelerator", f"It has {', '.join(there)}; or use auto."
        )
    return chosen


def check_name(name: str, *, key: str = OPTION) -> None:
    """Raise InvalidExperiment for what is no name of accelerators."""
    if not _NAMES.fullmatch(name):
        raise InvalidExperiment(
            key, name, "no accelerator has this name", "Use cpu, cuda, cuda:N (a GPU's number) or auto."
        )


def may_have_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether a GPU driver is present, so that asking torch, which takes seconds, makes sense."""
    return any(found for driver in _DRIVERS for found in devices.glob(driver))
