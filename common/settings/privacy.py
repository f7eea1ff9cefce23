"""The table `privacy` of a tier: what is protected, the clipping, the noise, and epsilon.

A unit is a sample, or a child of the tier: a device, or an institution with all below it.
Neighbouring runs differ by one unit, in whose place there is a zero gradient, or a zero update. So
the sensitivity is `clip_norm`, and that of the count of updates within a bound is 1. Each release
of a unit has noise of `noise_multiplier` times that.

    unit         a release                              releases of a unit
    sample       a step of a device                     one in each epoch: a sample is in one batch
    sample       a step, with `sampling_rate`           all steps, each with the sampling rate
    device,      an upload, or the mean of the uploads  the rounds in which the child is selected
    institution

No amplification is claimed but for `sampling_rate`: neither a fixed number of children in a round,
nor a selection by losses, nor shuffled batches are Poisson sampling.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Final, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings import accountant
from fedstrata.common.settings.tables import Positive, Refused, SettingsTable, check_table
from fedstrata.common.settings.trainers import TRAINER_KEY
from fedstrata.common.settings.training import FedProx, TrainingSettings

SAMPLE: Final = "sample"


class PrivacySettings(SettingsTable):
    """Differential privacy of a tier's children, or of the samples on its devices."""

    # What is protected: each sample of a device, or each child of this tier, a device or an
    # institution.
    unit: Literal["none", "sample", "device", "institution"] = "none"
    # Largest L2 norm of a child's update, or of a sample's gradient; longer ones are clipped.
    clip_norm: Positive | None = None
    # Standard deviation of the noise, over `clip_norm`; 0 only clips.
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    # Of (epsilon, delta); below 1 / units: of the tier's children, or of a device's samples.
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    max_epsilon: Positive | None = None  # the run ends before the global round that could exceed it
    # Who clips and adds the noise: the child, which then need not trust its parent, or the parent.
    noise_by: Literal["child", "parent"] = "child"
    # `system`: noise from a secret of the node, drawn for the run: private, and a replay is not
    # possible. `seeded`: noise from the experiment's seed: a replay is possible, and nobody is
    # protected.
    noise: Literal["system", "seeded"] = "system"
    # Of clipping by quantile, at the parent: the share of the updates that `clip_norm` should not
    # clip. It then is the first bound.
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    quantile_rate: Positive = 0.2  # of the bound's steps, in natural logarithms
    # Of `sample`: each step takes each sample with this probability (Poisson), in place of shuffled
    # batches.
    sampling_rate: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def acts(self) -> bool:
        """Whether anything is clipped, or gets noise."""
        return self.unit != "none" and (
            self.clip_norm is not None or self.sampling_rate is not None
        )

    @property
    def multiplier(self) -> float:
        """The noise multiplier, 0 if it is not set."""
        return self.noise_multiplier or 0.0

    @property
    def on_samples(self) -> bool:
        """Whether devices train by DP-SGD."""
        return self.acts and self.unit == SAMPLE

    @property
    def by_child(self) -> bool:
        """Whether children clip their updates."""
        return self.acts and self.unit != SAMPLE and self.noise_by == "child"

    @property
    def by_parent(self) -> bool:
        """Whether the parent clips its children's updates."""
        return self.acts and self.unit != SAMPLE and self.noise_by == "parent"

    @property
    def secret(self) -> bool:
        """Whether the noise comes from a secret of the node."""
        return (
            self.acts
            and self.noise == "system"
            and (self.multiplier > 0 or self.sampling_rate is not None)
        )

    @property
    def remembers(self) -> bool:
        """Whether the parent has state between its tasks: the bound that follows a quantile."""
        return self.by_parent and self.quantile is not None

    @property
    def accounted(self) -> bool:
        """Whether epsilon is known."""
        return self.acts and self.delta is not None

    def releases(self, epochs: int) -> int:
        """Return the releases of a unit in one participation with so many epochs."""
        if self.unit != SAMPLE:
            return 1
        if self.sampling_rate is None:
            return epochs
        return epochs * accountant.steps_in_epoch(self.sampling_rate)

    def epsilon(self, releases: int) -> float:
        """Return epsilon of a unit after so many releases; infinite without noise."""
        if self.delta is None:
            return inf
        return accountant.epsilon(
            self.multiplier,
            releases=releases,
            delta=self.delta,
            sampling_rate=self.sampling_rate or 1.0,
        )

    def affords(self, releases: int) -> bool:
        """Return whether a unit may have so many releases."""
        return (
            self.max_epsilon is None
            or not self.accounted
            or self.epsilon(releases) <= self.max_epsilon
        )


NO_PRIVACY: Final = PrivacySettings()


