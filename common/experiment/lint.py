"""Warnings about settings that are known to work badly or to have no effect, given before the run.

The accuracies are from an independent simulation on scikit-learn's digits. A rule's own are in its
file of `common/methods/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Final

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.settings import RuleUse
from fedstrata.common.model.codec_settings import FormSettings
from fedstrata.common.settings.data import Data
from fedstrata.common.settings.topology import participants
from fedstrata.common.settings.training import Schedule
from fedstrata.common.text import named

BATCH_NORM: Final = frozenset(
    {"resnet18_cifar", "resnet20", "resnet20_b", "resnet20_preact", "vgg16_bn"}
)
SKEWED_CONCENTRATION: Final = 1.0  # of the Dirichlet split, at or below which label skew shows


def warnings(experiment: Experiment) -> list[str]:
    """Return one line per such setting: the key, its value and the effect."""
    found: list[str] = []
    for depth, tier in enumerate(experiment.tiers):
        key = experiment.key(tier)
        found += tier.aggregation.advice(_use(experiment, key, tier, depth))
        found += _codec(experiment, tier)
        if tier.selection.name != "fraction" and tier.participation >= 1:
            found.append(
                f"{key}.selection.name = {tier.selection.name!r}: with participation = 1 all "
                "children take part."
            )
        if (
            tier.norm_bound.action == "clip"
            and tier.aggregation.objective
            and experiment.training.objective.keeps
        ):
            found.append(
                f"{key}.norm_bound.action = 'clip': a device does not know what was clipped, so "
                "the state of"
                f" {tier.aggregation.name} at the node is not the mean of what the devices keep. "
                "Use 'refuse'."
            )
        if tier.closing.rule == "all" and tier.closing.quorum is not None:
            found.append(
                f"{key}.closing.quorum = {tier.closing.quorum}: no effect with closing.rule = "
                "'all'."
            )
        found += _privacy(experiment, tier, depth)
        found += conditions(experiment, tier, depth)
    found += [
        *_epochs(experiment),
        *_schedule(experiment.training.schedule, global_rounds=experiment.rounds),
    ]
    if experiment.model.name in BATCH_NORM and _skew(experiment.data) <= SKEWED_CONCENTRATION:
        found.append(
            f"model.name = {experiment.model.name!r}: batch norm with label skew costs accuracy "
            "(about 9 points on"
            " digits) and changes the ranking of the rules."
        )
    return found


def _privacy(experiment: Experiment, tier: Tier, depth: int) -> Iterator[str]:
    """Yield what a tier's privacy does to its models, what it costs, and what it does not
    protect.
    """
    privacy = tier.privacy
    key = f"{experiment.key(tier)}.privacy"
    if not privacy.acts or privacy.clip_norm is None:
        return
    fewest = min(participants(size, tier.participation) for size in set(experiment.sizes()[depth]))
    yield (
        f"{key}.noise_by = {privacy.noise_by!r}: "
        f"{_sensitivity(tier, fewest, experiment.training.batch_size)}."
    )
    if privacy.multiplier:
        releases = (
            experiment.rounds
            * experiment.rounds_of(depth)
            * privacy.releases(experiment.training.epochs)
        )
        if privacy.sampling_rate:
            claimed = "with Poisson sampling"
        else:
            claimed = "without amplification by sampling"
        yield (
            f"{key}.noise_multiplier = {privacy.multiplier:g}: epsilon of one {privacy.unit} that "
            "takes part in all"
            f" {experiment.rounds} global rounds is {privacy.epsilon(releases):.4g}, {claimed}."
        )
        if not privacy.affords(releases):
            yield (
                f"{key}.max_epsilon = {privacy.max_epsilon}: the run may end before its last "
                "global round."
            )
    if privacy.noise == "seeded" and privacy.multiplier:
        yield (
            f"{key}.noise = 'seeded': who knows the experiment can remove the noise. Nobody is "
            "protected."
        )
    sent = "losses, scores and" if experiment.evaluation.on_devices else "losses and"
    yield (
        f"{key}.unit = {privacy.unit!r}: training {sent} numbers of samples are sent without "
        "noise, and epsilon does"
        " not cover them."
    )
    if tier.selection.compares_losses:
        yield (
            f"{key}.unit = {privacy.unit!r}: the selector {tier.selection.name} reads losses "
            "without noise."
        )
    for computed in experiment.data.from_all_samples:
        yield (
            f"{key}.unit = {privacy.unit!r}: epsilon does not cover what is computed before the "
            f"training. {computed}."
        )
    if (initial := experiment.model.initial) is not None:
        yield (
            f"model.initial = {initial!r}: epsilon counts this run alone. What that model has "
            "cost the same"
            f" {privacy.unit}s is to be added."
        )


def conditions(experiment: Experiment, tier: Tier, depth: int) -> Iterator[str]:
    """Yield where the condition of a robust rule's theorem holds among the adversaries of an
    experiment.
    """
    rule = tier.aggregation
    tree = experiment.tree if experiment.attackers else None
    if tree is None or not rule.condition:
        return
    holds = list[str]()
    fails = list[str]()
    for parent in tree.layers[depth]:
        children = tree.children[parent]
        uploads = tier.closing.uploads_of(participants(len(children), tier.participation))
        wrong = min(uploads, sum(child in experiment.attackers.at for child in children))
        where = f"{parent} (f = {wrong} of n = {uploads})"
        (holds if wrong <= rule.tolerates(uploads) else fails).append(where)
    found = (
        f"{experiment.key(tier)}.aggregation.name = {rule.name!r}: its theorem needs "
        f"{rule.condition}."
    )
    found += f" It holds at {named(holds)}." if holds else ""
    yield found + (f" It does not hold at {named(fails)}." if fails else "")


def _sensitivity(tier: Tier, uploads: int, batch: int) -> str:
    """Return where the noise is, and how much of it reaches the next model, with so many uploads in
    a round.
    """
    privacy = tier.privacy
    name = tier.aggregation.name
    std = privacy.multiplier * (privacy.clip_norm or 0.0)
    if privacy.on_samples:
        if privacy.sampling_rate is None:
            of = f"{batch} samples"
        else:
            of = "the expected number of samples"
        return f"each step of a device has noise of standard deviation {std:g}, divided by {of}"
    if privacy.by_parent and tier.aggregation.of_mean is not None:
        mean = std / uploads
        return (
            f"{name} takes a mean, which alone has noise: {mean:.4g} in each column with "
            f"{uploads} equal uploads"
        )
    if tier.aggregation.several:
        return (
            f"{name} makes models of single uploads: each of them has noise of {std:.4g} in "
            "each column"
        )
    mean = std / sqrt(uploads)
    return (
        f"each upload has noise of {std:.4g} in each column; a mean of {uploads} uploads {mean:.4g}"
    )


def _use(experiment: Experiment, key: str, tier: Tier, depth: int) -> RuleUse:
    sizes = experiment.sizes()
    taking_part = [(participants(size, tier.participation), size) for size in sizes[depth]]
    return RuleUse(
        key=key,
        depth=depth,
        tier_rounds=tier.rounds,
        rounds=experiment.rounds * experiment.rounds_of(depth),
        fewest=min(count for count, _ in taking_part),
        partial=any(count < size for count, size in taking_part),
        alone=depth > 0 and sum(sizes[depth - 1]) == 1,  # then its own mean comes back
        over_devices=depth == len(sizes) - 1,
        learning_rate=experiment.training.learning_rate,
        skew=_skew(experiment.data),
        sparse=tier.transfer.up.sparse and tier.transfer.up.contracts,
        feedback=tier.transfer.up.feedback,
    )


def _codec(experiment: Experiment, tier: Tier) -> Iterator[str]:
    """Yield what a codec of uploads does to the rule of its tier, and the other way round."""
    codec = tier.transfer.up
    rule = tier.aggregation
    key = f"{experiment.key(tier, 'transfer')}.up"
    name = f"{key}.name = {codec.name!r}"
    if codec.contracts and not codec.feedback:
        yield f"{name}: what it leaves out of a model is lost. Use {key}.feedback = true."
    if codec.feedback and rule.several:
        yield (
            f"{key}.feedback = true: {rule.name} has several models, so what a child leaves out "
            "of one is added to"
            " another."
        )
    if codec.feedback and tier.norm_bound.action == "clip":
        yield (
            f"{key}.feedback = true: a child does not know what norm_bound.action = 'clip' cuts "
            "off, so that is lost."
            " Use 'refuse': what is left out of a refused upload is sent again."
        )
    if not isinstance(codec, FormSettings) and rule.returns:
        yield (
            f"{name}: the vectors behind the models of {rule.name} come up as float32, which no "
            "codec makes smaller."
        )


def _epochs(experiment: Experiment) -> Iterator[str]:
    control = experiment.cloud.epoch_control
    if control.name == "tempo":
        if experiment.sizes()[0] == [1]:
            yield (
                "cloud.epoch_control.name = 'tempo': with one child of the cloud the epochs "
                "remain training.epochs."
            )
    elif control.model_dump(exclude={"name"}) != type(control)().model_dump(exclude={"name"}):
        yield (
            "cloud.epoch_control.name = 'fixed': the other keys of the table have an effect "
            "only with tempo."
        )


def _schedule(schedule: Schedule, *, global_rounds: int) -> Iterator[str]:
    key = "training.schedule"
    for part, owners in (
        ("every", ["step"]),
        ("factor", ["step", "exponential"]),
        ("final", ["cosine"]),
    ):
        value = getattr(schedule, part)
        if schedule.name not in owners and value != Schedule.model_fields[part].default:
            yield (
                f"{key}.{part} = {value}: no effect with {schedule.name}; it belongs to "
                f"{' and '.join(owners)}."
            )
    if schedule.name == "step" and schedule.warmup + (schedule.every or 1) >= global_rounds:
        yield f"{key}.every = {schedule.every}: the run ends before the first step."
    elif schedule.name != "constant" and schedule.warmup >= global_rounds:
        yield (
            f"{key}.warmup = {schedule.warmup}: the run ends during the warm-up, so "
            f"{schedule.name} never begins."
        )


def _skew(data: Data) -> float:
    """Return the concentration of the labels' distribution over the devices; infinite without
    skew.
    """
    if data.partition == "iid":
        return float("inf")
    return data.concentration
