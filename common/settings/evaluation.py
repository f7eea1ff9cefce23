"""Where and when the models of a run are scored: by the cloud, on the test set, or by devices."""

from __future__ import annotations

from collections.abc import Set
from math import ceil
from typing import Annotated, Final, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.data import CLASSES, Data
from fedstrata.common.settings.tables import (
    AcceleratorName,
    Count,
    EffectiveTable,
    Fraction,
    Refused,
    check_table,
)
from fedstrata.common.settings.trainers import OWN_SAMPLES, TRAINER_KEY
from fedstrata.common.settings.training import ACCURACY, Score, TrainingSettings

# keys of what devices do
ON_DEVICES: Final = ("data", "held_out", "participation", "personalised", "per_class")


class EvaluationSettings(EffectiveTable):
    """Where the models of a run are scored, and after which global rounds. `[score]` names the
    scores.

    The cloud scores on the test set. A device scores the model that it receives with its first task
    of a global round, before it trains: that is the model of the global round before, whose row has
    the scores. The last model is sent again, to be scored alone.
    """

    at: Literal["cloud", "devices", "both"] = "cloud"  # who scores
    # global rounds between two models that are scored; the last one is scored, too
    every: Count = 1
    # Where the cloud evaluates: `cpu`, `cuda`, `cuda:1` (a GPU's number), or `auto`, a GPU if its
    # machine has one. It evaluates in fp32 everywhere. A GPU's scores and losses differ from a
    # CPU's by rounding.
    accelerator: AcceleratorName = "cpu"
    # What devices score on: `held_out`, a share of their own samples; `test`, the test set, of
    # which each sample is on exactly one device; or `users`, the test samples of the device's user,
    # as LEAF's data sets have them. With a trainer that is not `sgd`: `own`, the samples that it
    # evaluates on.
    data: Literal["held_out", "test", "users", "own"] = "held_out"
    # Of `data = "held_out"`: the share of a device's samples that it never trains on, at least one
    # of two or more.
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    # Share of all devices that score in a global round, drawn anew for each. Those without a task
    # do not score.
    participation: Fraction = 1.0
    # Score each device's own model, too: the one that it has trained in its last local round of the
    # global round.
    personalised: bool = False
    per_class: bool = False  # count the samples of each class, and the right ones, too; of accuracy

    @property
    def unused(self) -> Set[str]:
        """The keys that have no effect."""
        unused = set[str]()
        if not self.on_cloud:
            unused.add("accelerator")
        if not self.on_devices:
            unused.update(ON_DEVICES)
        if self.data != "held_out":
            unused.add("held_out")
        return unused

    @property
    def on_cloud(self) -> bool:
        """Whether the cloud scores."""
        return self.at != "devices"

    @property
    def on_devices(self) -> bool:
        """Whether devices score."""
        return self.at != "cloud"

    @property
    def takes_samples(self) -> bool:
        """Whether devices hold out samples of theirs."""
        return self.on_devices and self.data == "held_out"

    def taken_of(self, samples: int) -> int:
        """Return how many of a device's samples it holds out."""
        if self.takes_samples:
            return min(samples - 1, max(1, round(self.held_out * samples)))
        return 0

    def scoring(self, devices: int) -> int:
        """Return how many devices of so many are drawn to score in a global round."""
        return ceil(self.participation * devices)


def check_evaluation(
    evaluation: EvaluationSettings, data: Data, training: TrainingSettings, score: Score
) -> None:
    """Check the keys against each other, the data, the trainer and the score. Raises
    InvalidExperiment.
    """
    ours = training.trainer.learns_module
    if not ours:
        check_table("evaluation", evaluation, _refused_of_own(evaluation, training.trainer.whose))
    check_table("evaluation", evaluation, _refused_unused(evaluation))
    if score.also and not ours:
        problem = f"{TRAINER_KEY} {training.trainer.whose} has one score"
        raise InvalidExperiment("score.also", score.also, problem, "Omit it.")
    if evaluation.on_devices and ours:
        check_table("evaluation", evaluation, _refused_on_devices(evaluation, data, score))


def _refused_unused(evaluation: EvaluationSettings) -> Refused:
    for key in sorted(evaluation.model_fields_set & evaluation.unused):
        problem = f"no effect with evaluation.at = {evaluation.at!r}"
        needed = "evaluation.at"
        if key == "held_out" and evaluation.on_devices:
            problem = f"no effect with evaluation.data = {evaluation.data!r}"
            needed = 'evaluation.data = "held_out"'
        remedy = f"Omit it, or set {needed}."
        if evaluation.data == OWN_SAMPLES:
            remedy = "Omit it."
        yield key, problem, remedy


def _refused_on_devices(evaluation: EvaluationSettings, data: Data, score: Score) -> Refused:
    if evaluation.data == OWN_SAMPLES:
        problem = f"it is for trainers of your own, and {TRAINER_KEY} is sgd"
        yield "data", problem, "Use held_out, test or users."
    if evaluation.data != "held_out" and data.private:
        problem = "every device has samples of its own, and the cloud alone has the test set"
        yield "data", problem, "Use held_out."
    if evaluation.data == "users" and data.partition != "natural":
        problem = f"data.partition is {data.partition!r}, and devices are no users"
        yield "data", problem, 'Use data.partition = "natural", or held_out.'
    if evaluation.per_class and (data.targets != CLASSES or ACCURACY not in score.names):
        yield "per_class", "it counts right classes, and no score is accuracy", "Omit it."


def _refused_of_own(evaluation: EvaluationSettings, trainer: str) -> Refused:
    """Yield the keys that a trainer does not read which evaluates by code of its own."""
    wanted: dict[str, object] = {"accelerator": "cpu", "per_class": False}
    if evaluation.on_devices:
        wanted["data"] = OWN_SAMPLES
    for key, value in wanted.items():
        if getattr(evaluation, key) != value:
            problem = f"{TRAINER_KEY} {trainer} evaluates on its own samples, by code of its own"
            yield key, problem, "Omit it."
