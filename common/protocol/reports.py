"""A child's report on its work: its validation (possible numbers, whose sums fit in a message), and sums of results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from common.accounting.child_report import ChildReport
from common.errors import RefusedModel
from common.protocol.limits import ANY, COUNT_MOST, SECONDS_MOST, ChildLimits
from common.protocol.messages import Result

FLOAT_MOST: Final = 1e300  # JSON has integers that no float holds
LOSS_MOST: Final = 1e39  # a float32's is below


def check_report(result: Result, *, limits: ChildLimits = ANY, epochs: int = COUNT_MOST) -> None:
    """Check a result against the limits of its child and the epochs of its task. Raises RefusedModel."""
    if result.samples < 1:
        raise RefusedModel("it reports no samples")
    _check_work("it", result, samples=limits.samples, epochs=epochs, rounds=1, limits=limits)
    if result.path_steps > limits.steps(epochs):
        raise RefusedModel(f"it reports {result.path_steps} steps of SGD in a row")
    for report in result.children:
        if report.name not in limits.below:
            raise RefusedModel(f"it reports on {report.name[:64]!r}, which is not below it")
        of, rounds = limits.below[report.name], limits.rounds
        _check_work(f"{report.name!r}", report, samples=of, epochs=epochs * rounds, rounds=rounds, limits=limits)
    for name, found in plans_of(result).items():
        if name not in limits.aggregators or len(found) > limits.rounds:
            raise RefusedModel(f"it reports {len(found)} decisions of {name[:64]!r}")


def _check_work(
    who: str, work: Result | ChildReport, *, samples: int, epochs: int, rounds: int, limits: ChildLimits
) -> None:
    rounds_done = work.rounds if isinstance(work, ChildReport) else 1
    for what, count, most in (
        ("samples", work.samples, samples),
        ("rounds", rounds_done, rounds),
        ("epochs", work.epochs, epochs),
        ("steps of SGD", work.steps, min(COUNT_MOST, epochs * limits.rounds * samples)),
    ):
        if count > most:
            raise RefusedModel(f"{who} reports {count} {what}, at most {most} are possible")
    seconds = (work.train_s, work.wait_s, work.pause_s)
    if not all(0 <= value <= SECONDS_MOST * limits.rounds for value in seconds):
        raise RefusedModel("{} reports {} s of training, {} s of waiting and a pause of {} s".format(who, *seconds))
    if not abs(work.loss) <= LOSS_MOST:
        raise RefusedModel(f"its training loss is {work.loss}" if who == "it" else f"{who} has a loss of {work.loss}")


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
