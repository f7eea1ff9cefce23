"""NVIDIA GPUs by NVML, the library of the driver: needs no GPU context and no Python package.

Declarations follow nvml.h of CUDA 12. The functions and structures used here, but for the energy,
exist in every driver since 2013.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"
_SUCCESS: Final = 0
_TEMPERATURE_OF_CHIP: Final = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's state; `busy`: the fraction of the last sample period in which it had work. None =
    unknown.
    """

    index: int
    memory_bytes: int | None
    used_bytes: int | None
    busy: float | None
    celsius: int | None
    joules: float | None  # since the driver was loaded


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Gpus:
    """The host's GPUs."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: list[ctypes.c_void_p] = []
        count = ctypes.c_uint()
        if (
            library.nvmlInit_v2() == _SUCCESS
            and library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _SUCCESS
        ):
            for index in range(count.value):
                handle = ctypes.c_void_p()
                if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == _SUCCESS:
                    self._handles.append(handle)

    def states(self) -> Sequence[Gpu]:
        """Return the state of each GPU."""
        return [self._state(index, handle) for index, handle in enumerate(self._handles)]

    def _state(self, index: int, handle: ctypes.c_void_p) -> Gpu:
        memory = _Memory()
        used = _Utilization()
        celsius = ctypes.c_uint()
        millijoules = ctypes.c_ulonglong()
        library = self._library
        by = ctypes.byref
        has_memory = library.nvmlDeviceGetMemoryInfo(handle, by(memory)) == _SUCCESS
        has_use = library.nvmlDeviceGetUtilizationRates(handle, by(used)) == _SUCCESS
        warm = (
            library.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_CHIP, by(celsius)) == _SUCCESS
        )
        # not in every driver
        energy = getattr(library, "nvmlDeviceGetTotalEnergyConsumption", None)
        counts = energy is not None and energy(handle, by(millijoules)) == _SUCCESS
        return Gpu(
            index,
            memory.total if has_memory else None,
            memory.used if has_memory else None,
            used.gpu / 100 if has_use else None,
            celsius.value if warm else None,
            millijoules.value / 1e3 if counts else None,
        )


def find() -> Gpus | None:
    """Return the host's GPUs, None without a driver."""
    try:
        return Gpus(ctypes.CDLL(LIBRARY))
    except OSError:
        return None
