"""A sweep's results as text, CSV, LaTeX, Markdown, JSON, and as a page of HTML.

With a paper's figures each value has three parts: ours, the paper's, and their difference. They are lines of a row if
the table has axes as columns, else columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

from common.experiment.links import LinkSettings
from common.experiment.training import Score
from common.text import json_text
from deploy.console.tabular import Cell, Column, Spread, Table, show
from deploy.results.charts import Curve, curves
from deploy.results.device_scores import GLOBAL_ROUND, score_axis
from deploy.results.figures import DASHES, SERIES, Point
from deploy.results.page import Page
from deploy.results.run import Run, seconds_of
from deploy.results.sections import mean_curve
from deploy.sweeps.grid import Grid, SweepCell, label_of
from deploy.sweeps.results import Contradiction, SweepResults, unit_of
from deploy.sweeps.schema import Measure

DIGITS: Final = {"accuracy": 2, "rounds": 0, "steps": 0, "path_steps": 0}  # decimals; else 1
SPEED_UP_DIGITS: Final = 2
LINES_MOST: Final = 12  # of a chart
OURS = "here"
DIFFERENCE = "difference"


def written(results: SweepResults, form: str) -> str:
    """Return the results in one of the forms table, csv, latex, markdown and json."""
    if form == "csv":
        return long_table(results).csv()
    if form == "json":
        return json_text(to_json(results)) + "\n"
    tables = [table for table, _ in tables_of(results)]
    if form == "latex":
        lines = "".join(f"% {line}\n" for line in changed(results))
        return "\n".join(f"% {table.title}\n{lines}{table.latex()}" for table in tables)
    bullet = "- " if form == "markdown" else ""
    parts = [
        f"### {each.title}\n\n{each.markdown()}" if bullet else f"{each.title}\n{each.aligned()}" for each in tables
    ]
    return "\n".join([*parts, "".join(f"{bullet}{line}\n" for line in notes(results))])


# Tables


def tables_of(results: SweepResults) -> list[tuple[Table, Sequence[SweepCell]]]:
    """Return a table for each combination of the values of the axes that make tables, each with its cells."""
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
        columns.append(replace(column_of(measure), text=False))
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
                row.append(results.difference(cell, measure))
        rows.append([*row, *([" ".join(grid.changes)] if grid.changes else [])])
    return Table("cells", grid.title, columns, rows)


def column_of(measure: Measure, head: str = "") -> Column:
    """Return the column of a measure; `head`: its title, if not the measure's label."""
    usual = SPEED_UP_DIGITS if measure.relation == "speed_up" else DIGITS.get(measure.name, 1)
    digits = usual if measure.digits is None else measure.digits
    return Column(head or measure.label, unit_of(measure), digits, text=measure.name == "reached")


def _table(name: str, title: str, cells: Sequence[SweepCell], results: SweepResults) -> Table:
    grid = results.grid
    file, across = grid.file, grid.file.columns
    named = {*file.tables, *file.rows, *across}
    down = [*file.rows, *(axis for axis in grid.axes if axis not in named)]
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


def _at(cell: SweepCell, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.values[axis] for axis in axes)


def _parts(results: SweepResults, cell: SweepCell | None, measure: Measure) -> tuple[Cell, Cell, Cell]:
    """Return ours, the paper's and the difference: a mean with its deviation, or how many runs reached the target."""
    if cell is None:
        return None, None, None
    figure = results.figure(cell, measure)
    ours: Cell = results.spread(cell, measure)
    if measure.name == "reached" and (values := results.values(cell, measure)):
        ours = f"{sum(values.values()):.0f}/{len(values)}"
    return ours, None if figure is None else figure.text, results.difference(cell, measure)


# The lines below the tables


def notes(results: SweepResults) -> Iterator[str]:
    """Yield the lines below the tables: what is missing, the verdicts, the paper, the conditions."""
    paper = results.grid.file.paper
    yield from missing(results)
    yield from changed(results)
    yield from agreement(results)
    yield from order(results)
    if not results.grid.is_whole and paper.figures:
        what = "the small form" if results.grid.small else "what --set has changed"
        yield f"{what} is another experiment: only its order is compared with {paper.label}, not its figures"
    if paper.cite:
        yield f"{paper.label}: {', '.join(part for part in (paper.cite, paper.table) if part)}"
    yield from (f"note: {note}" for note in paper.notes)
    yield from conditions(results)


def missing(results: SweepResults) -> Iterator[str]:
    """Yield a line on the cells whose runs are not all finished."""
    if lacking := results.lacking:
        runs, cells = len(results.grid.experiments), len(results.grid.cells)
        yield f"partial: {len(results.runs)} of {runs} runs are finished; {len(lacking)} of {cells} cells lack some"


def changed(results: SweepResults) -> Iterator[str]:
    """Yield a line on keys that the command sets in every cell."""
    if changes := results.grid.changes:
        yield f"changed by --set: {', '.join(changes)}"


def agreement(results: SweepResults) -> Iterator[str]:
    """Yield how many figures are within the deviations, and a line for each that the tables do not show."""
    paper, found = results.grid.file.paper.label, list(results.agreements())
    if known := [each.near for each in found if each.near is not None]:
        yield f"{sum(known)} of {len(known)} figures ({paper}) are within two deviations of ours"
    near = {None: "no verdict of one seed", True: "within two deviations", False: "not within two deviations"}
    for each in found:
        if not each.measure.shown:
            ours = _shown(each.ours, each.measure)
            yield f"{each.cell.label}, {each.measure.label}: {ours}; {paper} {each.figure.text}: {near[each.near]}"


