"""The table `privacy` of a tier: what is protected, the clipping, the noise, and epsilon of what is
released.

A unit is a sample, or a child of the tier: a device, or an institution with all below it.
Neighbouring runs differ by one unit, in whose place there is a zero gradient, or a zero update. So
the sensitivity is `clip_norm`, and that of the count of updates within a bound is 1. Each release
of a unit has noise of `noise_multiplier` times that.

    unit         a release                                    releases of a unit
    sample       a step of a device                           one in each epoch: each sample is in
    one of its batches sample       with `sampling_rate`, a step of a device     all steps, each
    with the sampling rate
    device,      an upload, or the mean of the uploads        the rounds in which the child is
    selected
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
from fedstrata.common.settings.tables import Positive, SettingsTable
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
        """Whether the parent has state that persists between its tasks: the bound that follows a
        quantile.
        """
        return self.by_parent and self.quantile is not None

    @property
    def accounted(self) -> bool:
        """Whether epsilon is known."""
        return self.acts and self.delta is not None

    def releases(self, epochs: int) -> int:
        """Return the releases of a unit in one participation, in which devices train for so many
        epochs.
        """
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
        for name in PrivacySettings.model_fields:
            if (
                name != "unit"
                and getattr(privacy, name) != PrivacySettings.model_fields[name].default
            ):
                problem = "nothing is protected"
                remedy = 'Set unit to "sample", "device" or "institution".'
                raise InvalidExperiment(f"{key}.{name}", getattr(privacy, name), problem, remedy)
        return
    if not devices and privacy.unit != "institution":
        problem = f"the children of this tier are {children}s"
        raise InvalidExperiment(
            f"{key}.unit", privacy.unit, problem, 'Use "institution", or set it below.'
        )
    if devices and privacy.unit == "institution":
        problem = "the children of this tier are devices"
        raise InvalidExperiment(f"{key}.unit", privacy.unit, problem, 'Use "device" or "sample".')
    if privacy.noise_multiplier is None:
        problem = "not known"
        remedy = "Set it: 1 is common, 0 only clips."
        raise InvalidExperiment(f"{key}.noise_multiplier", None, problem, remedy)
    if privacy.multiplier > 0:
        for name in ("clip_norm", "delta"):
            if getattr(privacy, name) is None:
                raise InvalidExperiment(
                    f"{key}.{name}", None, "the noise needs it", f"Set {key}.{name}."
                )
    elif privacy.max_epsilon is not None:
        problem = "epsilon is infinite without noise"
        raise InvalidExperiment(
            f"{key}.max_epsilon", privacy.max_epsilon, problem, f"Set {key}.noise_multiplier."
        )
    if privacy.unit != SAMPLE:
        check_delta(key, privacy, count, f"{children}s")
    _check_beside_unit(key, privacy)
    if not privacy.affords(rounds * privacy.releases(epochs)):
        cost = privacy.epsilon(rounds * privacy.releases(epochs))
        problem = f"the first global round could cost {cost:.4g}"
        raise InvalidExperiment(
            f"{key}.max_epsilon", privacy.max_epsilon, problem, "Raise it or noise_multiplier."
        )


def check_delta(key: str, privacy: PrivacySettings, units: int, what: str) -> None:
    """Check that delta does not allow the release of a unit as it is. Raises InvalidExperiment.

    What publishes one of n units, drawn by chance, has epsilon 0 at delta = 1 / n.
    """
    if privacy.delta is not None and privacy.delta * units >= 1:
        problem = f"not below 1 / {units} {what}, so that it allows to publish one of them"
        raise InvalidExperiment(
            f"{key}.delta", privacy.delta, problem, f"Write far less, such as {0.01 / units:.1g}."
        )


def _check_beside_unit(key: str, privacy: PrivacySettings) -> None:
    """Check the keys that belong to one unit, or to one place of the noise."""
    if privacy.unit == SAMPLE and privacy.noise_by == "parent":
        problem = "a parent has no samples' gradients"
        raise InvalidExperiment(f"{key}.noise_by", "parent", problem, 'Use "child".')
    if privacy.sampling_rate is not None:
        if privacy.unit != SAMPLE:
            problem = f"it is for samples, and the unit is {privacy.unit}"
            raise InvalidExperiment(
                f"{key}.sampling_rate", privacy.sampling_rate, problem, "Omit it."
            )
        if privacy.clip_norm is None:
            raise InvalidExperiment(
                f"{key}.clip_norm", None, "sampling_rate needs it", f"Set {key}.clip_norm."
            )
    if privacy.quantile is None:
        if privacy.quantile_rate != PrivacySettings.model_fields["quantile_rate"].default:
            problem = "the bound is fixed"
            raise InvalidExperiment(
                f"{key}.quantile_rate", privacy.quantile_rate, problem, f"Set {key}.quantile."
            )
        return
    if privacy.unit == SAMPLE or privacy.noise_by != "parent":
        problem = "the parent counts the updates that it does not clip"
        raise InvalidExperiment(
            f"{key}.quantile", privacy.quantile, problem, 'Set noise_by = "parent", or omit it.'
        )
    if privacy.clip_norm is None:
        raise InvalidExperiment(
            f"{key}.clip_norm", None, "the first bound is not known", f"Set {key}.clip_norm."
        )


def check_training(key: str, privacy: PrivacySettings, training: TrainingSettings) -> None:
    """Check that devices can train by DP-SGD. Raises InvalidExperiment."""
    found: tuple[str, object, str, str] | None = None
    if not training.trainer.learns_module:
        found = "trainer", training.trainer.whose, "it gives no samples' gradients", "Use sgd"
    elif not training.plain and not isinstance(training.objective, FedProx):
        found = (
            "objective.name",
            training.objective.name,
            "it has other terms of private data",
            "Use fedprox or none",
        )
    elif training.precision == "bf16":
        found = "precision", "bf16", "samples' gradients are taken in fp32", "Omit it"
    elif privacy.sampling_rate is not None and training.own_augmentation is not None:
        found = (
            "augmentation.name",
            training.augmentation.name,
            "not with a sampling rate",
            "Omit it",
        )
    if found is not None:
        name, value, problem, remedy = found
        raise InvalidExperiment(
            f"training.{name}", value, f"{key}.unit is 'sample': {problem}", f"{remedy}."
        )
