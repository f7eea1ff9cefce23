"""`make bench NAME=sweeps`: runs per hour of a sweep without a network, one at a time and one per
core.

A part of the study: two layers, FedAvg, as many seeds as give each core `RUNS` runs. The tables
must be equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedstrata.device.pool.pool import cores
from tests.bench.running import Clock, Table, folder, output, run

RUNS: Final = 4
PART: Final = ("--only", "images=clean", "--only", "split=Dirichlet 0.1", "--only", "method=FedAvg")


def measure(table: Table, jobs: int, seeds: int, runs: Path) -> tuple[list[str], float]:
    """Print the figures of a sweep; return its table without its seconds, and its wall seconds."""
    words = ["sweep", "study/two", *PART, "--direct", "--seeds", seeds, "--jobs", jobs]
    with Clock() as clock:
        text = output(*map(str, words), "--runs", runs, "--format", "csv")
    table.add(jobs, f"{3600 * seeds / clock.s:.0f}", f"{clock.cpu_s / seeds:.1f}")
    head, row = (line.split(",") for line in text.splitlines())
    cells = zip(head, row, strict=True)
    return [cell for name, cell in cells if not name.startswith("time")], clock.s


def main() -> None:
    """Print both sweeps."""
    most = cores()
    seeds = RUNS * most
    table = Table("at once", "runs per hour", "CPU s each", title=f"{seeds} runs")
    with folder() as home:
        one, one_s = measure(table, 1, seeds, home / "1")
        all_, all_s = measure(table, most, seeds, home / "all")
    assert one == all_
    print(f"the same tables; {one_s / all_s:.2f} times the runs per hour")


if __name__ == "__main__":
    run(main)
