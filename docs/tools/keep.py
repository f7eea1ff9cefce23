"""Add the finished runs of a sweep's folder to the table of its kept runs, also those of another
commit.

    python -m docs.tools.keep runs/tempo-table1-reduced docs/results/tempo-table1-reduced

The cells and the axes are those that the sweep left in the folder, in `sweep.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fedstrata.deploy.results.cells import CellOrder
from fedstrata.deploy.results.kept import keep
from fedstrata.deploy.results.kept_table import SWEEP
from fedstrata.deploy.results.run import Run, State, folders


def add(source: Path, table: Path) -> list[Run]:
    """Add the runs of a sweep's folder to a table; return them. Raises ValueError for a folder
    without axes.
    """
    order = CellOrder.read(json.loads((source / SWEEP).read_text(encoding="utf-8")))
    if order is None:
        raise ValueError(f"{source / SWEEP}: no axes of a sweep")
    runs = [run for run in map(Run, folders(source)) if run.state is State.FINISHED]
    keep([(run, run.cell) for run in runs], table, order)
    return runs


if __name__ == "__main__":
    for found in add(Path(sys.argv[1]), Path(sys.argv[2])):
        print(found.cell, found.seed, found.id)
