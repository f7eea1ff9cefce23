"""What a sweep measures in its finished runs, beside the paper's figures.

A measure is a function of the rows of a run's rounds.csv. `deploy.sweeps.output` has the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import mean
from typing import Final, TypeAlias

from fedstrata.cloud.records import HONEST, GlobalRoundRecord
from fedstrata.common.experiment.attackers import SUCCESS
from fedstrata.deploy.console.tabular import Spread
from fedstrata.deploy.results.run import Run, largest_epsilon
from fedstrata.deploy.sweeps.grid import Grid, PaperFigure, SweepCell, axis_of
from fedstrata.deploy.sweeps.sweep_schema import SCALES, UNITS, Measure

PERCENT: Final = 100.0
OF_DEVICES: Final = {"devices": "mean", "samples": "score"}

Rows: TypeAlias = Sequence[GlobalRoundRecord]


# Measures


def _rounds(done: Rows, measure: Measure) -> float:
    return float(done[-1].global_round)


def _seconds(done: Rows, measure: Measure) -> float:
    return done[-1].elapsed_s


def _bytes(done: Rows, measure: Measure) -> float:
    """Return the bytes of some global rounds, of the measure's tier and direction."""
    total = 0
    for row in done:
        for column, count in row.bytes_.items():
            tier, way = column.removesuffix("_bytes").rsplit("_", 1)
            if measure.tier in ("", tier) and measure.direction in ("", way):
                total += count
    return float(total)


def _steps(done: Rows, measure: Measure) -> float:
    return float(sum(row.sgd_steps for row in done))


def _path_steps(done: Rows, measure: Measure) -> float:
    return float(sum(row.path_steps for row in done))


def _epsilon(done: Rows, measure: Measure) -> float | None:
    return largest_epsilon(done)


LESS: Final = ("spread", "attack")  # a smaller one is better
# their columns
AGAINST: Final = {"honest": f"{HONEST}_mean", "honest_worst": f"{HONEST}_worst", "attack": SUCCESS}


COSTS: Final[Mapping[str, Callable[[Rows, Measure], float | None]]] = {
    "rounds": _rounds,
    "seconds": _seconds,
    "bytes": _bytes,
    "steps": _steps,
    "path_steps": _path_steps,
    "epsilon": _epsilon,
}


def value_of(rows: Rows, measure: Measure, *, target: float | None, rounds: int) -> float | None:
    """Return a measure of a run in the unit of `unit_of`; None if the run has none, as it did not
    reach the target.

    `target`: the accuracy to reach. `rounds`: the global rounds of its experiment.
    """
    if measure.name == "accuracy":
        found = _accuracy(rows, measure, rounds)
        return found and PERCENT * found
    last = len(rows) - 1 if measure.until == "end" else reached(rows, target)
    if measure.name == "reached":
        return float(last is not None)
    if last is None or last < 0:
        return None
    cost = COSTS[measure.name](rows[: last + 1], measure)
    return cost and cost / SCALES.get(unit_of(measure), 1.0)


def reached(rows: Rows, target: float | None) -> int | None:
    """Return the place of the first row whose accuracy reached the target, None without one."""
    if target is None:
        return None
    for i, row in enumerate(rows):
        if row.accuracy is not None and row.accuracy >= target:
            return i
    return None


def unit_of(measure: Measure) -> str:
    """Return the unit of a measure's values."""
    if measure.relation == "speed_up":
        return ""
    if measure.name == "accuracy":
        if not measure.against:
            return "%"
        return "points"
    return measure.unit or UNITS.get(measure.name, ("",))[0]


def sign_of(measure: Measure) -> float:
    """Return 1 if a larger value of a measure is the better one, -1 if a smaller one is, before any
    comparison.
    """
    if measure.name in ("accuracy", "reached") and measure.of not in LESS:
        return 1.0
    return -1.0


def _accuracy(rows: Rows, measure: Measure, rounds: int) -> float | None:
    """Return an accuracy as a fraction. That of a round is the last one evaluated until then."""
    until = rounds if measure.round is None else measure.round
    if until > rounds:
        return None
    values = [_of(row, measure) for row in rows if row.global_round <= until]
    known = [value for value in values if value is not None]
    if not known:
        return None
    if measure.best:
        best = min if measure.of in LESS else max
        return best(known)
    return mean(known[-(measure.last or 1) :])


