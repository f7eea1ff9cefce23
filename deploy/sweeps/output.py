"""A sweep's results as text, CSV, LaTeX, Markdown, JSON, and as a page of HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from common.text import json_text
from deploy.console.tabular import Spread
from deploy.sweeps.grid import SweepCell
from deploy.sweeps.measuring import unit_of
from deploy.sweeps.results import SweepResults
from deploy.sweeps.schema import Measure
from deploy.sweeps.tables import difference, long_table, tables_of
from deploy.sweeps.verdicts import Verdicts, conditions


def written(results: SweepResults, form: str) -> str:
    """Return the results in one of the forms table, csv, latex, markdown and json."""
    return FORMS[form](results)


def notes(results: SweepResults) -> Iterator[str]:
    """Yield the lines below the tables: what is missing, the verdicts, the paper, the conditions."""
    verdicts, paper = Verdicts(results), results.grid.file.paper
    yield from verdicts.missing()
    yield from changed(results)
    yield from verdicts.agreement()
    yield from verdicts.order()
    if results.grid.small and paper.figures:
        yield f"the small form is another experiment: only its order is compared with {paper.label}, not its figures"
    if paper.cite:
        yield f"{paper.label}: {', '.join(part for part in (paper.cite, paper.table) if part)}"
    yield from (f"note: {note}" for note in paper.notes)
    yield from conditions(results)


def changed(results: SweepResults) -> Iterator[str]:
    """Yield a line on keys that the command sets in every cell: the comparison is with other settings then."""
    grid = results.grid
    if grid.changes:
        paper = grid.file.paper
        those = ": these are not the paper's settings" if paper.figures else ""
        yield f"changed by --set: {', '.join(grid.changes)}{those}"


def _text(results: SweepResults) -> str:
    parts = [f"{table.title}\n{table.aligned()}" for table in tables_of(results)]
    return "\n".join([*parts, "".join(f"{line}\n" for line in notes(results))])


def _markdown(results: SweepResults) -> str:
    parts = [f"### {table.title}\n\n{table.markdown()}" for table in tables_of(results)]
    return "\n".join([*parts, "".join(f"- {line}\n" for line in notes(results))])


def _latex(results: SweepResults) -> str:
    lines = "".join(f"% {line}\n" for line in changed(results))
    return "\n".join(f"% {table.title}\n{lines}{table.latex()}" for table in tables_of(results))


def _csv(results: SweepResults) -> str:
    return long_table(results).csv()


def _json(results: SweepResults) -> str:
    return json_text(to_json(results)) + "\n"


def to_json(results: SweepResults) -> dict[str, Any]:
    """Return all results: each cell with its runs, measures and figures, the rankings and the contradictions."""
    grid, verdicts = results.grid, Verdicts(results)
    return {
        "title": grid.file.title,
        "small": grid.small,
        "changed": list(grid.changes),
        "runs": len(grid.experiments),
        "finished": len(results.runs),
        "cells": [_cell(results, cell) for cell in grid.rows],
        "rankings": verdicts.to_json(),
        "contradictions": list(verdicts.contradictions()),
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
        found |= {"paper": papers, "difference": difference(results, cell, measure)}
    return found


FORMS: Final[Mapping[str, Callable[[SweepResults], str]]] = {
    "table": _text,
    "csv": _csv,
    "latex": _latex,
    "markdown": _markdown,
    "json": _json,
}
