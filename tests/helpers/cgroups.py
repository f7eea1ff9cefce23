"""A cgroup of a benchmark's own, of either version: what the processes in it take, those that have
ended included.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

_ROOT: Final = Path("/sys/fs/cgroup")
_ENTER: Final = """\
import os, sys
count = int(sys.argv[1])
for place in sys.argv[2 : 2 + count]:
    open(place, "w").write(str(os.getpid()))
os.execv(sys.argv[2 + count], sys.argv[2 + count :])
"""
_LOOK_S: Final = 0.1


class ControlGroup:
    """A group of processes, of version 1 below this process's own. Needs root. Its end kills what
    is left in it.
    """

    def __init__(self, name: str, limit_bytes: int | None = None) -> None:
        """Create the group, with a limit of memory if there is one."""
        one = (_ROOT / "memory").exists()
        self._memory = _below_own("memory", name) if one else _ROOT / name
        self._cpu = _below_own("cpuacct", name) if one else self._memory
        self._folders = {self._memory, self._cpu}
        for folder in self._folders:
            folder.mkdir()
        if limit_bytes is not None:
            (self._memory / ("memory.limit_in_bytes" if one else "memory.max")).write_text(
                str(limit_bytes)
            )
        self._counted = ("total_rss", "total_shmem") if one else ("anon", "shmem")
        self._peak = self._memory / ("memory.max_usage_in_bytes" if one else "memory.peak")
        self._one = one

    def entering(self, words: Sequence[str | Path]) -> list[str]:
        """Return the command that runs the command `words`, whose first is a path, inside the
        group.
        """
        places = {str(folder / "cgroup.procs") for folder in self._folders}
        return [sys.executable, "-c", _ENTER, str(len(places)), *places, *map(str, words)]

    def memory_bytes(self) -> int:
        """Return the bytes of processes and shared memory, which cannot be dropped as a file's
        pages can.
        """
        facts = _facts(self._memory / "memory.stat")
        return sum(facts[name] for name in self._counted)

    def peak_bytes(self) -> int:
        """Return the most bytes so far, files' pages included."""
        return int(self._peak.read_text())

    def cpu_s(self) -> float:
        """Return the CPU seconds so far."""
        if self._one:
            return int((self._cpu / "cpuacct.usage").read_text()) / 1e9
        return _facts(self._cpu / "cpu.stat")["usage_usec"] / 1e6

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while left := (self._memory / "cgroup.procs").read_text().split():
            for process in left:
                try:
                    os.kill(int(process), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(_LOOK_S)
        for folder in self._folders:
            folder.rmdir()


def _below_own(controller: str, name: str) -> Path:
    """Return the folder of a group below this process's own, of version 1."""
    own = re.search(rf"^\d+:{controller}:/(.*)$", Path("/proc/self/cgroup").read_text(), re.M)
    assert own is not None, controller
    return _ROOT / controller / own[1] / name


def _facts(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number a line."""
    return {
        name: int(number)
        for name, number in (line.split() for line in file.read_text().splitlines())
    }