def _of(row: GlobalRoundRecord, measure: Measure) -> float | None:
    """Return a row's accuracy over samples, or a statistic of the devices' accuracies."""
    if measure.of == "samples" and not measure.personalised:
        return row.accuracy
    if measure.of in AGAINST:
        return row.further(AGAINST[measure.of])
    return row.of_devices(OF_DEVICES.get(measure.of, measure.of), personalised=measure.personalised)


# Results


class SweepResults:
    """The finished runs of a sweep by the digests of their experiments, their values, beside the
    paper's.
    """

    def __init__(self, grid: Grid, runs: Mapping[str, Run]) -> None:
        self.grid = grid
        self.runs = runs
        self._cells = {tuple(cell.values.values()): cell for cell in grid.rows}
        self._known: dict[tuple[str, str], float | None] = {}

    def runs_of(self, cell: SweepCell) -> dict[int, Run]:
        """Return a cell's finished runs by seed."""
        known = {seed: one.digest for seed, one in cell.experiments.items()}
        return {seed: self.runs[each] for seed, each in known.items() if each in self.runs}

    def values(self, cell: SweepCell, measure: Measure) -> dict[int, float]:
        """Return a measure of a cell's finished runs by seed; without those that have none, or
        nothing to compare.
        """
        mine = self._values(cell, measure)
        if not measure.against:
            return mine
        axis = axis_of(self.grid.file, measure.against)
        reference = self._cells.get(tuple({**cell.values, axis: measure.against}.values()))
        theirs = self._values(reference, measure) if reference is not None else {}
        pairs = {seed: (value, theirs[seed]) for seed, value in mine.items() if seed in theirs}
        if measure.relation == "speed_up":
            return {seed: other / value for seed, (value, other) in pairs.items() if value}
        return {seed: value - other for seed, (value, other) in pairs.items()}

    def spread(self, cell: SweepCell, measure: Measure) -> Spread | None:
        """Return the mean and the deviation over the seeds, None without a value."""
        return Spread.of(list(self.values(cell, measure).values()))

    def figure(self, cell: SweepCell, measure: Measure) -> PaperFigure | None:
        """Return the paper's figure, None if it has none."""
        return self.grid.figures.get((tuple(cell.values.values()), measure.label))

    def difference(self, cell: SweepCell, measure: Measure) -> float | None:
        """Return our mean minus the paper's figure, 0 within its range; None without one of
        them.
        """
        ours = self.spread(cell, measure)
        figure = self.figure(cell, measure)
        if ours is None or figure is None:
            return None
        return figure.apart(ours.mean)

    @cached_property
    def ranked(self) -> Sequence[Measure]:
        """The measures of which the paper has a figure."""
        labels = {label for _, label in self.grid.figures}
        return [measure for measure in self.grid.measures if measure.label in labels]

    @property
    def compared(self) -> Sequence[Measure]:
        """Those whose figures are compared with the paper's: none of other experiments than the
        paper's.
        """
        if self.grid.is_whole:
            return self.ranked
        return []

    @property
    def lacking(self) -> list[SweepCell]:
        """The cells whose runs are not all finished."""
        return [cell for cell in self.grid.cells if len(self.runs_of(cell)) < len(cell.experiments)]

    def _values(self, cell: SweepCell, measure: Measure) -> dict[int, float]:
        """Return the same before the difference."""
        if cell.members:
            every = [self._values(each, measure) for each in cell.members]
            sign = sign_of(measure)
            return max(filter(None, every), key=lambda each: sign * mean(each.values()), default={})
        found = {}
        target = measure.target if measure.target is not None else cell.target
        for seed, run in self.runs_of(cell).items():
            key = run.id, f"{measure.label} {target}"
            if key not in self._known:
                self._known[key] = value_of(
                    run.rounds, measure, target=target, rounds=run.experiment.rounds
                )
            value = self._known[key]
            if value is not None:
                found[seed] = value
        return found
