"""The picture of the README: figures of a report on several runs, side by side in one SVG, and the machine.

python -m docs.tools.runs_picture RUN=LABEL... > docs/demo.svg

Runs that began on a busy machine are refused: their seconds are not those of a user.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deploy.results import sections
from deploy.results.figures import Drawing, Line, Mark, Text, svg
from deploy.results.run import Run
from deploy.results.sections import curves
from deploy.results.series import BUSY, load_of, series_of


def picture(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Draw accuracy over time, and beside it the mean seconds of a global round, of runs laid over each other.

    Raises ValueError for a run that began on a busy machine.
    """
    for run in runs:
        if load_of(run) > BUSY:
            raise ValueError(f"{run.id} began on a busy machine: load {load_of(run):.1f} a core. Repeat it there alone")
    series = series_of(runs, names)
    accuracy = next(figure for figure in curves(series) if figure.name == "accuracy-seconds")
    budget = sections.budget(series)
    drawing = arranged([[accuracy.page(), budget.page()]])
    width, height = drawing.size
    machines = dict.fromkeys(f"{run.manifest.get('platform')}, {run.manifest.get('cpus')} cores" for run in runs)
    load = f"load before the runs: at most {max(map(load_of, runs)):.1f} a core"
    note = Text(2, height + 12, f"{'; '.join(machines)}; {load}", kind="soft")
    drawing = Drawing((width, height + 22), [*drawing.marks, note])
    return svg(drawing, f"{accuracy.title}. {budget.title}", f"{accuracy.text} {budget.text}")


def arranged(rows: Sequence[Sequence[Drawing]]) -> Drawing:
    """Return one drawing of several, in rows."""
    marks, width, down = list[Mark](), 0.0, 0.0
    for row in rows:
        across = 0.0
        for each in row:
            marks += [_moved(mark, across, down) for mark in each.marks]
            across += each.size[0]
        width, down = max(width, across), down + max(each.size[1] for each in row)
    return Drawing((width, down), marks)


def _moved(mark: Mark, across: float, down: float) -> Mark:
    if isinstance(mark, Line):
        return replace(mark, points=[(x + across, y + down) for x, y in mark.points])
    return replace(mark, x=mark.x + across, y=mark.y + down)


if __name__ == "__main__":
    chosen = [argument.rpartition("=")[::2] for argument in sys.argv[1:]]
    try:
        print(picture([Run(Path(folder)) for folder, _ in chosen], [label for _, label in chosen]), end="")
    except ValueError as error:
        sys.exit(str(error))
