"""The phases of global rounds in a report: bars of seconds, and their means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from statistics import fmean
from typing import Final

from fedstrata.common.protocol.round_state import GLOBAL_PHASES
from fedstrata.deploy.console.tabular import Column, Spread, Table
from fedstrata.deploy.results import charts
from fedstrata.deploy.results.charts import Axis, Curve
from fedstrata.deploy.results.device_scores import GLOBAL_ROUND
from fedstrata.deploy.results.figures import PHASES, Figure
from fedstrata.deploy.results.run import Run, seconds_of
from fedstrata.deploy.results.series import Series

SECONDS: Final = (
    "The phases of a global round, as measured at the cloud. record: writing the results of the "
    "previous round. dispatch: until all its children have the model. train: until the first "
    "result. wait: until the last result. collect: until that result's model is received. "
    "aggregate: mixing the models. evaluate: waiting for the last evaluation if it takes longer "
    "than a global round. The phases add up to the global round."
)
TITLE: Final = "Seconds of a global round, mean ± standard deviation (n - 1) over runs"
_SUM: Final = "sum of the phases"
_PARTS: Final = [(PHASES[phase], phase) for phase in GLOBAL_PHASES]
POSITIVE: Final = (0.0, float("inf"))


def budget(series: Sequence[Series], key: str = "") -> Figure:
    """Return a figure of the phases of each series' mean global round; `key`: the end of its
    name.
    """
    rows: dict[str, list[float]] = {}
    for each in series:
        seconds = [_a_round(run) for run in each.counted]
        rows[each.label] = [0.0] * len(GLOBAL_PHASES)
        if seconds:
            rows[each.label] = [fmean(map(itemgetter(phase), seconds)) for phase in GLOBAL_PHASES]
    runs = [run for each in series for run in each.runs]
    axis = Axis("time of a global round", seconds_of(runs))
    return charts.bars(f"budget{key}", "Seconds of a global round, mean", _PARTS, rows, axis=axis)


def budgets(run: Run) -> Figure:
    """Return a figure of the seconds of each phase by global round, of phases that take any."""
    lines = {}
    for phase, colour in PHASES.items():
        points = [(float(row.global_round), row.phases[phase]) for row in run.rounds]
        if any(seconds > 0 for _, seconds in points):
            lines[phase] = Curve(points, style=(int(colour[1:]), 0))
    title = f"Seconds of each global round by phase, {run.ending}"
    y = Axis("time", seconds_of([run]), bounds=POSITIVE)
    return charts.curves(run.file_name("seconds"), title, lines, x=GLOBAL_ROUND, y=y)


def mean_phases(series: Sequence[Series], key: str = "") -> Table:
    """Return a table of the seconds of a global round by phase and series: mean and deviation over
    the runs. `key`: the end of its name.
    """
    rounds = [list(map(_a_round, each.counted)) for each in series]
    rows = []
    for phase in (*GLOBAL_PHASES, _SUM):
        rows.append([phase, *(Spread.of(list(map(itemgetter(phase), each))) for each in rounds)])
    columns = [Column("phase", text=True)]
    columns += [Column(each.label, seconds_of(each.runs), 4) for each in series]
    return Table(f"phases{key}", TITLE, columns, rows)


def _a_round(run: Run) -> dict[str, float]:
    """Return the seconds of a run's mean global round by phase, and their sum."""
    count = max(len(run.rounds), 1)
    found = {}
    for phase in GLOBAL_PHASES:
        found[phase] = sum(row.phases[phase] for row in run.rounds) / count
    return found | {_SUM: sum(found.values())}