def order(results: SweepResults) -> Iterator[str]:
    """Yield whether the paper's order holds, and each contradiction."""
    if not (checked := len(results.rankings)):
        return
    file, wrong = results.grid.file, results.contradictions
    against = f", and what is above {file.baseline} and below it" if file.baseline else ""
    inside = sum(each.inside for each in wrong)
    small = f" ({inside} within a deviation)" if inside else ""
    verdict = "holds" if not wrong else f"does not hold, {len(wrong)} contradictions{small}"
    count = f"{checked} comparisons" if checked > 1 else "one comparison"
    yield f"the order of {file.paper.label} in {count} (the best{against}) {verdict}"
    yield from (_contradiction(results, each) for each in wrong)


def _contradiction(results: SweepResults, found: Contradiction) -> str:
    paper, ranking = results.grid.file.paper.label, found.ranking
    parts = [part for part in (ranking.where, ranking.measure.label if len(results.ranked) > 1 else "") if part]
    at = f"contradicts the order: {f'{label_of(parts)}: ' if parts else ''}"
    value, other = (_shown(ranking.ours[each], ranking.measure) for each in (found.value, found.other))
    inside = ", within a deviation" if found.inside else ""
    if found.above is None:
        both = f"{found.value} {value} and {found.other} {other}"
        return f"{at}the best is {found.value}, {paper}: {found.other}; here {both}{inside}"
    side = "above" if found.above else "below"
    text = f"{found.value} is not {side} {found.other}, as {paper} has it"
    return f"{at}{text}; here {value} and {found.other} {other}{inside}"


def _shown(spread: Spread, measure: Measure) -> str:
    text = show(spread, column_of(measure).digits)
    return f"{text} {unit_of(measure)}".strip()


def conditions(results: SweepResults) -> list[str]:
    """Return a line on the machines and one on the links of the finished runs, which their seconds depend on."""
    runs = list(results.runs.values())
    if not runs:
        return []
    hosts = _distinct(f"{run.manifest.get('host', 'a host')}, {run.manifest.get('cpus')} cores" for run in runs)
    torch = _distinct(f"torch {(run.manifest.get('packages') or {}).get('torch')}" for run in runs)
    lines = [f"hardware: {'; '.join(hosts)}; {', '.join(torch)}"]
    profiles = _distinct(
        str(machine.get("profile"))
        for run in runs
        for machine in (run.manifest.get("hardware") or {}).values()
        if machine.get("profile")
    )
    if all(run.direct for run in runs):
        lines.append("links: none, the runs had no network: seconds are computing time, bytes those of the models")
        return lines
    if profiles:
        lines.append(f"emulated: {', '.join(profiles)}")
    links = _distinct(f"{tier.name}: {_link(tier.link)}" for run in runs for tier in run.experiment.tiers)
    enforced = _distinct(str((run.manifest.get("links") or {}).get("enforce")) for run in runs)
    lines.append(f"links: {'; '.join(links)}; enforced by: {', '.join(enforced)}")
    if any(run.simulated for run in runs):
        lines.append("seconds: simulated, of machines and links as in the runs' manifest.json")
    return lines


def _link(link: LinkSettings) -> str:
    rates = [f"{way} {rate:g} Mbit/s" for way, rate in (("up", link.up_mbit), ("down", link.down_mbit)) if rate]
    delay = [f"{link.delay_ms:g} ms"] if link.delay_ms else []
    return ", ".join([*rates, *delay]) or "unlimited"


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


# JSON


def to_json(results: SweepResults) -> dict[str, Any]:
    """Return all results: each cell with its runs, measures and figures, the rankings and the contradictions."""
    grid = results.grid
    return {
        "title": grid.file.title,
        "small": grid.small,
        "changed": list(grid.changes),
        "runs": len(grid.experiments),
        "finished": len(results.runs),
        "cells": [_cell(results, cell) for cell in grid.rows],
        "rankings": [
            {
                "where": each.where,
                "measure": each.measure.label,
                "ours": {value: spread.mean for value, spread in each.ours.items()},
                "paper": {value: figure.mean for value, figure in each.papers.items()},
                **dict(zip(("best", "paper_best"), each.best, strict=True)),
            }
            for each in results.rankings
        ],
        "contradictions": [_contradiction(results, each) for each in results.contradictions],
        "paper": grid.file.paper.model_dump(include={"cite", "table", "label", "notes"}),
        "conditions": conditions(results),
    }


def _cell(results: SweepResults, cell: SweepCell) -> dict[str, Any]:
    runs = results.runs_of(cell)
    return {
        "values": dict(cell.values),
        "target": cell.target,
        "runs": [
            {"seed": seed, "digest": one.digest, "run": runs[seed].id if seed in runs else None}
            for seed, one in cell.experiments.items()
        ],
        "measures": {measure.label: _measure(results, cell, measure) for measure in results.grid.measures},
    }


def _measure(results: SweepResults, cell: SweepCell, measure: Measure) -> dict[str, Any]:
    values = results.values(cell, measure)
    spread, figure = Spread.of(list(values.values())), results.figure(cell, measure)
    found: dict[str, Any] = {
        "unit": unit_of(measure),
        "mean": spread and spread.mean,
        "deviation": spread and spread.deviation,
        "by_seed": {str(seed): value for seed, value in values.items()},
    }
    if figure is not None and measure in results.compared:
        papers = {"from": figure.low, "to": figure.high, "deviation": figure.deviation}
        found |= {"paper": papers, "difference": results.difference(cell, measure)}
    return found


# The page


def page_of(results: SweepResults) -> Page:
    """Return the page: the tables, the accuracies by global round, the verdicts, the runs."""
    page, grid = Page(), results.grid
    page.add_heading(1, grid.title)
    for table, cells in tables_of(results):
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
