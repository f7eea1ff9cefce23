"""Where and when the models of a run are scored: by the cloud on the test set, by the devices, or
by both.
"""

from __future__ import annotations

from collections.abc import Set
from math import ceil
from typing import Annotated, Final, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.data import CLASSES, Data
from fedstrata.common.settings.tables import AcceleratorName, Count, EffectiveTable, Fraction
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
        if self.at == "devices":
            unused = {"accelerator"}
        elif self.at == "both":
            unused = set()
        else:
            unused = set(ON_DEVICES)
        return unused | ({"held_out"} if self.data != "held_out" else set())

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
    if not training.trainer.learns_module:
        _check_own(evaluation, training.trainer.whose)
    for key in sorted(evaluation.model_fields_set & evaluation.unused):
        by = "data" if key == "held_out" and evaluation.on_devices else "at"
        problem = f"no effect with evaluation.{by} = {getattr(evaluation, by)!r}"
        needed = 'evaluation.data = "held_out"' if by == "data" else "evaluation.at"
        remedy = "Omit it." if evaluation.data == OWN_SAMPLES else f"Omit it, or set {needed}."
        raise InvalidExperiment(f"evaluation.{key}", getattr(evaluation, key), problem, remedy)
    if score.also and not training.trainer.learns_module:
        problem = f"{TRAINER_KEY} {training.trainer.whose} has one score"
        raise InvalidExperiment("score.also", score.also, problem, "Omit it.")
    if not evaluation.on_devices or not training.trainer.learns_module:
        return
    if evaluation.data == OWN_SAMPLES:
        problem = f"it is for trainers of your own, and {TRAINER_KEY} is sgd"
        raise InvalidExperiment(
            "evaluation.data", evaluation.data, problem, "Use held_out, test or users."
        )
    if evaluation.data != "held_out" and data.private:
        problem = "every device has samples of its own, and the cloud alone has the test set"
        raise InvalidExperiment("evaluation.data", evaluation.data, problem, "Use held_out.")
    if evaluation.data == "users" and data.partition != "natural":
        problem = f"data.partition is {data.partition!r}, and devices are no users"
        raise InvalidExperiment(
            "evaluation.data", "users", problem, 'Use data.partition = "natural", or held_out.'
        )
    if evaluation.per_class and (data.targets != CLASSES or ACCURACY not in score.names):
        problem = "it counts right classes, and no score is accuracy"
        raise InvalidExperiment("evaluation.per_class", True, problem, "Omit it.")


def _check_own(evaluation: EvaluationSettings, trainer: str) -> None:
    """Check the keys with a trainer that evaluates by code of its own. Raises InvalidExperiment."""
    wanted: dict[str, object] = {"accelerator": "cpu", "per_class": False}
    if evaluation.on_devices:
        wanted["data"] = OWN_SAMPLES
    for key, value in wanted.items():
        if (given := getattr(evaluation, key)) != value:
            problem = f"{TRAINER_KEY} {trainer} evaluates on its own samples, by code of its own"
            raise InvalidExperiment(f"evaluation.{key}", given, problem, "Omit it.")
