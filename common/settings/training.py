"""What devices train by, and what is scored: loss, objective, learning rate of each round, score.

The formulas and their sources are in `common/learning/losses.py` and `evaluation.py`, and in
`device/training/objectives/`, one file per objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import cos, pi
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings import own
from fedstrata.common.settings.data import CLASSES, NUMBERS, OWN_FORM
from fedstrata.common.settings.own import OwnName, OwnSettings, is_own
from fedstrata.common.settings.tables import (
    Count,
    EffectiveTable,
    Fraction,
    Positive,
    Selected,
    SettingsTable,
    proposal,
)
from fedstrata.common.settings.trainers import ByRound, SgdTrainer, TrainerSettings

Share = Annotated[float, Field(ge=0, le=1)]
ACCURACY: Final = "accuracy"
CROSS_ENTROPY: Final = "cross_entropy"
BINARY: Final = "binary_cross_entropy"
# by what the targets are, the default first
LOSSES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        CLASSES: (CROSS_ENTROPY,),
        NUMBERS: ("mean_squared_error", "mean_absolute_error", "huber", BINARY),
    }
)
SCORES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        CLASSES: (ACCURACY,),
        NUMBERS: ("r2", "mean_squared_error", "mean_absolute_error", "binary_accuracy"),
    }
)
HIGHER: Final = (ACCURACY, "r2", "binary_accuracy")
SCORES_MOST: Final = 8  # of an experiment
SHARES: Final = (ACCURACY, "binary_accuracy")  # 0 to 1, for people in percent
LossName = Annotated[
    str, Field(json_schema_extra={"enum": [name for names in LOSSES.values() for name in names]})
]
ScoreName = Annotated[
    str, Field(json_schema_extra={"enum": [name for names in SCORES.values() for name in names]})
]


class ObjectiveTable(SettingsTable):
    """The settings of an objective."""

    # The vectors, float32 [D] each, that a device keeps from task to task.
    keeps: ClassVar[Sequence[str]] = ()
    # The rule of the devices' tier that it needs.
    rule: ClassVar[str | None] = None
    # Whether some arrays of the model may be personal.
    parts: ClassVar[bool] = True
    # Whether it reads the trained model as the parent decodes it.
    reads_upload: ClassVar[bool] = False

    name: str  # the objective

    @property
    def remembers(self) -> bool:
        """Whether a device has state that persists between its tasks."""
        return bool(self.keeps)

    @property
    def proximal(self) -> float:
        """The weight of a proximal term, 0 without."""
        return 0.0


class CrossEntropy(ObjectiveTable):
    """The mean loss of a batch, and nothing else. The name is that of the default loss; omit it for
    another.
    """

    name: Literal["cross_entropy"] = "cross_entropy"  # the objective


class FedProx(ObjectiveTable):
    """The loss and a proximal term: mu / 2 times the squared distance to the parameters
    received.
    """

    name: Literal["fedprox"] = "fedprox"  # the objective
    mu: Annotated[float, Field(ge=0)] = 0.01  # weight of the term; 0 is the loss alone

    @property
    def proximal(self) -> float:
        """The weight of the term."""
        return self.mu


class FedSAM(ObjectiveTable):
    """The loss with sharpness-aware minimisation: each gradient is taken at parameters moved up the
    slope.
    """

    name: Literal["fedsam"] = "fedsam"  # the objective
    # L2 norm of that move, over all parameters; 0 is the loss alone
    rho: Annotated[float, Field(ge=0)] = 0.1


class ScaffoldCorrection(ObjectiveTable):
    """The loss, each gradient corrected by the difference of the devices' control variate and its
    own.
    """

    keeps = ("own_control",)
    rule = "scaffold"

    name: Literal["scaffold"] = "scaffold"  # the objective


class DynamicRegulariser(ObjectiveTable):
    """The loss with a dynamic regulariser, by which the devices' optima become those of the
    whole.
    """

    keeps = ("own_gradient",)
    rule = "feddyn"
    reads_upload = True

    name: Literal["feddyn"] = "feddyn"  # the objective
    alpha: Annotated[float, Field(ge=0)] = 0.01  # weight of the regulariser; 0 is the loss alone


class ModelContrast(ObjectiveTable):
    """The loss and a contrast of features: near the received model's, far from the device's
    previous ones.
    """

    keeps = ("previous",)
    parts = False

    name: Literal["moon"] = "moon"  # the objective
    mu: Annotated[float, Field(ge=0)] = 1.0  # weight of the term; 0 is the loss alone
    temperature: Positive = 0.5  # by which the differences of cosines are divided


class GeneratedFeatures(ObjectiveTable):
    """The loss of classes, and two terms for features that the parent's generator made of
    labels.
    """

    rule = "fedgen"
    parts = False

    name: Literal["fedgen"] = "fedgen"  # the objective
    # weight of the cross-entropy of generated features of random labels
    alpha: Annotated[float, Field(ge=0)] = 0.2
    # weight of the divergence from the prediction for generated features
    beta: Annotated[float, Field(ge=0)] = 0.2


class OwnObjective(ObjectiveTable, OwnSettings):
    """An objective of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`

    @property
    def remembers(self) -> bool:
        """Whether a device has state that persists: always, it may have some."""
        return True


OBJECTIVES: Final[Mapping[str, type[ObjectiveTable]]] = MappingProxyType(
    {
        table.model_fields["name"].default: table
        for table in (
            *(CrossEntropy, FedProx, FedSAM, ScaffoldCorrection, DynamicRegulariser),
            *(ModelContrast, GeneratedFeatures),
        )
    }
)

ObjectiveSettings = Annotated[
    ObjectiveTable,
    Selected(OBJECTIVES, "fedstrata.common.settings.training:OwnObjective", "objectives"),
]


class OptimizerTable(SettingsTable):
    """The settings of an optimiser, which begins anew in each local round."""

    name: str  # the optimiser


class Sgd(OptimizerTable):
    """SGD. Its keys are `momentum`, `nesterov` and `weight_decay` of `training`; they may stand
    here, too.
    """

    name: Literal["sgd"] = "sgd"  # the optimiser


class AdaptiveTable(OptimizerTable):
    """The settings of an optimiser that divides the mean of the gradients by the root of their
    squares' mean.
    """

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # decay of the mean of the gradients
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999  # decay of the mean of their squares
    epsilon: Positive = 1e-8  # added to the root of the squares' mean


class Adam(AdaptiveTable):
    """Adam, as torch.optim.Adam (Kingma and Ba 2015)."""

    name: Literal["adam"] = "adam"  # the optimiser
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # L2 penalty, a part of the gradient


class AdamW(AdaptiveTable):
    """Adam with a decay of the weights apart from the gradient, as torch.optim.AdamW (Loshchilov
    and Hutter 2019).
    """

    name: Literal["adamw"] = "adamw"  # the optimiser
    # share of each weight, times the learning rate, in each step
    weight_decay: Annotated[float, Field(ge=0)] = 0.01


OPTIMIZERS: Final[Mapping[str, type[OptimizerTable]]] = MappingProxyType(
    {"sgd": Sgd, "adam": Adam, "adamw": AdamW}
)
OF_SGD: Final = ("momentum", "nesterov", "weight_decay")  # the keys of SGD

OptimizerSettings = Annotated[OptimizerTable, Selected(OPTIMIZERS)]


class Schedule(SettingsTable):
    """The learning rate over the global rounds. All local rounds of a global round have the same.

    In global round t (0-based) it is `training.learning_rate` times a factor. In the first `warmup`
    global rounds the factor is (t + 1) / (warmup + 1). After them, with s = t - warmup and S =
    global rounds - warmup, it is:

    - constant: 1
    - step: factor ** floor(s / every)
    - exponential: factor ** s
    - cosine: final + (1 - final) (1 + cos(pi s / S)) / 2, so `final` itself would come after the
      last global round
    - inverse: halving / (halving + s), as in Theorem 1 of FedCross
    """

    # The curve after the warm-up.
    name: Literal["constant", "step", "exponential", "cosine", "inverse"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0  # global rounds of a linear rise
    every: Count | None = None  # of `step`: global rounds between two steps
    # of `step` and `exponential`: the learning rate is multiplied by it
    factor: Fraction | None = None
    final: Share = 0.0  # of `cosine`: share of the learning rate at the end
    halving: Positive | None = None  # of `inverse`: global rounds until the learning rate is halved


class AugmentationTable(SettingsTable):
    """The settings of an augmentation of training samples."""

    name: str  # the augmentation


class Augmentation(AugmentationTable):
    """Random changes to training images, for each sample and epoch, from the seed, the node and the
    round.

    They are applied on the device that trains, before pixels are normalised.
    """

    name: Annotated[Literal["images"], Field(exclude=True)] = "images"  # the augmentation
    flip: bool = False  # mirror half of the images, left to right
    # Zero pixels added on each side, before a window of the image's size is cut.
    crop: Annotated[int, Field(ge=0, le=1024)] = 0

    @property
    def changes(self) -> bool:
        """Whether it changes images."""
        return self.flip or self.crop > 0


class OwnAugmentation(AugmentationTable, OwnSettings):
    """An augmentation of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`


