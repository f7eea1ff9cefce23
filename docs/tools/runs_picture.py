"""The picture of the README: figures of a report on several runs, side by side in one SVG.

python -m docs.tools.runs_picture RUN=LABEL... > docs/demo.svg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.report import sections
from deploy.report.curves import curves
from deploy.report.figures import Figure
from deploy.runs.groups import series_of
from deploy.runs.run import Run


def picture(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Draw accuracy over time, and beside it the mean seconds of a global round, of runs laid over each other."""
    series = series_of(runs, names)
    accuracy = next(figure for figure in curves(series) if figure.name == "accuracy-seconds")
    budget = sections.budget(series)
    left, height = accuracy.size[0], max(accuracy.size[1], budget.size[1])
    elements = [*accuracy.elements, f'<g transform="translate({left:g} 0)">', *budget.elements, "</g>"]
    size = (left + budget.size[0], height)
    return Figure("runs", f"{accuracy.title}. {budget.title}", f"{accuracy.text} {budget.text}", size, elements).file()


if __name__ == "__main__":
    chosen = [argument.rpartition("=")[::2] for argument in sys.argv[1:]]
    print(picture([Run(Path(folder)) for folder, _ in chosen], [label for _, label in chosen]), end="")
