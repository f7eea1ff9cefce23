"""The picture of the README: figures of a report on several runs, side by side in one SVG, and the
machine.

python -m docs.tools.runs_picture RUN=LABEL... > docs/demo.svg

Runs that began on a busy machine are refused: their seconds are not those of a user.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from docs.tools.pictures import picture
from fedstrata.deploy.results import phases
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.score_curves import curves
from fedstrata.deploy.results.series import BUSY, load_of, series_of


def drawn(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Draw accuracy over global rounds, and beside it the mean seconds of a global round, of runs
    over each other.

    Raises ValueError for a run that began on a busy machine.
    """
    for run in runs:
        if load_of(run) > BUSY:
            raise ValueError(
                f"{run.id} began on a busy machine: load {load_of(run):.1f} a core. Repeat it "
                "there alone"
            )
    series = series_of(runs, names)
    accuracy = next(figure for figure in curves(series) if figure.name == "accuracy-rounds")
    budget = phases.budget(series)
    machines = dict.fromkeys(
        f"{run.manifest.get('platform')}, {run.manifest.get('cpus')} cores" for run in runs
    )
    note = (
        f"{'; '.join(machines)}; load before the runs: at most {max(map(load_of, runs)):.1f} a core"
    )
    title, text = f"{accuracy.title}. {budget.title}", f"{accuracy.text} {budget.text}"
    return picture([[accuracy, budget]], title, text, note=note)


if __name__ == "__main__":
    chosen = [argument.rpartition("=")[::2] for argument in sys.argv[1:]]
    try:
        print(
            drawn([Run(Path(folder)) for folder, _ in chosen], [label for _, label in chosen]),
            end="",
        )
    except ValueError as error:
        sys.exit(str(error))
