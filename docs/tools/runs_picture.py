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
    left, right = accuracy.page(), budget.page()
    (across, _), height = left.size, max(left.size[1], right.size[1])
    machines = dict.fromkeys(f"{run.manifest.get('platform')}, {run.manifest.get('cpus')} cores" for run in runs)
    load = f"load before the runs: at most {max(map(load_of, runs)):.1f} a core"
    note = Text(2, height + 12, f"{'; '.join(machines)}; {load}", kind="soft")
    drawing = Drawing(
        (across + right.size[0], height + 22), [*left.marks, *(_moved(mark, across) for mark in right.marks), note]
    )
    return svg(drawing, f"{accuracy.title}. {budget.title}", f"{accuracy.text} {budget.text}")


def _moved(mark: Mark, across: float) -> Mark:
    if isinstance(mark, Line):
        return replace(mark, points=[(x + across, y) for x, y in mark.points])
    return replace(mark, x=mark.x + across)


if __name__ == "__main__":
    chosen = [argument.rpartition("=")[::2] for argument in sys.argv[1:]]
    try:
        print(picture([Run(Path(folder)) for folder, _ in chosen], [label for _, label in chosen]), end="")
    except ValueError as error:
        sys.exit(str(error))
