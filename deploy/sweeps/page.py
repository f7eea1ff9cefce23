"""A sweep's results as a page of HTML: its tables, the accuracies by global round, the verdicts, the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from common.experiment.training import Score
from deploy.console.tabular import Cell, Column, Table
from deploy.results.charts import Curve, curves
from deploy.results.device_scores import GLOBAL_ROUND, score_axis
from deploy.results.figures import DASHES, SERIES, Point
from deploy.results.page import Page
from deploy.results.run import Run, seconds_of
from deploy.results.sections import mean_curve
from deploy.sweeps.grid import Grid, SweepCell
from deploy.sweeps.output import notes
from deploy.sweeps.results import SweepResults
from deploy.sweeps.tables import by_table

LINES_MOST: Final = 12  # of a chart


def page_of(results: SweepResults) -> Page:
    """Return the page."""
    page, grid = Page(), results.grid
    page.add_heading(1, grid.title)
    for table, cells in by_table(results):
        page.add_table(table)
        means = {cell.label: mean_curve([*map(_points, results.runs_of(cell).values())]) for cell in cells}
        lines = {label: line for label, line in _styled(grid, cells, means).items() if line.points}
        if 0 < len(lines) <= LINES_MOST:
            title = "Test accuracy, %, mean and standard deviation over the seeds"
            name, y = f"{table.name}-accuracy", score_axis(Score())
            page.add_figures([curves(name, title, lines, x=GLOBAL_ROUND, y=y)], kind="curves")
    page.add_heading(2, "Comparison")
    for line in notes(results):
        page.add_paragraph(line)
    page.add_heading(2, "Runs")
    page.add_table(_runs(results), folded=True)
    return page


def _styled(grid: Grid, cells: Sequence[SweepCell], lines: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the lines with a colour for each value of the ranked axis, and a dash pattern for the other values."""
    axis = grid.file.ranked
    rest = {cell.label: tuple(value for key, value in cell.values.items() if key != axis) for cell in cells}
    colours = list(dict.fromkeys(cell.values[axis] for cell in cells))
    dashes = list(dict.fromkeys(rest.values()))
    if len(colours) > SERIES or len(dashes) > len(DASHES):
        return dict(lines)
    styles = {cell.label: (colours.index(cell.values[axis]), dashes.index(rest[cell.label])) for cell in cells}
    return {label: replace(line, style=styles[label]) for label, line in lines.items()}


def _points(run: Run) -> dict[int, Point]:
    """Return a run's accuracies by global round."""
    return {row.global_round: (float(row.global_round), row.accuracy) for row in run.rounds if row.accuracy is not None}


def _runs(results: SweepResults) -> Table:
    rows: list[list[Cell]] = [
        [cell.label, seed, run.id, run.seconds, str(run.path)]
        for cell in results.grid.cells
        for seed, run in results.runs_of(cell).items()
    ]
    texts = [Column("cell", text=True), Column("seed"), Column("run", text=True)]
    texts.append(Column("time", seconds_of(results.runs.values())))
    return Table("runs", "Finished runs", [*texts, Column("folder", text=True)], rows)
