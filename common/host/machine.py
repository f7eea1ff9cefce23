"""CPU, memory, temperature, energy and disk of the host, from Linux's /proc and /sys; absent where
unknown.

And what other processes take of this machine while something is measured on it.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Final

from fedstrata.common.host import nvidia
from fedstrata.common.host.energy_meters import EnergyMeter, PlugMeter, pmic, text_of
from fedstrata.common.host.nvidia import Gpu, Gpus
from fedstrata.common.metrics import Metrics, Reading

# of /proc/stat, in its order
MODES: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
IDLE: Final = ("idle", "iowait")
GPU: Final[Mapping[str, Callable[[Gpu], float | None]]] = {
    "gpu_memory_bytes": attrgetter("memory_bytes"),
    "gpu_memory_used_bytes": attrgetter("used_bytes"),
    "gpu_busy_ratio": attrgetter("busy"),
    "gpu_temperature_celsius": attrgetter("celsius"),
}


def export_machine(
    metrics: Metrics,
    *,
    folders: Mapping[str, Path] | None = None,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
) -> None:
    """Export the metrics of this process, its host and the host's GPUs, as far as this platform
    provides them.

    `folders`: those whose disk usage is exported, by what they hold.
    """
    host = platform.node()
    usages = {name: FolderUsage(folder) for name, folder in (folders or {}).items()}
    metrics.watch("disk_used_bytes", (host,), partial(_of_folders, usages, FolderUsage.used_bytes))
    metrics.watch("disk_free_bytes", (host,), partial(_of_folders, usages, FolderUsage.free_bytes))
    if not (proc / "self" / "stat").exists():
        return
    metrics.watch("process_cpu_seconds", (), _CpuTime(proc).read)
    metrics.watch("process_resident_bytes", (), lambda: [((), _resident_bytes(proc))])
    metrics.watch("host_cpu_seconds", (host,), lambda: _host_cpu(proc))
    metrics.watch("host_memory_bytes", (host,), lambda: _memory(proc, "MemTotal"))
    metrics.watch("host_memory_available_bytes", (host,), lambda: _memory(proc, "MemAvailable"))
    metrics.watch("host_temperature_celsius", (host,), lambda: _temperatures(sys))
    gpus = nvidia.find()
    metrics.watch("energy_joules", (host,), EnergyMeter(sys, gpus, power=pmic()).read)
    if gpus is not None:
        for name, read in GPU.items():
            metrics.watch(name, (host,), partial(_of_gpus, gpus, read))


def export_plug(metrics: Metrics, plug: PlugMeter) -> None:
    """Export the energy of this host at the wall, beside that of its own counters."""
    metrics.watch("energy_joules", (platform.node(),), plug.read)


def available_bytes(proc: Path = Path("/proc")) -> float | None:
    """Return the memory that new processes can use, None if this platform does not report it."""
    return next((value for _, value in _memory(proc, "MemAvailable")), None)


def hottest_celsius(gpus: Gpus | None, sys: Path = Path("/sys")) -> float | None:
    """Return the highest temperature of the host's sensors and GPUs, None without any."""
    found = [celsius for _, celsius in _temperatures(sys)]
    if gpus is not None:
        found += [gpu.celsius for gpu in gpus.states() if gpu.celsius is not None]
    return max(found, default=None)


def _processes(proc: Path) -> Iterator[Path]:
    """Yield the folders of this process and of all its descendants, except those that end
    meanwhile.
    """
    left = [proc / "self"]
    while left:
        folder = left.pop()
        yield folder
        for task in _listed(folder / "task"):
            left += [proc / pid for pid in text_of(task / "children").split()]


