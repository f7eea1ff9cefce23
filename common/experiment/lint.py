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
    return [*_warnings(experiment)]


def _warnings(experiment: Experiment) -> Iterator[str]:
    for depth, tier in enumerate(experiment.tiers):
        key = experiment.key(tier)
        yield from tier.aggregation.advice(_use(experiment, key, tier, depth))
        yield from _codec(experiment, tier)
        if tier.selection.name != "fraction" and tier.participation >= 1:
            yield (
                f"{key}.selection.name = {tier.selection.name!r}: with participation = 1 all "
                "children take part."
            )
        keeps = tier.aggregation.objective and experiment.training.objective.keeps
        if tier.norm_bound.action == "clip" and keeps:
            yield (
                f"{key}.norm_bound.action = 'clip': a device does not know what was clipped, so "
                f"the state of {tier.aggregation.name} at the node is not the mean of what the "
                "devices keep. Use 'refuse'."
            )
        closing = tier.closing
        if closing.rule == "all" and closing.quorum is not None:
            yield f"{key}.closing.quorum = {closing.quorum}: no effect with closing.rule = 'all'."
        yield from _privacy(experiment, tier, depth)
        yield from conditions(experiment, tier, depth)
    yield from _epochs(experiment)
    yield from _schedule(experiment.training.schedule, global_rounds=experiment.rounds)
    if experiment.model.name in BATCH_NORM and _skew(experiment.data) <= SKEWED_CONCENTRATION:
        yield (
            f"model.name = {experiment.model.name!r}: batch norm with label skew costs accuracy "
            "(about 9 points on digits) and changes the ranking of the rules."
        )


def _privacy(experiment: Experiment, tier: Tier, depth: int) -> Iterator[str]:
    """Yield what a tier's privacy does to its models, costs, and does not protect."""
    privacy = tier.privacy
    key = f"{experiment.key(tier)}.privacy"
    if not privacy.acts or privacy.clip_norm is None:
        return
    fewest = min(participants(size, tier.participation) for size in set(experiment.sizes()[depth]))
    sensitivity = _sensitivity(tier, fewest, experiment.training.batch_size)
    yield f"{key}.noise_by = {privacy.noise_by!r}: {sensitivity}."
    if privacy.multiplier:
        rounds = experiment.rounds * experiment.rounds_of(depth)
        releases = rounds * privacy.releases(experiment.training.epochs)
        claimed = "without amplification by sampling"
        if privacy.sampling_rate:
            claimed = "with Poisson sampling"
        yield (
            f"{key}.noise_multiplier = {privacy.multiplier:g}: epsilon of one {privacy.unit} that "
            f"takes part in all {experiment.rounds} global rounds is "
            f"{privacy.epsilon(releases):.4g}, {claimed}."
        )
        if not privacy.affords(releases):
            yield (
                f"{key}.max_epsilon = {privacy.max_epsilon}: the run may end before its last "
                "global round."
            )
        if privacy.noise == "seeded":
            yield (
                f"{key}.noise = 'seeded': who knows the experiment can remove the noise. Nobody is "
                "protected."
            )
    unit = f"{key}.unit = {privacy.unit!r}"
    sent = "losses, scores and" if experiment.evaluation.on_devices else "losses and"
    yield (
        f"{unit}: training {sent} numbers of samples are sent without noise, and epsilon does not "
        "cover them."
    )
    if tier.selection.compares_losses:
        yield f"{unit}: the selector {tier.selection.name} reads losses without noise."
    for computed in experiment.data.from_all_samples:
        yield f"{unit}: epsilon does not cover what is computed before the training. {computed}."
    initial = experiment.model.initial
    if initial is not None:
        yield (
            f"model.initial = {initial!r}: epsilon counts this run alone. What that model has cost "
            f"the same {privacy.unit}s is to be added."
        )


def conditions(experiment: Experiment, tier: Tier, depth: int) -> Iterator[str]:
    """Yield where the condition of a robust rule's theorem holds among the adversaries."""
    rule = tier.aggregation
    if not experiment.attackers or not rule.condition:
        return
    tree = experiment.tree
    holds: list[str] = []
    fails: list[str] = []
    for parent in tree.layers[depth]:
        children = tree.children[parent]
        uploads = tier.closing.uploads_of(participants(len(children), tier.participation))
        wrong = min(uploads, sum(child in experiment.attackers.at for child in children))
        found = holds if wrong <= rule.tolerates(uploads) else fails
        found.append(f"{parent} (f = {wrong} of n = {uploads})")
    key = f"{experiment.key(tier)}.aggregation.name"
    text = f"{key} = {rule.name!r}: its theorem needs {rule.condition}."
    if holds:
        text += f" It holds at {named(holds)}."
    if fails:
        text += f" It does not hold at {named(fails)}."
    yield text


def _sensitivity(tier: Tier, uploads: int, batch: int) -> str:
    """Return where the noise is, and how much reaches the next model of so many uploads."""
    privacy = tier.privacy
    name = tier.aggregation.name
    std = privacy.multiplier * (privacy.clip_norm or 0.0)
    if privacy.on_samples:
        of = "the expected number of samples"
        if privacy.sampling_rate is None:
            of = f"{batch} samples"
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
            f"{key}.feedback = true: {rule.name} has several models, so what a child leaves out of "
            "one is added to another."
        )
    if codec.feedback and tier.norm_bound.action == "clip":
        yield (
            f"{key}.feedback = true: a child does not know what norm_bound.action = 'clip' cuts "
            "off, so that is lost. Use 'refuse': what is left out of a refused upload is sent "
            "again."
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
    """Return the concentration of the labels over the devices; infinite without skew."""
    if data.partition == "iid":
        return float("inf")
    return data.concentration
