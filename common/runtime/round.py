"""A round's outcome, and what a child may report of its work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from common.aggregation.uploads import Uploads
from common.errors import RefusedModel
from common.layout import Row
from common.protocol.messages import Result
from common.protocol.timeline import Timeline

COUNT_MOST: Final = 10**12


@dataclass(frozen=True, slots=True)
class Round:
    """A closed round, its children in the order in which their models were given.

    `results`: of those that answered, in that order. `uploads`: their models in rows of their own, valid until the
    next round is opened.
    """

    results: Mapping[str, Result]
    uploads: Uploads
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    timeline: Timeline

    @property
    def models(self) -> dict[str, Row]:
        """Return the row of each child that answered."""
        uploads = self.uploads
        return {uploads.children[k]: uploads.rows_K[k] for k in uploads.answered}


def check_report(result: Result) -> None:
    """Refuse a result whose numbers cannot be, or whose sums would not fit in a message. Raises RefusedModel."""
    if result.samples < 1:
        raise RefusedModel("it reports no samples")
    if not np.isfinite(result.loss):
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
    if not all(0 <= value < np.inf for value in seconds):
        raise RefusedModel("it reports {} s of training, {} s of waiting and a pause of {} s".format(*seconds))
    plans_of(result)


def plans_of(result: Result) -> list[dict[str, object]]:
    """Return what the child's own aggregation decided in each of its rounds. Raises RefusedModel."""
    try:
        plans = json.loads(result.plans or "[]")
    except (ValueError, RecursionError):
        plans = None
    if not isinstance(plans, list) or not all(isinstance(plan, dict) for plan in plans):
        raise RefusedModel("its word on its own aggregation is no list of JSON objects")
    if any(not isinstance(plan.get("spread", 0.0), float | int) for plan in plans):
        raise RefusedModel("its models' spread is no number")
    return plans
