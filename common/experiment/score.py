"""The loss and the score of an experiment, by what its targets are.

The formulas are in `common/learning/losses.py` and `common/learning/scores.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment import own
from common.experiment.own import is_own
from common.experiment.tables import SettingsTable, proposal

CLASSES: Final = "classes"
NUMBERS: Final = "numbers"
ACCURACY: Final = "accuracy"
CROSS_ENTROPY: Final = "cross_entropy"
BINARY: Final = "binary_cross_entropy"
LOSSES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(  # by what the targets are, the default first
    {CLASSES: (CROSS_ENTROPY,), NUMBERS: ("mean_squared_error", "mean_absolute_error", "huber", BINARY)}
)
SCORES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {CLASSES: (ACCURACY,), NUMBERS: ("r2", "mean_squared_error", "mean_absolute_error", "binary_accuracy")}
)
HIGHER: Final = (ACCURACY, "r2", "binary_accuracy")
SHARES: Final = (ACCURACY, "binary_accuracy")  # 0 to 1, for people in percent
OWN_FORM: Final = "package.module:function"
LossName = Annotated[str, Field(json_schema_extra={"enum": [name for names in LOSSES.values() for name in names]})]
ScoreName = Annotated[str, Field(json_schema_extra={"enum": [name for names in SCORES.values() for name in names]})]


class Score(SettingsTable):
    """What the cloud evaluates on the test set, beside the loss.

    `accuracy`: share of the samples whose largest output is their class. `r2`: 1 minus the ratio of the squared errors
    to those of the targets' mean, the mean of several targets. `binary_accuracy`: share of the targets, 0 or 1, on the
    side of the output's sign. The default is accuracy for classes, and for numbers R2, with binary cross-entropy
    binary accuracy.
    """

    name: ScoreName = ACCURACY  # a score, or a function of one's own, `package.module:function`
    better: Literal["higher", "lower"] | None = None  # of one's own: which of two scores is the better one
    # The run ends once the score has reached it; for accuracy: `target_accuracy`.
    target: float | None = None

    @property
    def higher(self) -> bool:
        """Whether the higher of two scores is the better one."""
        return self.name in HIGHER if self.better is None else self.better == "higher"

    @property
    def share(self) -> bool:
        """Whether people read it in percent."""
        return self.name in SHARES

    @property
    def label(self) -> str:
        """The score's name for people: of one's own, its function's."""
        return self.name.rpartition(":")[2].replace("_", " ")

    def reached(self, score: float | None, target: float | None) -> bool:
        """Return whether a score is as good as a target; without either it is not."""
        if score is None or target is None:
            return False
        return score >= target if self.higher else score <= target


def resolve(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an experiment's keys with the loss and the score that its targets have by default."""
    data, training, score = (tree.get(key, {}) for key in ("data", "training", "score"))
    if not all(isinstance(each, Mapping) for each in (data, training, score)) or data.get("targets") != NUMBERS:
        return tree
    training = {"loss": LOSSES[NUMBERS][0], **training}
    score = {"name": "binary_accuracy" if training["loss"] == BINARY else SCORES[NUMBERS][0], **score}
    return {**tree, "training": training, "score": score}


def check(targets: str, loss: str, score: Score, *, target_accuracy: float | None) -> None:
    """Check the names against the targets, and the score's other keys. Raises InvalidExperiment."""
    _check_name("training.loss", loss, LOSSES, targets)
    _check_name("score.name", score.name, SCORES, targets)
    if is_own(score.name) and score.better is None:
        remedy = "Set it to 'higher' or 'lower'."
        raise InvalidExperiment("score.better", None, f"not known of {score.name}", remedy)
    if score.better is not None and score.higher != (score.name in HIGHER) and not is_own(score.name):
        problem = f"{score.name} is better when {'higher' if score.name in HIGHER else 'lower'}"
        raise InvalidExperiment("score.better", score.better, problem, "Omit it.")
    if score.name == ACCURACY and score.target is not None:
        raise InvalidExperiment("score.target", score.target, "the score is accuracy", "Use target_accuracy.")
    if score.name != ACCURACY and target_accuracy is not None:
        problem = f"the score is {score.name}, not accuracy"
        raise InvalidExperiment("target_accuracy", target_accuracy, problem, "Use score.target.")


def _check_name(key: str, name: str, known: Mapping[str, tuple[str, ...]], targets: str) -> None:
    if is_own(name):
        if not re.fullmatch(own.FORM, name):
            raise InvalidExperiment(key, name, f"not of the form {OWN_FORM}", "Write for instance mine:function.")
        return
    if name in known[targets]:
        return
    everything = [each for names in known.values() for each in names]
    if name not in everything:
        remedy = proposal(name, [*known[targets], OWN_FORM], what="There are")
        raise InvalidExperiment(key, name, f"no such {'loss' if known is LOSSES else 'score'}", remedy)
    problem, remedy = f"data.targets are {targets}", f"Use {' or '.join([*known[targets], OWN_FORM])}."
    raise InvalidExperiment(key, name, problem, remedy)
