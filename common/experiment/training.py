"""The training of a local round, and the learning rate of each global round."""

from __future__ import annotations

from math import cos, pi
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from common.errors import InvalidExperiment
from common.experiment.data import TEXTS, Data, is_csv
from common.experiment.objectives import CrossEntropy, ObjectiveSettings
from common.experiment.score import CROSS_ENTROPY, NUMBERS, LossName
from common.experiment.tables import Count, Fraction, Positive, SettingsTable

Share = Annotated[float, Field(ge=0, le=1)]


class Schedule(SettingsTable):
    """The learning rate over the global rounds. All local rounds of a global round have the same.

    In global round t (0-based) it is `training.learning_rate` times a factor. In the first `warmup` global rounds the
    factor is (t + 1) / (warmup + 1). After them, with s = t - warmup and S = global rounds - warmup, it is:

    - constant: 1
    - step: factor ** floor(s / every)
    - exponential: factor ** s
    - cosine: final + (1 - final) (1 + cos(pi s / S)) / 2, so `final` itself would come after the last global round
    """

    name: Literal["constant", "step", "exponential", "cosine"] = "constant"  # the curve after the warm-up
    warmup: Annotated[int, Field(ge=0)] = 0  # global rounds of a linear rise
    every: Count | None = None  # of `step`: global rounds between two steps
    factor: Fraction | None = None  # of `step` and `exponential`: the learning rate is multiplied by it
    final: Share = 0.0  # of `cosine`: share of the learning rate at the end


class Augmentation(SettingsTable):
    """Random changes to training images, for each sample and epoch, from the seed, the node and the round.

    They are applied on the device that trains, before pixels are normalised.
    """

    flip: bool = False  # mirror half of the images, left to right
    # Pad with so many zero pixels on each side, then cut a window of the image's size.
    crop: Annotated[int, Field(ge=0, le=1024)] = 0


class TrainingSettings(SettingsTable):
    """One local round on a device: SGD with a fresh optimiser and shuffled batches, on the loss and its objective."""

    epochs: Count = 1  # of each local round; with Tempo those of the first global round (c)
    batch_size: Count = 10  # samples; the last batch of an epoch may be smaller
    learning_rate: Positive = 0.01  # before the schedule
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # as in torch.optim.SGD
    nesterov: bool = False  # Nesterov momentum, as in torch.optim.SGD
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # L2 penalty, as in torch.optim.SGD
    clip_norm: Positive | None = None  # largest L2 norm of a step's gradients, all together
    # The loss on which every objective builds; with `data.targets = "numbers"` the default is the mean squared error.
    # Or a function of one's own, `package.module:function`, of outputs and targets, that returns each sample's loss.
    loss: LossName = CROSS_ENTROPY
    objective: ObjectiveSettings = CrossEntropy()
    schedule: Schedule = Schedule()
    augmentation: Augmentation = Augmentation()
    # `fp32`: all in float32, also on a GPU, where torch by default computes convolutions in TF32. `tf32`: these and
    # matrix products in TF32 on GPUs that have it (Ampere and later); elsewhere it is fp32. `bf16`: forward and
    # backward in torch's autocast, weights and steps in fp32. It pays with convolutions. On a CPU linear layers stay
    # fp32 in batches of 16 samples or fewer, where casts cost more than they save.
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    compile: bool = False  # `torch.compile`, before the run's clock starts; on one core it made small models slower
    # On CUDA, use only operations that give the same bits again; a model with others is refused. A CPU always gives
    # the same bits.
    deterministic: bool = False
    # Whether the devices of a process train in common steps: `always`, `never`, or `auto`, where it was measured to be
    # faster. Not set: `never` on a CPU, `auto` on a GPU. The last bits of a result then depend on who trains together,
    # so two runs may differ by rounding.
    vmapped: Literal["never", "auto", "always"] | None = None

    @model_serializer(mode="wrap")
    def _in_effect(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the objective of the loss alone, which is named after cross-entropy, where the loss is another."""
        named = self.loss == CROSS_ENTROPY or not self.plain
        return {key: value for key, value in dump(self).items() if named or key != "objective"}

    @property
    def plain(self) -> bool:
        """Whether devices minimise the loss and nothing else."""
        return isinstance(self.objective, CrossEntropy)


def learning_rate(training: TrainingSettings, *, global_round: int, global_rounds: int) -> float:
    """Return the learning rate of a global round (0-based) of so many, see `Schedule`."""
    schedule = training.schedule
    if global_round < schedule.warmup:
        return training.learning_rate * (global_round + 1) / (schedule.warmup + 1)
    s, whole = global_round - schedule.warmup, global_rounds - schedule.warmup
    share = 1.0
    if schedule.factor is not None and schedule.name == "exponential":
        share = schedule.factor**s
    elif schedule.factor is not None and schedule.every is not None and schedule.name == "step":
        share = schedule.factor ** (s // schedule.every)
    elif schedule.name == "cosine":
        share = schedule.final + (1 - schedule.final) * (1 + cos(pi * s / whole)) / 2
    return training.learning_rate * share


def check(training: TrainingSettings, data: Data) -> None:
    """Check the keys against each other and against the data. Raises InvalidExperiment."""
    if training.nesterov and not training.momentum:
        raise InvalidExperiment(
            "training.nesterov", True, "it is a form of momentum", "Set training.momentum above 0, or omit it."
        )
    for key in ("deterministic", "compile"):
        if training.vmapped in ("auto", "always") and getattr(training, key):
            problem, remedy = f"training.{key} trains devices one after another", "Omit one of the two keys."
            raise InvalidExperiment("training.vmapped", training.vmapped, problem, remedy)
    schedule = training.schedule
    needed = {"step": ("every", "factor"), "exponential": ("factor",)}
    for key in needed.get(schedule.name, ()):
        if getattr(schedule, key) is None:
            problem = f"schedule {schedule.name!r} needs it"
            raise InvalidExperiment(f"training.schedule.{key}", None, problem, f"Set training.schedule.{key}.")
    augmentation = training.augmentation
    kind = "text" if data.dataset in TEXTS else "a table" if is_csv(data.dataset) else ""
    if kind and (augmentation.flip or augmentation.crop):
        key, value = ("flip", True) if augmentation.flip else ("crop", augmentation.crop)
        raise InvalidExperiment(f"training.augmentation.{key}", value, f"{data.dataset} is {kind}", "Omit it.")
    if training.loss != CROSS_ENTROPY and training.plain and "objective" in training.model_fields_set:
        problem = f"training.loss is {training.loss}"
        raise InvalidExperiment("training.objective.name", "cross_entropy", problem, "Omit training.objective.")
    if data.targets == NUMBERS and training.objective.name == "fedgen":
        problem = "it needs labels, and data.targets are numbers"
        raise InvalidExperiment("training.objective.name", "fedgen", problem, "Use another objective and rule.")
