"""A child's report on its work: its validation (possible numbers, whose sums fit in a message), and sums of results."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, isfinite
from typing import Any, Final

from common.accounting.child_report import ChildReport
from common.errors import RefusedModel
from common.protocol.messages import Result

COUNT_MOST: Final = 10**12
FLOAT_MOST: Final = 1e300  # JSON has integers that no float holds


def check_report(result: Result) -> None:
    """Check a result's numbers and that their sums fit in a message. Raises RefusedModel."""
    if result.samples < 1:
        raise RefusedModel("it reports no samples")
    if not isfinite(result.loss):
        raise RefusedModel(f"its training loss is {result.loss}")
    _check_work("it", result, path_steps=result.path_steps)
    for report in result.children:
        _check_work(f"{report.name[:64]!r}", report, path_steps=report.rounds)
    plans_of(result)


def _check_work(who: str, work: Result | ChildReport, *, path_steps: int) -> None:
    counts = (
        ("samples", work.samples),
        ("epochs", work.epochs),
        ("steps of SGD", max(work.steps, path_steps)),
    )
    for what, count in counts:
        if count > COUNT_MOST:
            raise RefusedModel(f"{who} reports {count} {what}")
    seconds = (work.train_s, work.wait_s, work.pause_s)
    if not all(0 <= value < inf for value in seconds):
        raise RefusedModel("{} reports {} s of training, {} s of waiting and a pause of {} s".format(who, *seconds))


def plans_of(result: Result) -> dict[str, list[dict[str, Any]]]:
    """Return the aggregation decisions of the child and of those below it, one per round. Raises RefusedModel."""
    try:
        plans = json.loads(result.plans or "{}")
    except (ValueError, RecursionError):
        plans = None
    if not isinstance(plans, dict) or not all(isinstance(found, list) for found in plans.values()):
        raise RefusedModel("the report on its own aggregation is not a JSON object of lists")
    every = [plan for found in plans.values() for plan in found]
    if not all(isinstance(plan, dict) for plan in every):
        raise RefusedModel("a decision of its own aggregation is not a JSON object")
    spreads = [plan.get("spread", 0.0) for plan in every]
    if not all(isinstance(spread, float | int) and abs(spread) <= FLOAT_MOST for spread in spreads):
        raise RefusedModel("the spread of its models is not a finite number")
    return plans


def work_of(name: str, result: Result) -> ChildReport:
    """Return the report on a child's work for one of its results."""
    return ChildReport(
        name, result.samples, 1, result.epochs, result.steps, result.loss, result.train_s, result.wait_s,
        result.pause_s, result.path,
    )  # fmt: skip


def with_work_of(report: ChildReport, later: ChildReport) -> ChildReport:
    """Return the report on a node with the work of a later one added."""
    return replace(
        later,
        rounds=report.rounds + later.rounds,
        epochs=report.epochs + later.epochs,
        steps=report.steps + later.steps,
        train_s=report.train_s + later.train_s,
        wait_s=report.wait_s + later.wait_s,
        pause_s=report.pause_s + later.pause_s,
    )
