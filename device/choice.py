"""Which accelerators a user's word means, given what a machine has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from common.errors import InvalidExperiment

# What drivers leave where torch may find a GPU: Nvidia's, AMD's, Windows' below WSL.
_DRIVERS: Final = ("nvidia[0-9]*", "kfd", "dxg")


def choose(name: str, there: Sequence[str]) -> tuple[str, ...]:
    """Return what 'cpu', 'cuda', 'cuda:N' or 'auto' means where `there` is: 'cuda' all GPUs, 'auto' these or the CPU.

    Raises InvalidExperiment.
    """
    gpus = tuple(each for each in there if each != "cpu")
    if name == "auto":
        return gpus or ("cpu",)
    chosen = gpus if name == "cuda" else tuple(each for each in there if each == name)
    if not chosen:
        raise InvalidExperiment(
            "--accelerator", name, "this machine has no such accelerator", f"It has {', '.join(there)}; or say auto."
        )
    return chosen


def may_have_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether it is worth asking torch for GPUs, which takes seconds."""
    return any(found for driver in _DRIVERS for found in devices.glob(driver))
