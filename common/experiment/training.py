"""What an experiment may say about a local round, and how fast it learns in each global round."""

from __future__ import annotations

from math import cos, pi
from typing import Annotated, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment.data import TEXTS, Data
from common.experiment.tables import Count, Fraction, Positive, SettingsTable

Share = Annotated[float, Field(ge=0, le=1)]


class Schedule(SettingsTable):
    """How the learning rate changes over the global rounds; a global round's local rounds all have the same.

    Of a global round t (0-based) the rate is `training.learning_rate` times, in the `warmup` first ones,
    (t + 1) / (warmup + 1); and then, with s = t - warmup and S = global rounds - warmup:

    - constant: 1
    - step: factor ** floor(s / every)
    - exponential: factor ** s
    - cosine: final + (1 - final) (1 + cos(pi s / S)) / 2, so `final` itself would come after the last global round
    """

    name: Literal["constant", "step", "exponential", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0  # global rounds
    every: Count | None = None  # of step: global rounds
    factor: Fraction | None = None  # of step and exponential
    final: Share = 0.0  # of cosine


class Augmentation(SettingsTable):
    """Changes to training images, drawn anew for each sample and epoch, before pixels are normalised.

    `flip`: left and right change places in half of the images. `crop`: the image is framed with so many pixels of
    zero at each side, and a window of its own size is cut out of that anywhere.
    """

    flip: bool = False
    crop: Annotated[int, Field(ge=0)] = 0


class TrainingSettings(SettingsTable):
    """One local round on a device: SGD with a fresh optimiser, shuffled batches, cross-entropy."""

    epochs: Count = 1
    batch_size: Count = 10
    learning_rate: Positive = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_norm: Positive | None = None  # a step's gradients together have at most this L2 norm
    schedule: Schedule = Schedule()
    augmentation: Augmentation = Augmentation()
    # bf16: torch's autocast, but on a CPU not of linear layers in small batches; weights and steps stay fp32.
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False  # torch.compile
    # Of CUDA; a CPU always is. Not the default, since an operation without such a kernel would end the run.
    deterministic: bool = False


def learning_rate(training: TrainingSettings, *, global_round: int, global_rounds: int) -> float:
    """Return the learning rate of a global round (0-based) of so many, as `Schedule` says."""
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
    """Check what the keys need of one another and of the data. Raises InvalidExperiment."""
    if training.nesterov and not training.momentum:
        raise InvalidExperiment(
            "training.nesterov", True, "it is a form of momentum", "Set training.momentum above 0, or leave it out."
        )
    schedule = training.schedule
    needed = {"step": ("every", "factor"), "exponential": ("factor",)}
    for key in needed.get(schedule.name, ()):
        if getattr(schedule, key) is None:
            problem = f"schedule {schedule.name!r} needs it"
            raise InvalidExperiment(f"training.schedule.{key}", None, problem, f"Set training.schedule.{key}.")
    augmentation = training.augmentation
    if data.dataset in TEXTS and (augmentation.flip or augmentation.crop):
        key, value = ("flip", True) if augmentation.flip else ("crop", augmentation.crop)
        raise InvalidExperiment(f"training.augmentation.{key}", value, f"{data.dataset} is text", "Leave it out.")
