"""Energy of the host in joules, as far as it is known: of processors, of GPUs, and of a Raspberry
Pi 5.

rapl  processors and their memory, by Linux's powercap (Intel, AMD). Its files are root's alone
unless changed nvml  GPUs, by NVIDIA's driver, from Volta on pmic  the rails of a Raspberry Pi 5's
power chip, read at each scrape and integrated between two plug  what a smart plug reports, which is
the whole machine's

All of it is the whole host's energy, not that of one process. What a meter cannot have measured is
not counted, and the energy is not known at that reading: a counter that went back or jumped, by a
suspend, a reset or a fault.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

from fedstrata.common.host import nvidia
from fedstrata.common.host.nvidia import Gpus
from fedstrata.common.metrics import Reading

VCGENCMD: Final = "vcgencmd"
PATIENCE_S: Final = 2.0
# between two readings of the power; what happened in a longer gap is not counted
GAP_MOST_S: Final = 120.0
WATTS_MOST: Final = 1e5  # of a plug; what reports more is none
PACKAGE_WATTS_MOST: Final = 1000.0  # of a processor's package, or a memory
GPU_WATTS_MOST: Final = 3000.0
RAILS_WATTS_MOST: Final = 100.0  # of a Raspberry Pi
SLACK_S: Final = 1.0  # a counter is not read at the moment at which it counts
# A plug's power may have been higher between two reports than at both, for a moment; and its
# counter is rounded.
PLUG_PEAK: Final = 2.0
PLUG_BASE_WATTS: Final = 60.0
PLUG_ROUNDING_J: Final = 4.0
# after a report that a plug cannot have measured; its readers read more often
UNKNOWN_S: Final = 30.0
WATT_HOUR_J: Final = 3600.0
WALL: Final = "wall"  # a plug's part of a host, which is all of it
REPORT_BYTES_MOST: Final = 4096  # of a plug's report
RAIL: Final = re.compile(
    r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\d+(?:\.\d+)?)[AV]\s*$", re.MULTILINE
)

log = logging.getLogger("fedstrata.energy")


class EnergySource(StrEnum):
    """What measured a host's energy; two sources of one host, which add up, have their names in
    order.
    """

    NONE = ""
    RAPL = "rapl"
    NVML = "nvml"
    NVML_RAPL = "nvml rapl"
    PMIC = "pmic"
    NVML_PMIC = "nvml pmic"
    PLUG = "plug"


class JouleCounter(Protocol):
    """A host's energy by one source, or by several that add up."""

    @property
    def source(self) -> EnergySource:
        """What measures."""

    def joules(self) -> float | None:
        """Return the energy since an arbitrary time, None if it is not known now. It may wait for
        files.
        """


