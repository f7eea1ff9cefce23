"""`make bench NAME=sweeps`: runs per hour of a sweep without a network, one at a time and one per
core.

A part of the study: two layers, FedAvg, as many seeds as give each core `RUNS` runs. The tables
must be equal.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from fedstrata.device.pool.pool import cores
from tests.helpers.commands import command

RUNS: Final = 4
PART: Final = ("--only", "images=clean", "--only", "split=Dirichlet 0.1", "--only", "method=FedAvg")


def measure(jobs: int, seeds: int, runs: Path) -> tuple[str, float, float]:
    """Return the table without its seconds, the wall seconds and the CPU seconds of a sweep."""
    words = [
        "sweep",
        "study/two",
        *PART,
        "--direct",
        "--seeds",
        seeds,
        "--jobs",
        jobs,
        "--runs",
        runs,
        "--format",
        "csv",
    ]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command(*map(str, words)), stdout=subprocess.PIPE, text=True, check=True)
    wall_s, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    head, row = (line.split(",") for line in done.stdout.splitlines())
    table = ",".join(
        cell for name, cell in zip(head, row, strict=True) if not name.startswith("time")
    )
    return table, wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print both sweeps."""
    most, seeds = cores(), RUNS * cores()
    print(f"{platform.machine()}, {most} cores, load {os.getloadavg()[0]:.1f}; {seeds} runs")
    found = {}
    with tempfile.TemporaryDirectory() as home:
        for jobs in (1, most):
            found[jobs] = measure(jobs, seeds, Path(home) / str(jobs))
            _, wall_s, cpu_s = found[jobs]
            print(
                f"{jobs} at once: {3600 * seeds / wall_s:.0f} runs per hour, {cpu_s / seeds:.1f} "
                "CPU s each"
            )
    assert found[1][0] == found[most][0]
    print(f"the same tables; {found[1][1] / found[most][1]:.2f} times the runs per hour")


if __name__ == "__main__":
    main()
