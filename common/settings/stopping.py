"""When a run ends before its last global round, and which of its models is the best one so far."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import isfinite, isnan, nan
from typing import Annotated, Any, Literal

from pydantic import Field

from fedstrata.common.settings.tables import Count, Refused, SettingsTable, check_table
from fedstrata.common.settings.training import Score


class Stop(SettingsTable):
    """When a run ends before its last global round: at a target, or when its evaluations no longer
    improve.
    """

    target: float | None = None  # the score at which the run ends; accuracy: above 0, at most 1
    # Evaluations in a row without an improvement after which the run ends. The final model is that
    # of the last round.
    patience: Count | None = None
    # what improves: the score, or the loss, of which the lower is better
    monitor: Literal["score", "loss"] = "score"
    min_delta: Annotated[float, Field(ge=0)] = 0.0  # a smaller improvement is none
    # keep the model of the last improvement, beside the final one, as best.safetensors
    best: bool = False


class StopReason(StrEnum):
    """Why a run ended before its last global round."""

    TARGET = "target"
    PATIENCE = "patience"
    PRIVACY = "privacy budget"


def check_stop(stop: Stop, score: Score) -> None:
    """Check the keys against each other and the score. Raises InvalidExperiment."""
    check_table("stop", stop, _refused(stop, score))


def _refused(stop: Stop, score: Score) -> Refused:
    if stop.target is not None and score.share and not 0 < stop.target <= 1:
        remedy = "Write a fraction above 0 and at most 1: 0.9 for 90 %."
        yield "target", f"no {score.label}", remedy
    if stop.patience is None and not stop.best:
        for key in ("monitor", "min_delta"):
            if getattr(stop, key) != Stop.model_fields[key].default:
                yield key, "nothing goes by it", "Set stop.patience or stop.best, or omit it."


def check_evaluated(stop: Stop, *, evaluates: bool) -> None:
    """Check that nothing goes by evaluations if there are none. Raises InvalidExperiment."""
    if not evaluates:
        check_table("stop", stop, _refused_without(stop))


def _refused_without(stop: Stop) -> Refused:
    for key in ("target", "patience", "best"):
        if getattr(stop, key):
            problem = "the trainer has no `evaluate`, so the cloud has no evaluations"
            yield key, problem, "Write one, or omit the key."


class Course:
    """The evaluations of a run so far, each taken once. They count as rounds.csv has them.

    `best`: the global round of the last improvement, 0 before the first evaluation. `ended`: why
    the run ends, None while it goes on; what is evaluated after that does not change it.
    """

    def __init__(self, stop: Stop, score: Score) -> None:
        self.best = 0
        self.ended: StopReason | None = None
        self._stop = stop
        self._score = score
        self._value = float("nan")  # of the last improvement
        self._since = 0  # evaluations since then
        self._last = 0  # the global round of the last evaluation

    def take(self, global_round: int, *, score: float, loss: float) -> bool:
        """Take note of a model's evaluation; return whether it is an improvement.

        A number that is not finite is none, and reaches no target. The last evaluation may be
        repeated by a resumed run, and changes nothing then.
        """
        if global_round == self._last:
            return global_round == self.best
        self._last = global_round
        score = as_written(score)
        value = as_written(loss)
        gain = self._value - value
        if self._stop.monitor == "score":
            value = score
            gain = value - self._value if self._score.higher else self._value - value
        better = gain > self._stop.min_delta or (self.best == 0 and not isnan(value))
        self._since += 1
        if better:
            self.best = global_round
            self._value = value
            self._since = 0
        if self.ended is not None:
            return better
        patience = self._stop.patience
        if self._score.reached(score, self._stop.target):
            self.ended = StopReason.TARGET
        elif patience is not None and self._since >= patience:
            self.ended = StopReason.PATIENCE
        return better

    def save(self) -> dict[str, Any]:
        """Return the state, in a form that JSON can hold."""
        return {
            "best": self.best,
            "value": self._value,
            "since": self._since,
            "last": self._last,
            "ended": self.ended,
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore what `save` returned; {}, before the first checkpoint, is no evaluation."""
        if not facts:
            return
        self.best, self._value, self._since, self._last = (
            facts[key] for key in ("best", "value", "since", "last")
        )
        self.ended = facts["ended"] and StopReason(facts["ended"])


def as_written(value: float) -> float:
    """Return a score or a loss as rounds.csv has it: with six digits, NaN if it is not finite."""
    if isfinite(value):
        return float(f"{value:.6g}")
    return nan
