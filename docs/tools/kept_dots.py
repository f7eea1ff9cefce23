"""The charts of kept runs: a row for each method with its mean, its deviation, and the paper's
figure.

They have the seconds to the target of runs in virtual time, the global rounds to the target of
others, and the accuracy of sweeps without a target; beside that the success of attacks, if it is
measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fedstrata.common.experiment.reading import read
from fedstrata.deploy.console.shipped import shipped_sweeps
from fedstrata.deploy.console.tabular import Spread, show
from fedstrata.deploy.results.cells import ALIKE, BETWEEN
from fedstrata.deploy.results.charts import BELOW
from fedstrata.deploy.results.figures import COLOURS, LETTER, SERIES, Canvas, Figure
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.series import Series
from fedstrata.deploy.sweeps.grid import Grid, load
from fedstrata.deploy.sweeps.measures import SweepResults
from fedstrata.deploy.sweeps.sweep_schema import FULL, Measure, SweepFile

AXIS: Final = 290.0  # points: width of the axis
ROW: Final = 14.0
REDUCED: Final = "reduced"  # the size, at the end of a folder's name
ATTACK: Final = "attack"  # the measure of an attack's success
NO_SERIES: Final = "s6"  # of the best of several methods


@dataclass(frozen=True, slots=True)
class DotRow:
    """A method's row. `count`: its seeds with a value, `of`: all; `paper`: the paper's figure on
    the same scale.
    """

    label: str
    colour: str
    spread: Spread
    count: int
    of: int
    paper: float | None

    def text(self, unit: str) -> str:
        """Return the numbers of the row."""
        deviation = "" if self.spread.deviation is None else f" ± {show(self.spread.deviation, 1)}"
        seeds = f"{self.count} of {self.of}" if self.count < self.of else f"{self.of}"
        return f"{show(self.spread.mean, 1)}{deviation} {unit}, {seeds} seed{'s' * (self.of > 1)}"


def dots(folder: str, series: Sequence[Series]) -> list[Figure]:
    """Return the charts of a task's series, the kept runs of the sweep of this folder; none without
    any value.
    """
    runs = [run for each in series for run in each.runs]
    colours = {_cell_of(run): f"s{_rank(run) % SERIES}" for run in runs}
    grid = _grid(folder, runs)
    results = SweepResults(grid, _by_digest(grid, runs))
    measures = [_measure(grid, runs), *(each for each in grid.measures if each.of == ATTACK)]
    charts = (_chart(results, measure, colours) for measure in measures)
    return [chart for chart in charts if chart is not None]


def _chart(results: SweepResults, measure: Measure, colours: Mapping[str, str]) -> Figure | None:
    """Return the chart of a measure, None without any value."""
    grid = results.grid
    rows = list(_rows(results, measure, colours))
    if not rows:
        return None
    name, unit = {"seconds": ("Simulated seconds", "s"), "rounds": ("Global rounds", "rounds")}.get(
        measure.name, (f"Accuracy, {measure.label}", "%")
    )
    if measure.of == ATTACK:
        name = measure.label.capitalize()
    targets = {
        cell.target for cell in grid.cells if cell.target is not None and measure.name != "accuracy"
    }
    until = f" to {100 * min(targets):g} %" if len(targets) == 1 else ""
    marked = ""
    if any(row.paper is not None for row in rows):
        scaled = measure.name == "seconds"
        marked = (
            f"; tick: the paper's, with {_reference(grid)}'s at ours"
            if scaled
            else "; tick: the paper's"
        )
    title = f"{name}{until}, mean and deviation of the seeds{marked}"
    text = "; ".join(f"{row.label}: {row.text(unit)}" for row in rows)
    return Figure(
        f"{measure.of}-{measure.name}-dots",
        title,
        text,
        lambda: _draw(rows, unit, from_0=measure.name != "accuracy"),
    )


def _grid(folder: str, runs: Sequence[Run]) -> Grid:
    """Return the grid of the sweep with this folder, as far as it is that of the runs."""
    small = folder.endswith(f"-{REDUCED}")
    stem = folder.removesuffix(f"-{REDUCED}") if small else folder
    path = next(path for name, path in shipped_sweeps().items() if name.rpartition("/")[2] == stem)
    cells = [f"{BETWEEN}{_cell_of(run)}{BETWEEN}" for run in runs]
    axes = SweepFile.model_validate(read(path)).axes
    names = [(axis, value) for axis, values in axes.items() for value in values]
    only = [
        f"{axis}={name}"
        for axis, name in names
        if any(f"{BETWEEN}{name}{BETWEEN}" in cell for cell in cells)
    ]
    return load(
        path, size=REDUCED if small else FULL, only=only, seeds=max(run.seed for run in runs)
    )


def _cell_of(run: Run) -> str:
    """Return the name of a run's cell, of several the first."""
    return run.cell.partition(ALIKE)[0]


