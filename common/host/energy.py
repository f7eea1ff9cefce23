"""Energy of the host in joules, as far as it is known: of processors, of GPUs, and of a Raspberry Pi 5.

rapl  processors and their memory, by Linux's powercap (Intel, AMD). Its files are root's alone unless changed
nvml  GPUs, by NVIDIA's driver, from Volta on
pmic  the rails of a Raspberry Pi 5's power chip, read at each scrape and integrated between two

All of it is the whole host's energy, not that of one process.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Final

from common.host import nvidia
from common.host.nvidia import Gpus
from common.metrics import Reading

VCGENCMD: Final = "vcgencmd"
PATIENCE_S: Final = 2.0
GAP_MOST_S: Final = 120.0  # between two readings of the power; what happened in a longer gap is not counted
RAIL: Final = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\d+(?:\.\d+)?)[AV]\s*$", re.MULTILINE)


class EnergyMeter:
    """The energies of a host, each since an arbitrary time."""

    @classmethod
    def of_this_host(cls) -> EnergyMeter:
        """Return the meter of this host."""
        return cls(Path("/sys"), nvidia.find(), power=pmic())

    def __init__(self, sys: Path, gpus: Gpus | None, *, power: Callable[[], float | None] | None = None) -> None:
        self._zones = list(_zones(sys / "class" / "powercap"))
        self._gpus = gpus
        self._rails = None if power is None else PowerIntegral(power)
        self._lock = Lock()  # each scrape has a thread of its own
        self.read()

    def read(self) -> Reading:
        """Return joules by source and part; what cannot be read is omitted."""
        with self._lock:
            found = {("rapl", zone.name): joules for zone in self._zones if (joules := zone.joules()) is not None}
            if self._rails is not None and (joules := self._rails.joules()) is not None:
                found["pmic", "rails"] = joules
            for gpu in () if self._gpus is None else self._gpus.states():
                if gpu.joules is not None:
                    found["nvml", f"gpu-{gpu.index}"] = gpu.joules
            return found.items()


class PowercapZone:
    """A zone of RAPL. Its counter wraps around, within the hour on a busy server: it must be read more often."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._folder = folder
        self._last: int | None = None
        self._joules = 0.0

    def joules(self) -> float | None:
        """Return the energy since the first reading, None if it cannot be read."""
        microjoules = _number(self._folder / "energy_uj")
        if microjoules is None:
            return None
        if self._last is not None:
            used = microjoules - self._last
            if used < 0:
                used += _number(self._folder / "max_energy_range_uj") or -used
            self._joules += max(used, 0) / 1e6
        self._last = microjoules
        return self._joules


class PowerIntegral:
    """The energy of a power that is read from time to time, by the trapezoidal rule."""

    def __init__(self, power: Callable[[], float | None], now: Callable[[], float] = time.monotonic) -> None:
        self._power, self._now = power, now
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    def joules(self) -> float | None:
        """Read the power, and return the energy since the first reading; None if it cannot be read."""
        watts, now = self._power(), self._now()
        if watts is None:
            return None
        if self._last is not None and now - self._last[0] <= GAP_MOST_S:
            self._joules += (now - self._last[0]) * (watts + self._last[1]) / 2
        self._last = now, watts
        return self._joules


def pmic() -> Callable[[], float | None] | None:
    """Return a reading of the power of a Raspberry Pi 5's rails in watts, None on other machines."""
    program = shutil.which(VCGENCMD)
    if program is None:
        return None

    def read() -> float | None:
        command = [program, "pmic_read_adc"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return rails_watts(done.stdout)

    return read if read() is not None else None


def rails_watts(text: str) -> float | None:
    """Return the power of all rails whose current and voltage `vcgencmd pmic_read_adc` reports, None if there is none.

    What USB devices take, and what the converters lose, is not in it.
    """
    rails: dict[str, dict[str, float]] = defaultdict(dict)
    for rail, unit, value in RAIL.findall(text):
        rails[rail][unit] = float(value)
    powers = [rail["A"] * rail["V"] for rail in rails.values() if len(rail) == 2]
    return sum(powers) if powers else None


def _zones(root: Path) -> Iterator[PowercapZone]:
    """Yield the packages, and the memories, which are beside them; cores and graphics are parts of packages.

    The platform's zone, which contains everything, is omitted, so that the zones of a host can be added.
    """
    for folder in sorted(root.glob("intel-rapl:*")):
        name, package = _text(folder / "name"), folder.name.split(":")[1]
        if name.startswith("package"):
            yield PowercapZone(folder, name)
        elif name == "dram":
            yield PowercapZone(folder, f"dram-{package}")


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
