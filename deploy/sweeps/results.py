"""Results of a sweep: the values of each cell's finished runs, beside the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import mean

from deploy.console.tabular import Spread
from deploy.results.run import Run
from deploy.sweeps.figures import PaperFigure
from deploy.sweeps.grid import Grid, SweepCell, axis_of
from deploy.sweeps.measuring import sign_of, value_of
from deploy.sweeps.schema import Measure


class SweepResults:
    """The finished runs of a sweep by the digests of their experiments, and their values."""

    def __init__(self, grid: Grid, runs: Mapping[str, Run]) -> None:
        self.grid = grid
        self.runs = runs
        self._cells = {tuple(cell.values.values()): cell for cell in grid.rows}
        self._known: dict[tuple[str, str], float | None] = {}

    def runs_of(self, cell: SweepCell) -> dict[int, Run]:
        """Return a cell's finished runs by seed."""
        found = {seed: self.runs.get(experiment.digest) for seed, experiment in cell.experiments.items()}
        return {seed: run for seed, run in found.items() if run is not None}

    def values(self, cell: SweepCell, measure: Measure) -> dict[int, float]:
        """Return a measure of a cell's finished runs by seed; without those that have none, or nothing to compare."""
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

    @cached_property
    def ranked(self) -> Sequence[Measure]:
        """The measures of which the paper has a figure."""
        labels = {label for _, label in self.grid.figures}
        return [measure for measure in self.grid.measures if measure.label in labels]

    @property
    def compared(self) -> Sequence[Measure]:
        """Those whose figures are compared with the paper's: none in the small form."""
        return [] if self.grid.small else self.ranked

    def _values(self, cell: SweepCell, measure: Measure) -> dict[int, float]:
        """Return the same before the difference."""
        if cell.members:
            several = [values for values in (self._values(each, measure) for each in cell.members) if values]
            return max(several, key=lambda values: sign_of(measure) * mean(values.values()), default={})
        found = {}
        target = measure.target if measure.target is not None else cell.target
        for seed, run in self.runs_of(cell).items():
            key = run.id, f"{measure.label} {target}"
            if key not in self._known:
                self._known[key] = value_of(run.rounds, measure, target=target, rounds=run.global_rounds)
            value = self._known[key]
            if value is not None:
                found[seed] = value
        return found