def _rank(run: Run) -> int:
    """Return the place of a kept run's method among all of its sweep, which gives its colour."""
    assert run.place is not None
    return run.place.rank


def _by_digest(grid: Grid, runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by the digests of their cells' experiments: their own may have settings of a
    command, too.
    """
    known = {
        (cell.label, seed): one.digest
        for cell in grid.cells
        for seed, one in cell.experiments.items()
    }
    return {known[_cell_of(run), run.seed]: run for run in runs}


def _measure(grid: Grid, runs: Sequence[Run]) -> Measure:
    """Return the measure that the chart shows."""
    if all(cell.target is not None for cell in grid.cells):
        simulated = all(run.simulated for run in runs)
        cost = Measure(name="seconds") if simulated else Measure(name="rounds")
        return next((each for each in grid.measures if each.name == cost.name), cost)
    plain = [
        each
        for each in grid.measures
        if each.name == "accuracy" and each.of != ATTACK and not each.against
    ]
    return next((each for each in plain if each in SweepResults(grid, {}).ranked), plain[-1])


def _reference(grid: Grid) -> str:
    """Return the value of the axis with which the paper's seconds are compared."""
    return grid.file.paper.baseline or grid.file.baseline


def _rows(results: SweepResults, measure: Measure, colours: Mapping[str, str]) -> Iterator[DotRow]:
    grid = results.grid
    in_s = measure.model_copy(update={"unit": "s"}) if measure.name == "seconds" else measure
    factor = _factor(results, measure, in_s) if measure.name == "seconds" else 1.0
    shown = [cell for cell in grid.rows if cell.label in colours or cell.members]
    apart = [axis for axis in grid.axes if len({cell.values[axis] for cell in shown}) > 1]
    for cell in shown:
        spread, figure = results.spread(cell, in_s), results.figure(cell, measure)
        label = BETWEEN.join(cell.values[axis] for axis in apart or [grid.file.ranked])
        if spread is not None:
            paper = None if figure is None or factor is None else factor * figure.mean
            of = max(len(results.runs_of(each)) for each in cell.members or (cell,))
            name = f"{label}, the best" if cell.members else label
            colour = colours.get(cell.label, NO_SERIES)
            yield DotRow(name, colour, spread, len(results.values(cell, in_s)), of, paper)


def _factor(results: SweepResults, measure: Measure, in_s: Measure) -> float | None:
    """Return our seconds over the paper's, of the paper's baseline: its machines and links are
    others; or None.
    """
    axis = results.grid.file.ranked
    for cell in results.grid.rows:
        if cell.values[axis] == _reference(results.grid):
            ours, figure = results.spread(cell, in_s), results.figure(cell, measure)
            return None if ours is None or figure is None else ours.mean / figure.mean
    return None


def _draw(rows: Sequence[DotRow], unit: str, *, from_0: bool) -> Canvas:
    names = [row.label for row in rows]
    numbers = [row.text(unit) for row in rows]
    left = 8 + LETTER * max(map(len, names))
    right = 8 + LETTER * max(map(len, numbers))
    canvas = Canvas(left + AXIS + right, ROW * len(rows) + BELOW + 4)
    axes = canvas.axes()
    canvas.place(axes, left=left, top=4, right=right, bottom=BELOW)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel=unit)
    axes.set_yticks(range(len(rows)), names)
    axes.grid(visible=True, axis="x")
    for y, row in enumerate(rows):
        axes.plot(_ends(row, paper=False), [y, y], color=COLOURS[row.colour])
        if row.paper is not None:
            (tick,) = axes.plot(
                row.paper, y, "|", color=COLOURS["ink"], markersize=9, markeredgewidth=1.3
            )
            canvas.describe(tick, [f"the paper's: {show(row.paper, 1)} {unit}"])
        (dot,) = axes.plot(
            row.spread.mean, y, "o", color=COLOURS[row.colour], markersize=5, clip_on=False
        )
        canvas.describe(dot, [f"{row.label}: {numbers[y]}"])
        axes.annotate(
            numbers[y], (1, y), (6, 0), ("axes fraction", "data"), "offset points", va="center"
        )
    ends = [end for row in rows for end in _ends(row)]
    low = 0.0 if from_0 else 10 * (min(ends) // 10)  # percent
    axes.set_xlim(low, max(ends) + 0.03 * (max(ends) - low))
    return canvas


def _ends(row: DotRow, *, paper: bool = True) -> list[float]:
    """Return the least and the largest number of a row."""
    apart = row.spread.deviation or 0.0
    found = [row.spread.mean - apart, row.spread.mean + apart]
    found += [row.paper] if paper and row.paper is not None else []
    return [min(found), max(found)]
