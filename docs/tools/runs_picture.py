"""The picture of the README: figures of a report on several runs, side by side in one SVG, and the machine.

python -m docs.tools.runs_picture RUN=LABEL... > docs/demo.svg

Runs that began on a busy machine are refused: their seconds are not those of a user.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.results import sections
from deploy.results.figures import Figure, text
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
    left, height = accuracy.width, max(accuracy.size[1], budget.size[1])
    beside = [text(2, 16, budget.title), *budget.elements]
    elements = [
        text(2, 16, accuracy.title),
        *accuracy.elements,
        f'<g transform="translate({left:g} 0)">',
        *beside,
        "</g>",
    ]
    machines = dict.fromkeys(f"{run.manifest.get('platform')}, {run.manifest.get('cpus')} cores" for run in runs)
    load = f"load before the runs: at most {max(map(load_of, runs)):.1f} a core"
    elements.append(text(2, height + 12, f"{'; '.join(machines)}; {load}", kind="soft"))
    title, size = f"{accuracy.title}. {budget.title}", (left + budget.width, height + 22)
    return Figure("runs", title, f"{accuracy.text} {budget.text}", size, elements, headed=False).file()


if __name__ == "__main__":
    chosen = [argument.rpartition("=")[::2] for argument in sys.argv[1:]]
    try:
        print(picture([Run(Path(folder)) for folder, _ in chosen], [label for _, label in chosen]), end="")
    except ValueError as error:
        sys.exit(str(error))
