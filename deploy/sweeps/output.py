"""A sweep's results as text, CSV, LaTeX and JSON.

With a paper's figures each value has three parts: ours, the paper's, and their difference. They are
lines of a row if the table has axes as columns, else columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

from fedstrata.common.text import json_text
from fedstrata.deploy.console.table_layout import Width, wrapped
from fedstrata.deploy.console.tabular import (
    LATEX,
    Cell,
    Column,
    Spread,
    Table,
    plain,
    terminal_width,
)
from fedstrata.deploy.results.acting import late_parts, unacted
from fedstrata.deploy.results.machines import conditions
from fedstrata.deploy.results.pairs import Pairs
from fedstrata.deploy.sweeps.grid import SweepCell, label_of
from fedstrata.deploy.sweeps.measures import SweepResults, reached, unit_of
from fedstrata.deploy.sweeps.sweep_schema import FULL, Measure

DIGITS: Final = {"accuracy": 2, "rounds": 0, "steps": 0, "path_steps": 0}  # decimals; else 1
SPEED_UP_DIGITS: Final = 2
OURS = "here"
DIFFERENCE = "difference"


def written(results: SweepResults, form: str) -> str:
    """Return the results in one of the forms table, csv, latex and json."""
    if form == "csv":
        return long_table(results).csv()
    if form == "json":
        return json_text(to_json(results)) + "\n"
    width = LATEX if form == "latex" else Width(terminal_width())
    tables = tables_of(results, width)
    if form == "latex":
        lines = "".join(f"% {line}\n" for line in changed(results))
        return "\n".join(f"% {table.title}\n{lines}{table.latex()}" for table in tables)
    parts = [f"{each.title}\n{each.on_terminal()}" for each in tables]
    below = [part for line in notes(results) for part in wrapped(line, width.most)]
    return "\n".join([*parts, "".join(f"{line}\n" for line in below)])


# Tables


def tables_of(results: SweepResults, width: Width) -> list[Table]:
    """Return a table for each combination of the values of the axes that make tables.

    The values of axes that make columns are rows if the table does not fit the width.
    """
    grid = results.grid
    names = grid.file.tables
    found: list[Table] = []
    for values in product(*(grid.axes[axis] for axis in names)):
        cells = [cell for cell in grid.rows if _at(cell, names) == values]
        if not cells:
            continue
        name = f"table-{len(found) + 1}"
        title = f"{grid.title}: {label_of(values)}" if values else grid.title
        table = _table(name, title, cells, results, across=grid.file.columns)
        if not table.fits(width):
            table = _table(name, title, cells, results, across=())
        found.append(table)
    return found


def long_table(results: SweepResults) -> Table:
    """Return one table with a row for each cell: for CSV."""
    grid = results.grid
    changes = [" ".join(grid.changes)] * bool(grid.changes)
    columns = [*(Column(axis, text=True) for axis in grid.axes), Column("runs"), Column("of")]
    for measure in grid.measures:
        columns.append(replace(column_of(measure), text=False))
        if measure in results.compared:
            ends = ("paper", "paper_sd", DIFFERENCE)
            columns += [Column(f"{measure.label} {end}", digits=4) for end in ends]
    columns += [Column("changed", text=True)] * len(changes)
    rows = []
    for cell in grid.rows:
        row: list[Cell] = [*cell.values.values(), len(results.runs_of(cell)), len(cell.experiments)]
        for measure in grid.measures:
            row.append(results.spread(cell, measure))
            if measure in results.compared:
                figure = results.figure(cell, measure)
                row += (None, None) if figure is None else (figure.mean, figure.deviation)
                row.append(results.difference(cell, measure))
        rows.append([*row, *changes])
    return Table("cells", grid.title, columns, rows)


def column_of(measure: Measure, head: str = "") -> Column:
    """Return the column of a measure; `head`: its title, if not the measure's label."""
    usual = SPEED_UP_DIGITS if measure.relation == "speed_up" else DIGITS.get(measure.name, 1)
    digits = usual if measure.digits is None else measure.digits
    return Column(head or measure.label, unit_of(measure), digits, text=measure.name == "reached")


def _table(
    name: str,
    title: str,
    cells: Sequence[SweepCell],
    results: SweepResults,
    *,
    across: Sequence[str],
) -> Table:
    grid = results.grid
    file = grid.file
    paper = file.paper.label
    down = [axis for axis in grid.axes if axis not in (*file.tables, *file.rows, *across)]
    down = [*file.rows, *down]
    by_place = {(_at(cell, down), _at(cell, across)): cell for cell in cells}
    rows_at = list(dict.fromkeys(_at(cell, down) for cell in cells))
    columns_at = list(dict.fromkeys(_at(cell, across) for cell in cells))
    measures = [measure for measure in grid.measures if measure.shown]
    compared = [measure for measure in measures if measure in results.compared]
    lines = bool(compared and across)
    columns = [Column(axis, text=True) for axis in down]
    columns += [Column("", text=True)] * lines
    for place in columns_at:
        for measure in measures:
            named = [measure.label] * (len(measures) > 1 or not place)
            column = column_of(measure, label_of([*place, *named]))
            columns.append(column)
            if measure in compared and not lines:
                columns += [Column(paper, text=True), Column(DIFFERENCE, digits=column.digits)]
    rows: list[list[Cell]] = []
    for at in rows_at:
        three: list[list[Cell]] = [[], [], []]  # ours, the paper's, and the differences
        row: list[Cell] = list(at)
        for place in columns_at:
            for measure in measures:
                parts = _parts(results, by_place.get((at, place)), measure)
                row += parts if measure in compared else parts[:1]
                for line, part in zip(three, parts, strict=True):
                    line.append(part)
        if lines:
            blank = [""] * len(at)
            rows.append([*at, OURS, *three[0]])
            rows += [[*blank, paper, *three[1]], [*blank, DIFFERENCE, *three[2]]]
        else:
            rows.append(row)
    return Table(name, title, columns, rows, keys=len(down) + lines)