AUGMENTATIONS: Final[Mapping[str, type[AugmentationTable]]] = MappingProxyType(
    {"images": Augmentation}
)

AugmentationSettings = Annotated[
    AugmentationTable, Selected(AUGMENTATIONS, "fedstrata.common.settings.training:OwnAugmentation")
]


OF_MODULES: Final = (
    "optimizer",
    "loss",
    "objective",
    "augmentation",
    "precision",
    "recorded",
    "deterministic",
    "vmapped",
)


class TrainingSettings(EffectiveTable):
    """One local round on a device: SGD with a fresh optimiser and shuffled batches, on the loss and
    its objective.
    """

    epochs: Count = 1  # of each local round; with Tempo those of the first global round (c)
    batch_size: Count = 10  # samples; the last batch of an epoch may be smaller
    learning_rate: Positive = 0.01  # before the schedule
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # as in torch.optim.SGD
    nesterov: bool = False  # Nesterov momentum, as in torch.optim.SGD
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # L2 penalty, as in torch.optim.SGD
    # `sgd`, whose keys are the three above; `adam` or `adamw`, with keys of their own.
    optimizer: OptimizerSettings = Sgd()
    clip_norm: Positive | None = None  # largest L2 norm of a step's gradients, all together
    # The loss on which every objective builds; with `data.targets = "numbers"` the default is the
    # mean squared error. Or a function of your own, `package.module:function`, of outputs and
    # targets, that returns each sample's loss.
    loss: LossName = CROSS_ENTROPY
    objective: ObjectiveSettings = CrossEntropy()
    schedule: Schedule = Schedule()
    augmentation: AugmentationSettings = Augmentation()
    # `fp32`: all in float32, also on a GPU, where torch by default computes convolutions in TF32.
    # `tf32`: these and matrix products in TF32 on GPUs that have it (Ampere and later); elsewhere
    # it is fp32. `bf16`: forward and backward in torch's autocast, weights and steps in fp32. It
    # pays with convolutions. On a CPU linear layers stay fp32 in batches of 16 samples or fewer,
    # where casts cost more than they save.
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    # Whether a CPU runs the steps of small models as programs, recorded in trial steps, without
    # Python; the bits are the same. `auto`: of nets that ship, and of your own that are PyTorch's
    # layers in nn.Sequential, unless the loss or the objective is your own. True: of all nets;
    # programs that run code of your own are compared as they run.
    recorded: Literal["auto", True, False] = "auto"
    # On CUDA, use only operations that give the same bits again; a model with others is refused. A
    # CPU always gives the same bits.
    deterministic: bool = False
    # False: the devices of a process train one after another on a GPU, too. Not set: there they
    # train in common steps, unless the model, the loss, the objective or the augmentation is your
    # own. The last bits of a result then depend on who trains together, so two runs may differ by
    # rounding.
    vmapped: Literal[False] | None = None
    # what trains: `sgd`, a Flower app, or a class of your own
    trainer: TrainerSettings = SgdTrainer()
    # Numbers for a trainer that is not `sgd`, by the global round from which they hold: `mu = { 1 =
    # 0.0, 10 = 0.1 }`.
    by_round: ByRound = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, tree: Any) -> Any:
        """Let the keys of SGD in a table `optimizer` be those of the training."""
        given = tree.get("optimizer") if isinstance(tree, Mapping) else None
        if not isinstance(given, Mapping) or given.get("name", "sgd") != "sgd":
            return tree
        left = dict(given)
        moved = {key: left.pop(key) for key in OF_SGD if key in given}
        for key, value in moved.items():
            if key in tree and tree[key] != value:
                problem = f"training.optimizer.{key} is {value}"
                at = f"training.{key}"
                raise InvalidExperiment(at, tree[key], problem, "Omit one of the two.")
        return {**tree, **moved, "optimizer": left}

    @property
    def unused(self) -> Set[str]:
        """The keys that have no effect with the trainer, or the optimiser.

        That is also the objective of the loss alone, which is named after cross-entropy, where the
        loss is another.
        """
        unused = {*OF_MODULES}
        if self.trainer.learns_module:
            unused = {"trainer", "by_round"}
        if self.loss != CROSS_ENTROPY and self.plain:
            unused.add("objective")
        if self.by_sgd:
            return unused | {"optimizer"}
        return unused.union(OF_SGD)

    @property
    def remembers(self) -> bool:
        """Whether a device has state that persists between its tasks."""
        return self.objective.remembers or self.trainer.remembers

    @property
    def by_sgd(self) -> bool:
        """Whether the optimiser is SGD."""
        return isinstance(self.optimizer, Sgd)

    @property
    def image_changes(self) -> Augmentation:
        """The flips and crops of images, none with an augmentation of one's own."""
        if isinstance(self.augmentation, Augmentation):
            return self.augmentation
        return Augmentation()

    @property
    def own_augmentation(self) -> OwnAugmentation | None:
        """The user's own augmentation, None without."""
        if isinstance(self.augmentation, OwnAugmentation):
            return self.augmentation
        return None

    @property
    def plain(self) -> bool:
        """Whether devices minimise the loss and nothing else."""
        return isinstance(self.objective, CrossEntropy)


