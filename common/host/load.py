"""What other processes take of this machine while something is measured on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.host.machine import MODES

IDLE: Final = ("idle", "iowait")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """The load of a machine during a measurement.

    others_cores: cores that other processes used on average, None without Linux's /proc
    cores: those of the whole machine    load_average: of the minute before
    """

    others_cores: float | None
    cores: int
    load_average: float


class LoadMeter:
    """Measures the load from its construction on. `own`: CPU seconds of this process and of its ended children."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        own: Callable[[], float] = lambda: sum(os.times()[:4]),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._own = own
        self._clock = clock
        self._load_average = os.getloadavg()[0]
        self._start = clock(), self._busy_s(), own()

    def read(self) -> MachineLoad:
        """Return the load since the construction."""
        start, busy_s, own_s = self._start
        now_s, passed = self._busy_s(), self._clock() - start
        others = None
        if busy_s is not None and now_s is not None and passed > 0:
            others = max(0.0, now_s - busy_s - (self._own() - own_s)) / passed
        return MachineLoad(others, os.cpu_count() or 1, self._load_average)

    def _busy_s(self) -> float | None:
        """Return the seconds that all cores were busy, also for other guests of the same host."""
        try:
            words = (self._proc / "stat").read_text().partition("\n")[0].split()[1:]
        except OSError:
            return None
        ticks = zip(MODES, map(int, words), strict=False)
        return sum(count for mode, count in ticks if mode not in IDLE) / _TICKS_PER_S