def _at(cell: SweepCell, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.values[axis] for axis in axes)


def _parts(
    results: SweepResults, cell: SweepCell | None, measure: Measure
) -> tuple[Cell, Cell, Cell]:
    """Return ours, the paper's and the difference: a mean with its deviation, or how many runs
    reached the target.
    """
    if cell is None:
        return None, None, None
    figure = results.figure(cell, measure)
    ours: Cell = results.spread(cell, measure)
    if measure.name == "reached" and (values := results.values(cell, measure)):
        ours = f"{sum(values.values()):.0f}/{len(values)}"
    return ours, None if figure is None else figure.text, results.difference(cell, measure)


# The lines below the tables


def notes(results: SweepResults) -> Iterator[str]:
    """Yield the lines below the tables: what is missing, the paper, the conditions."""
    paper = results.grid.file.paper
    yield from missing(results)
    yield from changed(results)
    if not results.grid.is_whole and paper.figures:
        if results.grid.size == FULL:
            what = "what --set has changed"
        else:
            what = f"the {results.grid.size} size"
        yield f"{what} is another experiment: it is not compared with {paper.label}"
    if paper.cite:
        yield f"{paper.label}: {', '.join(part for part in (paper.cite, paper.table) if part)}"
    yield from idle(results)
    yield from (f"note: {note}" for note in paper.notes)
    yield from conditions(list(results.runs.values()))


def missing(results: SweepResults) -> Iterator[str]:
    """Yield a line on the cells whose runs are not all finished."""
    if lacking := results.lacking:
        runs = len(results.grid.experiments)
        cells = len(results.grid.cells)
        yield (
            f"partial: {len(results.runs)} of {runs} runs are finished; {len(lacking)} of "
            f"{cells} cells lack some"
        )


def changed(results: SweepResults) -> Iterator[str]:
    """Yield a line on keys that the command sets in every cell."""
    if changes := results.grid.changes:
        yield f"changed by --set: {', '.join(changes)}"


def idle(results: SweepResults) -> Iterator[str]:
    """Yield a line on each cell whose method did not act before the target in some runs."""
    if not any(measure.needs_target for measure in results.grid.measures):
        return
    experiments = [next(iter(cell.experiments.values())) for cell in results.grid.cells]
    for cell, experiment in zip(results.grid.cells, experiments, strict=True):
        parts = late_parts(experiment, experiments)
        if not parts:
            continue
        rounds: list[float] = []
        for run in results.runs_of(cell).values():
            place = reached(run.rounds, cell.target)
            if place is not None:
                rounds.append(run.rounds[place].global_round)
        yield from (f"{cell.label}: {text} before the target" for text in unacted(parts, rounds))


# JSON


def to_json(results: SweepResults) -> dict[str, Any]:
    """Return all results: each cell with its runs, measures and figures."""
    grid = results.grid
    return {
        "title": grid.file.title,
        "size": grid.size,
        "changed": list(grid.changes),
        "runs": len(grid.experiments),
        "finished": len(results.runs),
        "cells": [_cell(results, cell) for cell in grid.rows],
        "paper": grid.file.paper.model_dump(include={"cite", "table", "label", "notes"}),
        "conditions": conditions(list(results.runs.values())),
    }


def _cell(results: SweepResults, cell: SweepCell) -> dict[str, Any]:
    found = results.runs_of(cell)
    runs = []
    for seed, one in cell.experiments.items():
        run = found[seed].id if seed in found else None
        runs.append({"seed": seed, "digest": one.digest, "run": run})
    measures = results.grid.measures
    return {
        "values": dict(cell.values),
        "target": cell.target,
        "runs": runs,
        "measures": {each.label: _measure(results, cell, each) for each in measures},
    }


def _measure(results: SweepResults, cell: SweepCell, measure: Measure) -> dict[str, Any]:
    values = {str(seed): value for seed, value in results.values(cell, measure).items()}
    spread = plain(Spread.of(list(values.values()))) or {"mean": None, "deviation": None}
    figure = results.figure(cell, measure)
    found: dict[str, Any] = {"unit": unit_of(measure), **spread, "by_seed": values}
    if measure.against:
        found["interval"] = Pairs(values).interval
    if figure is not None and measure in results.compared:
        papers = {"from": figure.low, "to": figure.high, "deviation": figure.deviation}
        found |= {"paper": papers, "difference": results.difference(cell, measure)}
    return found