class Score(EffectiveTable):
    """The score of models, beside the loss.

    `accuracy`: share of the samples whose largest output is their class. `r2`: 1 minus the ratio of
    the squared errors to those of the targets' mean, the mean of several targets.
    `binary_accuracy`: share of the targets, 0 or 1, on the side of the output's sign. The default
    is accuracy for classes, and for numbers R2, with binary cross-entropy binary accuracy.
    """

    name: ScoreName = ACCURACY  # a score, or a function of your own, `package.module:function`
    # of your own function: which of two scores is the better one
    better: Literal["higher", "lower"] | None = None
    # Further scores, which are recorded only: targets, the best model, charts and comparisons are
    # of `name`.
    also: Annotated[list[ScoreName], Field(max_length=SCORES_MOST - 1)] = Field(
        default_factory=list
    )

    @property
    def unused(self) -> Set[str]:
        """`also`, if it names no score."""
        if self.also:
            return set()
        return {"also"}

    @property
    def names(self) -> tuple[str, ...]:
        """All scores, in the order of their sums."""
        return (self.name, *self.also)

    @property
    def columns(self) -> dict[str, str]:
        """The further scores with the ends of their columns: `score_f1` of `mine:f1`."""
        return {name: f"score_{name.rpartition(':')[2]}" for name in self.also}

    @property
    def higher(self) -> bool:
        """Whether the higher of two scores is the better one."""
        if self.better is None:
            return self.name in HIGHER
        return self.better == "higher"

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
        if self.higher:
            return score >= target
        return score <= target