class EnergyMeter:
    """The energies of a host, each since an arbitrary time."""

    @classmethod
    def of_this_host(cls) -> EnergyMeter:
        """Return the meter of this host."""
        return cls(Path("/sys"), nvidia.find(), power=pmic())

    def __init__(
        self,
        sys: Path,
        gpus: Gpus | None,
        *,
        power: Callable[[], float | None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._zones = list(_zones(sys / "class" / "powercap", now))
        self._gpus = gpus
        self._now = now
        self._gpu_steps: dict[str, PlausibleSteps] = {}
        self._rails = None if power is None else PowerIntegral(power)
        self._lock = Lock()  # each scrape has a thread of its own
        self.read()

    def read(self) -> Reading:
        """Return joules by source and part; what cannot be read is omitted."""
        with self._lock:
            found = {
                ("rapl", zone.name): joules
                for zone in self._zones
                if (joules := zone.joules()) is not None
            }
            if self._rails is not None and (joules := self._rails.joules()) is not None:
                found["pmic", "rails"] = joules
            for gpu in () if self._gpus is None else self._gpus.states():
                if gpu.joules is None:
                    joules = None
                else:
                    joules = self._of_gpu(f"gpu-{gpu.index}", gpu.joules)
                if joules is not None:
                    found["nvml", f"gpu-{gpu.index}"] = joules
            return found.items()

    def _of_gpu(self, part: str, joules: float) -> float | None:
        """Return a GPU's joules since its driver was loaded first."""
        if part not in self._gpu_steps:
            self._gpu_steps[part] = PlausibleSteps(part, GPU_WATTS_MOST, self._now, first=joules)
        return self._gpu_steps[part].take(joules)


class PlausibleSteps:
    """The sum of a counter's steps, without those that it cannot have counted.

    A step is what it has counted since the reading before: negative, or more than `watts_most` for
    the time, it is the step of a counter that was reset. `first`: the sum at the first reading.
    """

    def __init__(
        self, part: str, watts_most: float, now: Callable[[], float], *, first: float = 0.0
    ) -> None:
        self._part = part
        self._watts_most = watts_most
        self._now = now
        self._sum = first
        self._last: tuple[float, float] | None = None
        self._reported = False

    def take(self, joules: float, *, range_j: float = 0.0) -> float | None:
        """Take a reading of the counter, which wraps around at `range_j`, if given; return the sum.

        None for a step that cannot be: it is not known what was used meanwhile.
        """
        now = self._now()
        last = self._last
        self._last = now, joules
        if last is None:
            return self._sum
        step = joules - last[1]
        if step < 0:
            step += range_j
        most = self._watts_most * (now - last[0] + SLACK_S)
        if not 0 <= step <= most:
            if not self._reported:
                self._reported = True
                log.warning(
                    "%s of %s: its counter moved from %.0f to %.0f J in %.1f s, as by a reset or "
                    "a suspend: the energy "
                    "of that time is not known",
                    self._part,
                    platform.node(),
                    last[1],
                    joules,
                    now - last[0],
                )
            return None
        self._sum += step
        return self._sum


class HostCounter:
    """The sum of a host's own counters, of all or of one source; `source` is NONE if it has
    none.
    """

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
        """Add a reading, later than those before. `joules`: what a counter has of the time since
        the last one.
        """
        if joules is not None:
            self._joules += joules
        elif self._last is not None and (gap_s := at_s - self._last[0]) <= GAP_MOST_S:
            self._joules += gap_s * (watts + self._last[1]) / 2
        self._last = at_s, watts

    def joules(self, now: float) -> float | None:
        """Return the energy since the first reading, by the last power since the last reading; it
        never decreases.

        None before the first reading, and if the last one is older than GAP_MOST_S.
        """
        if self._last is None or now - self._last[0] > GAP_MOST_S:
            return None
        self._shown = max(self._shown, self._joules + max(0.0, now - self._last[0]) * self._last[1])
        return self._shown


class PlugMeter:
    """A smart plug by Shelly, which publishes on a broker: the power in watts as text, or a
    switch's status as JSON.

    A status has `apower`, watts, and perhaps `aenergy.total`, a counter of watt-hours, which then
    has the energy, if it is no more than the power makes likely. Otherwise the energy is not known
    for UNKNOWN_S. Reports of another form, and negative powers, are ignored.
    """

    source = EnergySource.PLUG

    def __init__(self, now: Callable[[], float] = time.monotonic, *, topic: str = "") -> None:
        self._now = now
        self._topic = topic
        self._curve = PowerCurve()
        self._last: tuple[float, float, float | None] | None = None
        self._unknown_until = -math.inf
        self._reported = False
        self._lock = Lock()

    def report(self, body: bytes) -> None:
        """Take a report as it arrives."""
        found = plug_report(body)
        if found is None:
            log.warning(
                "ignored a report of a plug, %d bytes: neither watts nor a switch's status",
                len(body),
            )
            return
        watts, counted = found
        with self._lock:
            now = self._now()
            last = self._last
            self._last = now, watts, counted
            used = None
            if (
                last is not None
                and counted is not None
                and last[2] is not None
                and counted >= last[2]
            ):
                used = self._checked(
                    (counted - last[2]) * WATT_HOUR_J, now - last[0], max(watts, last[1]), now
                )
            self._curve.add(now, watts, joules=used)

    def joules(self) -> float | None:
        """Return the energy since the first report, None without a recent one, and after one that
        cannot be.
        """
        with self._lock:
            now = self._now()
            if now < self._unknown_until:
                return None
            return self._curve.joules(now)

    def read(self) -> Reading:
        """Return the joules as those of a host's part; nothing if they are not known."""
        joules = self.joules()
        if joules is None:
            return []
        return [((self.source.value, WALL), joules)]

    def _checked(self, joules: float, for_s: float, watts: float, now: float) -> float | None:
        """Return what the counter has counted if the power makes it likely."""
        if joules <= (PLUG_PEAK * watts + PLUG_BASE_WATTS) * for_s + PLUG_ROUNDING_J:
            return joules
        self._unknown_until = now + UNKNOWN_S
        if not self._reported:
            self._reported = True
            log.warning(
                "plug %s: its counter moved by %.4g J in %.1f s, at %.4g W: the energy of that "
                "time is not known",
                self._topic,
                joules,
                for_s,
                watts,
            )
        return None


def plug_report(body: bytes) -> tuple[float, float | None] | None:
    """Return a plug's watts, and the watt-hours of its counter if it has one; None if the report
    has another form.
    """
    if len(body) > REPORT_BYTES_MOST:
        return None
    try:
        found = json.loads(body)
        if isinstance(found, dict):
            counter = found["aenergy"]["total"] if "aenergy" in found else None
            watts = float(found["apower"])
            counted = None if counter is None else float(counter)
        else:
            watts = float(found)
            counted = None
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return None
    if not 0 <= watts <= WATTS_MOST or (counted is not None and not 0 <= counted < math.inf):
        return None
    return watts, counted


class PowercapZone:
    """A zone of RAPL. Its counter wraps around, within the hour on a busy server: it must be read
    more often.
    """

    def __init__(self, folder: Path, name: str, now: Callable[[], float]) -> None:
        self.name = name
        self._folder = folder
        self._steps = PlausibleSteps(name, PACKAGE_WATTS_MOST, now)

    def joules(self) -> float | None:
        """Return the energy since the first reading, None if it cannot be read, or has a step that
        cannot be.
        """
        microjoules = _number(self._folder / "energy_uj")
        if microjoules is None:
            return None
        range_uj = _number(self._folder / "max_energy_range_uj") or 0
        return self._steps.take(microjoules / 1e6, range_j=range_uj / 1e6)


class PowerIntegral:
    """The energy of a power that is read from time to time, by the trapezoidal rule."""

    def __init__(
        self, power: Callable[[], float | None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._power = power
        self._now = now
        self._curve = PowerCurve()

    def joules(self) -> float | None:
        """Read the power, and return the energy since the first reading; None if it cannot be
        read.
        """
        watts = self._power()
        now = self._now()
        if watts is None:
            return None
        self._curve.add(now, watts)
        return self._curve.joules(now)


def pmic() -> Callable[[], float | None] | None:
    """Return a reading of the power of a Raspberry Pi 5's rails in watts, None on other
    machines.
    """
    program = shutil.which(VCGENCMD)
    if program is None:
        return None

    def read() -> float | None:
        command = [program, "pmic_read_adc"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return rails_watts(done.stdout)

    if read() is not None:
        return read
    return None


def rails_watts(text: str) -> float | None:
    """Return the power of all rails whose current and voltage `vcgencmd pmic_read_adc` reports,
    None if there is none.

    What USB devices take, and what the converters lose, is not in it.
    """
    rails: dict[str, dict[str, float]] = defaultdict(dict)
    for rail, unit, value in RAIL.findall(text):
        rails[rail][unit] = float(value)
    powers = [rail["A"] * rail["V"] for rail in rails.values() if len(rail) == 2]
    watts = sum(powers)
    if powers and watts <= RAILS_WATTS_MOST:
        return watts
    return None


def _zones(root: Path, now: Callable[[], float]) -> Iterator[PowercapZone]:
    """Yield the packages, and the memories, which are beside them; cores and graphics are parts of
    packages.

    The platform's zone, which contains everything, is omitted, so that the zones of a host can be
    added.
    """
    for folder in sorted(root.glob("intel-rapl:*")):
        name = text_of(folder / "name")
        package = folder.name.split(":")[1]
        if name.startswith("package"):
            yield PowercapZone(folder, name, now)
        elif name == "dram":
            yield PowercapZone(folder, f"dram-{package}", now)


def _number(path: Path) -> int | None:
    text = text_of(path)
    if text.isdecimal():
        return int(text)
    return None


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel's, stripped; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