class _CpuTime:
    """User and system time of this process and its descendants, including ended children."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._most = 0.0

    def read(self) -> Reading:
        """Return the time in seconds, never less than before: a child may end between two reads of
        the files.
        """
        ticks = 0
        for folder in _processes(self._proc):
            # a name may contain spaces and brackets
            fields = text_of(folder / "stat").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
        self._most = max(self._most, ticks / os.sysconf("SC_CLK_TCK"))
        return [((), self._most)]


def _resident_bytes(proc: Path) -> int:
    pages = [text_of(folder / "statm").split() for folder in _processes(proc)]
    return sum(int(each[1]) for each in pages if each) * os.sysconf("SC_PAGE_SIZE")


def _host_cpu(proc: Path) -> Reading:
    ticks = text_of(proc / "stat").partition("\n")[0].split()[1:]
    return [
        ((mode,), int(count) / os.sysconf("SC_CLK_TCK"))
        for mode, count in zip(MODES, ticks, strict=False)
    ]


def _memory(proc: Path, key: str) -> Reading:
    for line in text_of(proc / "meminfo").splitlines():
        name, _, amount = line.partition(":")
        if name == key:
            return [((), 1024 * int(amount.split()[0]))]
    return []


def _temperatures(sys: Path) -> Reading:
    found: dict[tuple[str, ...], float] = {}
    for zone in sorted(_listed(sys / "class" / "thermal"), key=str):
        millidegrees = text_of(zone / "temp")
        if zone.name.startswith("thermal_zone") and millidegrees.lstrip("-").isdecimal():
            name = text_of(zone / "type") or zone.name
            found[name if (name,) not in found else f"{name} {zone.name}",] = (
                int(millidegrees) / 1000
            )
    return found.items()


def _of_gpus(gpus: Gpus, read: Callable[[Gpu], float | None]) -> Reading:
    return [((str(gpu.index),), value) for gpu in gpus.states() if (value := read(gpu)) is not None]


def _of_folders(
    usages: Mapping[str, FolderUsage], read: Callable[[FolderUsage], int | None]
) -> Reading:
    return [
        ((name,), value) for name, usage in usages.items() if (value := read(usage)) is not None
    ]


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


REST_S: Final = 60.0  # between two counts of all files
REST_RATIO: Final = 50.0  # of the time that a count took, for a folder of very many files
BLOCK_BYTES: Final = 512  # of st_blocks, by POSIX


class FolderUsage:
    """The bytes of a folder's files on disk, counted from time to time, and the free bytes of its
    file system.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._now = now
        self._used: int | None = None
        self._next = -float("inf")
        self._counting = Lock()  # by one thread at a time; others get the last count

    def used_bytes(self) -> int | None:
        """Return the bytes on disk of all files below the folder, None if there is no folder."""
        if self._now() >= self._next and self._counting.acquire(blocking=False):
            try:
                begun = self._now()
                self._used = _bytes_below(self._folder) if self._folder.is_dir() else None
                took_s = self._now() - begun
                if self._used is not None:
                    self._next = begun + max(REST_S, REST_RATIO * took_s)
                else:
                    self._next = begun
            finally:
                self._counting.release()
        return self._used

    def free_bytes(self) -> int | None:
        """Return the bytes that this user can still write to its file system, None if there is no
        folder.
        """
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize


def _bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder, except those that cannot be read or disappear
    meanwhile.
    """
    count = 0
    left = [str(folder)]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        count += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
        except OSError:
            continue
    return count


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
    """Measures the load from its construction on. `own`: CPU seconds of this process and of its
    ended children.
    """

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
        now_s = self._busy_s()
        passed = self._clock() - start
        others = None
        if busy_s is not None and now_s is not None and passed > 0:
            others = max(0.0, now_s - busy_s - (self._own() - own_s)) / passed
        return MachineLoad(others, os.cpu_count() or 1, self._load_average)

    def _busy_s(self) -> float | None:
        """Return the seconds that all cores were busy, also for other guests of the same host."""
        busy_s = [seconds for (mode,), seconds in _host_cpu(self._proc) if mode not in IDLE]
        if busy_s:
            return math.fsum(busy_s)
        return None
