"""Energy of the host in joules, as far as it is known: of processors, of GPUs, and of a Raspberry Pi 5.

rapl  processors and their memory, by Linux's powercap (Intel, AMD). Its files are root's alone unless changed
nvml  GPUs, by NVIDIA's driver, from Volta on
pmic  the rails of a Raspberry Pi 5's power chip, read at each scrape and integrated between two
plug  what a smart plug reports, which is the whole machine's
csv   what a meter has written into a file

All of it is the whole host's energy, not that of one process.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

from common.host import nvidia
from common.host.nvidia import Gpus
from common.metrics import Reading

VCGENCMD: Final = "vcgencmd"
PATIENCE_S: Final = 2.0
GAP_MOST_S: Final = 120.0  # between two readings of the power; what happened in a longer gap is not counted
WATTS_MOST: Final = 1e6  # of a meter; what reports more is none
WATT_HOUR_J: Final = 3600.0
REPORT_BYTES_MOST: Final = 4096  # of a plug's report
RAIL: Final = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\d+(?:\.\d+)?)[AV]\s*$", re.MULTILINE)

log = logging.getLogger("fedstrata.energy")


class EnergySource(StrEnum):
    """What measured a host's energy; two sources of one host, which add up, have their names in order."""

    NONE = ""
    RAPL = "rapl"
    NVML = "nvml"
    NVML_RAPL = "nvml rapl"
    PMIC = "pmic"
    NVML_PMIC = "nvml pmic"
    PLUG = "plug"
    CSV = "csv"


class JouleCounter(Protocol):
    """A host's energy by one source, or by several that add up."""

    @property
    def source(self) -> EnergySource:
        """What measures."""

    def joules(self) -> float | None:
        """Return the energy since an arbitrary time, None if it is not known now. It may wait for files."""


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


class HostCounter:
    """The sum of a host's own counters, of all or of one source; `source` is NONE if it has none."""

    def __init__(self, meter: EnergyMeter, only: EnergySource = EnergySource.NONE) -> None:
        self._meter = meter
        self._parts = [part for part, _ in meter.read() if only in (EnergySource.NONE, part[0])]
        self.source = EnergySource(" ".join(sorted({source for source, _ in self._parts})))

    def joules(self) -> float | None:
        """Return the sum, None unless all parts that were there at the beginning are known."""
        found = dict(self._meter.read())
        if not self._parts or not all(part in found for part in self._parts):
            return None
        return math.fsum(found[part] for part in self._parts)


class PowerCurve:
    """The energy of a power that is known from time to time, by the trapezoidal rule.

    A gap of more than GAP_MOST_S is not counted. `now` and `at_s` are seconds of one clock.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._joules = self._shown = 0.0

    def add(self, at_s: float, watts: float, *, joules: float | None = None) -> None:
        """Add a reading, later than those before. `joules`: what a counter has of the time since the last one."""
        if joules is not None:
            self._joules += joules
        elif self._last is not None and (gap_s := at_s - self._last[0]) <= GAP_MOST_S:
            self._joules += gap_s * (watts + self._last[1]) / 2
        self._last = at_s, watts

    def joules(self, now: float) -> float | None:
        """Return the energy since the first reading, by the last power since the last reading; it never decreases.

        None before the first reading, and if the last one is older than GAP_MOST_S.
        """
        if self._last is None or now - self._last[0] > GAP_MOST_S:
            return None
        self._shown = max(self._shown, self._joules + max(0.0, now - self._last[0]) * self._last[1])
        return self._shown


class PlugMeter:
    """A smart plug by Shelly, which publishes on a broker: the power in watts as text, or a switch's status as JSON.

    A status has `apower`, watts, and perhaps `aenergy.total`, a counter of watt-hours, which then has the energy.
    Reports of another form, and negative powers, are ignored.
    """

    source = EnergySource.PLUG

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._curve = PowerCurve()
        self._counted: float | None = None
        self._lock = Lock()

    def report(self, body: bytes) -> None:
        """Take a report as it arrives."""
        found = plug_report(body)
        if found is None:
            log.warning("ignored a report of a plug, %d bytes: neither watts nor a switch's status", len(body))
            return
        watts, counted = found
        with self._lock:
            used = None
            if counted is not None and self._counted is not None and counted >= self._counted:
                used = (counted - self._counted) * WATT_HOUR_J
            self._counted = counted
            self._curve.add(self._now(), watts, joules=used)

    def joules(self) -> float | None:
        """Return the energy since the first report, None without a recent one."""
        with self._lock:
            return self._curve.joules(self._now())


def plug_report(body: bytes) -> tuple[float, float | None] | None:
    """Return a plug's watts, and the watt-hours of its counter if it has one; None if the report has another form."""
    if len(body) > REPORT_BYTES_MOST:
        return None
    try:
        found = json.loads(body)
        if isinstance(found, dict):
            counter = found["aenergy"]["total"] if "aenergy" in found else None
            watts, counted = float(found["apower"]), None if counter is None else float(counter)
        else:
            watts, counted = float(found), None
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return None
    if not 0 <= watts <= WATTS_MOST or (counted is not None and not 0 <= counted < math.inf):
        return None
    return watts, counted


class CsvMeter:
    """A file to which a meter of this host appends `time,watts`: Unix seconds or an ISO time, local without a zone.

    Other lines, such as a header, are ignored; so is a line whose time is not later than the last one's.
    """

    source = EnergySource.CSV

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self._path, self._wall = path, wall
        self._curve = PowerCurve()
        self._read = 0  # bytes
        self._last_s = -math.inf
        self._lock = Lock()

    def joules(self) -> float | None:
        """Return the energy since the first line, None without a recent line, or if the file cannot be read."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    if file.seek(0, 2) < self._read:  # another file of that name
                        self._read = 0
                    file.seek(self._read)
                    for line in file:
                        if line.endswith(b"\n"):  # the meter has written all of it
                            self._read += len(line)
                            self._take(line)
            except OSError:
                return None
            return self._curve.joules(self._wall())

    def _take(self, line: bytes) -> None:
        at, _, rest = line.decode("utf-8", "replace").partition(",")
        try:
            at_s, watts = _seconds(at.strip()), float(rest.partition(",")[0])
        except (ValueError, OverflowError, OSError):
            return
        if self._last_s < at_s < math.inf and 0 <= watts <= WATTS_MOST:
            self._last_s = at_s
            self._curve.add(at_s, watts)


def _seconds(text: str) -> float:
    """Return Unix seconds. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


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
        self._curve = PowerCurve()

    def joules(self) -> float | None:
        """Read the power, and return the energy since the first reading; None if it cannot be read."""
        watts, now = self._power(), self._now()
        if watts is None:
            return None
        self._curve.add(now, watts)
        return self._curve.joules(now)


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
        name, package = text_of(folder / "name"), folder.name.split(":")[1]
        if name.startswith("package"):
            yield PowercapZone(folder, name)
        elif name == "dram":
            yield PowercapZone(folder, f"dram-{package}")


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdecimal() else None


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel's, stripped; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
