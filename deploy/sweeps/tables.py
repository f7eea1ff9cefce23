"""The tables of a sweep: means and deviations over the seeds, ours and the paper's.

With a paper's figures each value has three parts: ours, the paper's, and their difference. They are lines of a row if
the table has axes as columns, else columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from deploy.console.tabular import Cell, Column, Table
from deploy.sweeps.grid import Grid, SweepCell, label_of
from deploy.sweeps.measuring import column_of
from deploy.sweeps.results import SweepResults
from deploy.sweeps.schema import Measure

OURS = "here"
DIFFERENCE = "difference"


def tables_of(results: SweepResults) -> list[Table]:
    """Return the tables: one for each combination of the values of the axes that make tables."""
    return [table for table, _ in by_table(results)]


def by_table(results: SweepResults) -> list[tuple[Table, Sequence[SweepCell]]]:
    """Return the tables, each with its cells."""
    grid = results.grid
    names = grid.file.tables
    found: list[tuple[Table, Sequence[SweepCell]]] = []
    for values in product(*(grid.axes[axis] for axis in names)):
        chosen = dict(zip(names, values, strict=True))
        cells = [cell for cell in grid.rows if all(cell.values[axis] == value for axis, value in chosen.items())]
        if cells:
            name = f"table-{len(found) + 1}"
            title = grid.title if not values else f"{grid.title}: {label_of(values)}"
            found.append((_table(name, title, cells, results), cells))
    return found


def long_table(results: SweepResults) -> Table:
    """Return one table with a row for each cell: for CSV."""
    grid = results.grid
    columns = [*(Column(axis, text=True) for axis in grid.axes), Column("runs"), Column("of")]
    for measure in grid.measures:
        columns.append(_number(measure))
        if measure in results.compared:
            columns += [Column(f"{measure.label} {end}", digits=4) for end in ("paper", "paper_sd", DIFFERENCE)]
    columns += [Column("changed", text=True)] if grid.changes else []
    rows = []
    for cell in grid.rows:
        row: list[Cell] = [*cell.values.values(), len(results.runs_of(cell)), len(cell.experiments)]
        for measure in grid.measures:
            row.append(results.spread(cell, measure))
            if measure in results.compared:
                figure = results.figure(cell, measure)
                row += [figure.mean, figure.deviation] if figure is not None else [None, None]
                row.append(difference(results, cell, measure))
        rows.append([*row, *([" ".join(grid.changes)] if grid.changes else [])])
    return Table("cells", grid.title, columns, rows)


def difference(results: SweepResults, cell: SweepCell, measure: Measure) -> float | None:
    """Return our mean minus the paper's figure, 0 within its range; None without one of them."""
    ours, figure = results.spread(cell, measure), results.figure(cell, measure)
    if ours is None or figure is None:
        return None
    return max(ours.mean - figure.high, 0.0) + min(ours.mean - figure.low, 0.0)


def _table(name: str, title: str, cells: Sequence[SweepCell], results: SweepResults) -> Table:
    grid = results.grid
    across, down = _places(grid)
    by_place = {(_at(cell, down), _at(cell, across)): cell for cell in cells}
    rows_at = list(dict.fromkeys(_at(cell, down) for cell in cells))
    columns_at = list(dict.fromkeys(_at(cell, across) for cell in cells))
    measures = [measure for measure in grid.measures if measure.shown]
    heads = [(place, measure) for place in columns_at for measure in measures]
    beside = any(measure in results.compared for measure in measures)
    lines = beside and bool(across)
    columns = [*(Column(axis, text=True) for axis in down), *([Column("", text=True)] if lines else [])]
    for place, measure in heads:
        head = label_of([*place, *([measure.label] if len(measures) > 1 or not place else [])])
        columns.append(column_of(measure, head))
        if beside and not lines and measure in results.compared:
            digits = column_of(measure).digits
            columns += [Column(grid.file.paper.label, text=True), Column(DIFFERENCE, digits=digits)]
    rows: list[list[Cell]] = []
    for at in rows_at:
        parts = [_parts(results, by_place.get((at, place)), measure) for place, measure in heads]
        if lines:
            names = (OURS, grid.file.paper.label, DIFFERENCE)
            shown = zip(names, zip(*parts, strict=True), strict=True)
            rows += [[*(at if i == 0 else [""] * len(at)), what, *own] for i, (what, own) in enumerate(shown)]
        else:
            several = [beside and measure in results.compared for _, measure in heads]
            own = [cell for part, all_ in zip(parts, several, strict=True) for cell in (part if all_ else part[:1])]
            rows.append([*at, *own])
    return Table(name, title, columns, rows)


def _places(grid: Grid) -> tuple[list[str], list[str]]:
    """Return the axes that are columns, and those that are rows: the named ones, then those that have no place."""
    file = grid.file
    named = {*file.tables, *file.rows, *file.columns}
    return list(file.columns), [*file.rows, *(axis for axis in grid.axes if axis not in named)]


def _at(cell: SweepCell, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.values[axis] for axis in axes)


def _parts(results: SweepResults, cell: SweepCell | None, measure: Measure) -> tuple[Cell, Cell, Cell]:
    """Return ours, the paper's and the difference."""
    if cell is None:
        return None, None, None
    figure = results.figure(cell, measure)
    text = None if figure is None else figure.text
    return shown_value(results, cell, measure), text, difference(results, cell, measure)


def shown_value(results: SweepResults, cell: SweepCell, measure: Measure) -> Cell:
    """Return a cell of a table: a mean with its deviation, or how many of the finished runs reached the target."""
    if measure.name != "reached":
        return results.spread(cell, measure)
    values = results.values(cell, measure)
    return f"{sum(values.values()):.0f}/{len(values)}" if values else None


def _number(measure: Measure) -> Column:
    """Return a measure's column of numbers only."""
    column = column_of(measure)
    return Column(column.name, column.unit, column.digits)
