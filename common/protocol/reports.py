"""A child's report on its work: its validation (possible numbers, whose sums fit in a message), and sums of results."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, isfinite
from typing import Final

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
    counts = (
        ("samples", result.samples),
        ("epochs", result.epochs),
        ("steps of SGD", max(result.steps, result.path_steps)),
    )
    for what, count in counts:
        if count > COUNT_MOST:
            raise RefusedModel(f"it reports {count} {what}")
    seconds = (result.train_s, result.wait_s, result.pause_s)
    if not all(0 <= value < inf for value in seconds):
        raise RefusedModel("it reports {} s of training, {} s of waiting and a pause of {} s".format(*seconds))
    plans_of(result)


def plans_of(result: Result) -> list[dict[str, object]]:
    """Return the decisions of the child's own aggregation, one per round. Raises RefusedModel."""
    try:
        plans = json.loads(result.plans or "[]")
    except (ValueError, RecursionError):
        plans = None
    if not isinstance(plans, list) or not all(isinstance(plan, dict) for plan in plans):
        raise RefusedModel("the report on its own aggregation is not a list of JSON objects")
    spreads = [plan.get("spread", 0.0) for plan in plans]
    if not all(isinstance(spread, float | int) and abs(spread) <= FLOAT_MOST for spread in spreads):
        raise RefusedModel("the spread of its models is not a finite number")
    return plans


def added(report: ChildReport, result: Result) -> ChildReport:
    """Return the report on a child with one more of its results."""
    return replace(
        report,
        samples=result.samples,
        rounds=report.rounds + 1,
        epochs=report.epochs + result.epochs,
        steps=report.steps + result.steps,
        loss=result.loss,
        train_s=report.train_s + result.train_s,
        wait_s=report.wait_s + result.wait_s,
        pause_s=report.pause_s + result.pause_s,
        path=result.path,
    )
