"""NVIDIA GPUs by NVML, the library of the driver: needs no GPU context and no Python package.

Declarations follow nvml.h of CUDA 12. The functions and structures used here, but for the energy,
exist in every driver since 2013.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    memory_bytes: int | None = None
    used_bytes: int | None = None
    busy: float | None = None
    celsius: int | None = None
    joules: float | None = None  # since the driver was loaded


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
        by = ctypes.byref
        if (
            library.nvmlInit_v2() != _SUCCESS
            or library.nvmlDeviceGetCount_v2(by(count)) != _SUCCESS
        ):
            return
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, by(handle)) == _SUCCESS:
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
        state = Gpu(index)
        if library.nvmlDeviceGetMemoryInfo(handle, by(memory)) == _SUCCESS:
            state = replace(state, memory_bytes=memory.total, used_bytes=memory.used)
        if library.nvmlDeviceGetUtilizationRates(handle, by(used)) == _SUCCESS:
            state = replace(state, busy=used.gpu / 100)
        if library.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_CHIP, by(celsius)) == _SUCCESS:
            state = replace(state, celsius=celsius.value)
        # not in every driver
        energy = getattr(library, "nvmlDeviceGetTotalEnergyConsumption", None)
        if energy is not None and energy(handle, by(millijoules)) == _SUCCESS:
            state = replace(state, joules=millijoules.value / 1e3)
        return state


def find() -> Gpus | None:
    """Return the host's GPUs, None without a driver."""
    try:
        return Gpus(ctypes.CDLL(LIBRARY))
    except OSError:
        return None