def check_privacy(
    key: str,
    privacy: PrivacySettings,
    *,
    children: str,
    count: int,
    devices: bool,
    rounds: int,
    epochs: int,
) -> None:
    """Check a tier's keys against each other. Raises InvalidExperiment.

    `children`: what they are; `count`: all of them; `devices`: whether that is devices. `rounds`:
    of the tier's parents in a global round.
    """
    if privacy.unit == "none":
        check_table(key, privacy, _refused_without_unit(privacy))
        return
    check_table(key, privacy, _refused(key, privacy, children, devices))
    if privacy.unit != SAMPLE:
        check_delta(key, privacy, count, f"{children}s")
    check_table(key, privacy, _refused_beside_unit(key, privacy))
    releases = rounds * privacy.releases(epochs)
    if not privacy.affords(releases):
        at = f"{key}.max_epsilon"
        problem = f"the first global round could cost {privacy.epsilon(releases):.4g}"
        raise InvalidExperiment(at, privacy.max_epsilon, problem, "Raise it or noise_multiplier.")


def _refused_without_unit(privacy: PrivacySettings) -> Refused:
    for name, field in PrivacySettings.model_fields.items():
        if name != "unit" and getattr(privacy, name) != field.default:
            yield name, "nothing is protected", 'Set unit to "sample", "device" or "institution".'


def _refused(key: str, privacy: PrivacySettings, children: str, devices: bool) -> Refused:
    if not devices and privacy.unit != "institution":
        problem = f"the children of this tier are {children}s"
        yield "unit", problem, 'Use "institution", or set it below.'
    if devices and privacy.unit == "institution":
        yield "unit", "the children of this tier are devices", 'Use "device" or "sample".'
    if privacy.noise_multiplier is None:
        yield "noise_multiplier", "not known", "Set it: 1 is common, 0 only clips."
    if privacy.multiplier > 0:
        for name in ("clip_norm", "delta"):
            if getattr(privacy, name) is None:
                yield name, "the noise needs it", f"Set {key}.{name}."
    elif privacy.max_epsilon is not None:
        problem = "epsilon is infinite without noise"
        yield "max_epsilon", problem, f"Set {key}.noise_multiplier."


def check_delta(key: str, privacy: PrivacySettings, units: int, what: str) -> None:
    """Check that delta does not allow the release of a unit as it is. Raises InvalidExperiment.

    What publishes one of n units, drawn by chance, has epsilon 0 at delta = 1 / n.
    """
    if privacy.delta is not None and privacy.delta * units >= 1:
        problem = f"not below 1 / {units} {what}, so that it allows to publish one of them"
        remedy = f"Write far less, such as {0.01 / units:.1g}."
        raise InvalidExperiment(f"{key}.delta", privacy.delta, problem, remedy)


def _refused_beside_unit(key: str, privacy: PrivacySettings) -> Refused:
    """Yield the keys that belong to another unit, or to another place of the noise."""
    of_samples = privacy.unit == SAMPLE
    if of_samples and privacy.noise_by == "parent":
        yield "noise_by", "a parent has no samples' gradients", 'Use "child".'
    if privacy.sampling_rate is not None:
        if not of_samples:
            problem = f"it is for samples, and the unit is {privacy.unit}"
            yield "sampling_rate", problem, "Omit it."
        if privacy.clip_norm is None:
            yield "clip_norm", "sampling_rate needs it", f"Set {key}.clip_norm."
    if privacy.quantile is None:
        if privacy.quantile_rate != PrivacySettings.model_fields["quantile_rate"].default:
            yield "quantile_rate", "the bound is fixed", f"Set {key}.quantile."
        return
    if of_samples or privacy.noise_by != "parent":
        problem = "the parent counts the updates that it does not clip"
        yield "quantile", problem, 'Set noise_by = "parent", or omit it.'
    if privacy.clip_norm is None:
        yield "clip_norm", "the first bound is not known", f"Set {key}.clip_norm."


def check_training(key: str, privacy: PrivacySettings, training: TrainingSettings) -> None:
    """Check that devices can train by DP-SGD. Raises InvalidExperiment."""
    why = f"{key}.unit is 'sample'"
    trainer = training.trainer
    if not trainer.learns_module:
        problem = f"{why}: it gives no samples' gradients"
        raise InvalidExperiment(TRAINER_KEY, trainer.whose, problem, "Use sgd.")
    check_table("training", training, _refused_of_samples(why, privacy, training))


def _refused_of_samples(why: str, privacy: PrivacySettings, training: TrainingSettings) -> Refused:
    if not training.plain and not isinstance(training.objective, FedProx):
        problem = f"{why}: it has other terms of private data"
        yield "objective.name", problem, "Use fedprox or none."
    if training.precision == "bf16":
        yield "precision", f"{why}: samples' gradients are taken in fp32", "Omit it."
    if privacy.sampling_rate is not None and training.own_augmentation is not None:
        yield "augmentation.name", f"{why}: not with a sampling rate", "Omit it."