def learning_rate(training: TrainingSettings, *, global_round: int, global_rounds: int) -> float:
    """Return the learning rate of a global round (0-based) of so many, see `Schedule`."""
    schedule = training.schedule
    if global_round < schedule.warmup:
        return training.learning_rate * (global_round + 1) / (schedule.warmup + 1)
    s = global_round - schedule.warmup
    whole = global_rounds - schedule.warmup
    share = 1.0
    if schedule.factor is not None and schedule.name == "exponential":
        share = schedule.factor**s
    elif schedule.factor is not None and schedule.every is not None and schedule.name == "step":
        share = schedule.factor ** (s // schedule.every)
    elif schedule.name == "inverse" and schedule.halving is not None:
        share = schedule.halving / (schedule.halving + s)
    elif schedule.name == "cosine":
        share = schedule.final + (1 - schedule.final) * (1 + cos(pi * s / whole)) / 2
    return training.learning_rate * share


def settings_in(training: TrainingSettings, *, global_round: int, rate: float) -> dict[str, float]:
    """Return the numbers for a trainer in a global round (0-based) with this learning rate."""
    numbers = {
        "batch_size": training.batch_size,
        "learning_rate": rate,
        "momentum": training.momentum,
        "weight_decay": training.weight_decay,
    }
    if training.clip_norm is not None:
        numbers["clip_norm"] = training.clip_norm
    for name, values in training.by_round.items():
        begun = [begin for begin in map(int, values) if begin <= global_round + 1]
        if begun:
            numbers[name] = values[str(max(begun))]
    return numbers


def with_loss_and_score(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an experiment's keys with the loss and the score that its targets have by default."""
    data, training, score = (tree.get(key, {}) for key in ("data", "training", "score"))
    if not all(isinstance(each, Mapping) for each in (data, training, score)):
        return tree
    if data.get("targets") != NUMBERS:
        return tree
    training = {"loss": LOSSES[NUMBERS][0], **training}
    usual = SCORES[NUMBERS][0]
    if training["loss"] == BINARY:
        usual = "binary_accuracy"
    return {**tree, "training": training, "score": {"name": usual, **score}}


def check_score(targets: str, loss: str, score: Score) -> None:
    """Check the names against the targets, and the score's other keys. Raises InvalidExperiment."""
    _check_name("training.loss", loss, LOSSES, targets)
    _check_name("score.name", score.name, SCORES, targets)
    if is_own(score.name) and score.better is None:
        remedy = "Set it to 'higher' or 'lower'."
        raise InvalidExperiment("score.better", None, f"not known of {score.name}", remedy)
    for name in score.also:
        _check_name("score.also", name, SCORES, targets)
    columns = ["score_" + score.name.rpartition(":")[2], *score.columns.values()]
    for name, column in score.columns.items():
        if columns.count(column) > 1:
            remedy = "Name each score once, and functions differently."
            raise InvalidExperiment("score.also", name, "two scores have this name", remedy)
    better = "higher" if score.name in HIGHER else "lower"
    if score.better not in (None, better) and not is_own(score.name):
        problem = f"{score.name} is better when {better}"
        raise InvalidExperiment("score.better", score.better, problem, "Omit it.")


def _check_name(key: str, name: str, known: Mapping[str, tuple[str, ...]], targets: str) -> None:
    if is_own(name):
        own.check_form(key, name, OWN_FORM, "Write for instance mine:function.")
        return
    if name in known[targets]:
        return
    fitting = [*known[targets], OWN_FORM]
    problem = f"data.targets are {targets}"
    remedy = f"Use {' or '.join(fitting)}."
    if not any(name in names for names in known.values()):
        kind = "loss" if known is LOSSES else "score"
        problem = f"no such {kind}"
        remedy = proposal(name, fitting, what="There are")
    raise InvalidExperiment(key, name, problem, remedy)
