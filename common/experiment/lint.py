"""Warnings about settings that are known to work badly or to have no effect, given before the run.

The accuracies are from an independent simulation on scikit-learn's digits; the formulas are in `common/methods/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from common.experiment.aggregation import (
    FedAdp,
    FedCDA,
    FedCross,
    FedDyn,
    FedMR,
    Independent,
    MultiModelSettings,
    Scaffold,
)
from common.experiment.data import Data
from common.experiment.rounds import participants
from common.experiment.rules import RuleSettings
from common.experiment.schema import Experiment
from common.experiment.training import Schedule

BATCH_NORM: Final = frozenset({"resnet18_cifar", "resnet20", "resnet20_b", "resnet20_preact", "vgg16_bn"})
SKEWED_CONCENTRATION: Final = 1.0  # of the Dirichlet split, at or below which label skew shows
STRONGLY_SKEWED_CONCENTRATION: Final = 0.1
FAST_LEARNING_RATE: Final = 0.1
UNMIXED_ALPHA: Final = 0.99  # from which the models hardly mix
PROPELLER_ALPHA_MOST: Final = 0.9  # from which propellers have no measurable effect
RECENTRE_ALPHA_MOST: Final = 0.9  # above which recentred models diverge from each other


def warnings(experiment: Experiment) -> list[str]:
    """Return one line per such setting: the key, its value and the effect."""
    found: list[str] = []
    for depth, (key, tier) in enumerate(experiment.keyed_tiers()):
        fewest = min(participants(size, tier.participation) for size in experiment.sizes()[depth])
        rounds = experiment.rounds * experiment.rounds_of(depth)
        found += _at_each_tier(key, tier.aggregation, experiment, rounds=rounds, fewest=fewest)
        if tier.selection.name != "fraction" and tier.participation >= 1:
            found.append(
                f"{key}.selection.name = {tier.selection.name!r}: with participation = 1 all children take part."
            )
        if tier.norm_bound.action == "clip" and isinstance(tier.aggregation, FedDyn | Scaffold):
            found.append(
                f"{key}.norm_bound.action = 'clip': a device does not know what was clipped, so the state of"
                f" {tier.aggregation.name} at the node is not the mean of what the devices keep. Use 'refuse'."
            )
        if tier.closing.rule == "all" and tier.closing.quorum is not None:
            found.append(f"{key}.closing.quorum = {tier.closing.quorum}: no effect with closing.rule = 'all'.")
        if depth == 0:
            found += _at_the_cloud(key, tier.aggregation)
        else:
            alone = sum(experiment.sizes()[depth - 1]) == 1  # then its own mean comes back
            found += _below_the_cloud(key, tier.aggregation, tier.rounds, alone=alone)
    found += [
        *_epochs(experiment),
        *_schedule(experiment.training.schedule, global_rounds=experiment.rounds),
    ]
    if experiment.training.vmapped in ("auto", "always"):
        found.append(
            f"training.vmapped = {experiment.training.vmapped!r}: the last bits of a model depend on which devices"
            " train together, so two runs may differ by rounding. Use 'never' for equal bits."
        )
    if experiment.model.name in BATCH_NORM and _skew(experiment.data) <= SKEWED_CONCENTRATION:
        found.append(
            f"model.name = {experiment.model.name!r}: batch norm with label skew costs accuracy (about 9 points on"
            " digits) and changes the ranking of the rules."
        )
    key, last = experiment.keyed_tiers()[-1]
    partial = any(participants(size, last.participation) < size for size in experiment.sizes()[-1])
    strongly_skewed = _skew(experiment.data) <= STRONGLY_SKEWED_CONCENTRATION
    if isinstance(last.aggregation, FedAdp) and partial and strongly_skewed:
        found.append(
            f"{key}.aggregation.name = 'fedadp': with partial participation and strong label skew it is worse"
            " than fedavg."
        )
    return found


def _at_each_tier(tier: str, rule: RuleSettings, experiment: Experiment, *, rounds: int, fewest: int) -> Iterator[str]:
    key = f"{tier}.aggregation"
    if isinstance(rule, MultiModelSettings) and fewest == 1:
        yield f"{key}.name = {rule.name!r}: with one child there is one model, and nothing to mix."
    if isinstance(rule, FedCross | FedMR) and 0 < rounds <= rule.first_stage_rounds:
        yield (
            f"{key}.first_stage_rounds = {rule.first_stage_rounds}: all {rounds} rounds belong to the first stage,"
            " which is the same as fedavg."
        )
    if isinstance(rule, FedCDA) and rounds <= rule.warmup_rounds:
        yield (
            f"{key}.warmup_rounds = {rule.warmup_rounds}: all {rounds} rounds belong to the warm-up, which is the same"
            " as fedavg. In short runs use about half of the rounds."
        )
    if isinstance(rule, FedCross):
        yield from _mixing(key, rule)
    unmixed = isinstance(rule, FedMR | Independent) or (isinstance(rule, FedCross) and rule.alpha >= UNMIXED_ALPHA)
    if unmixed and experiment.training.learning_rate >= FAST_LEARNING_RATE:
        yield (
            f"training.learning_rate = {experiment.training.learning_rate}: models that hardly mix ({key}.name ="
            f" {rule.name!r}) collapsed at such rates where fedavg trained well."
        )


def _mixing(key: str, rule: FedCross) -> Iterator[str]:
    if rule.alpha == 1.0:
        yield f"{key}.alpha = 1.0: the models are never mixed; the rule `independent` does the same."
    if rule.propeller_rounds and rule.propeller_alpha is not None and rule.propeller_alpha >= PROPELLER_ALPHA_MOST:
        yield (
            f"{key}.propeller_alpha = {rule.propeller_alpha}: propellers with so little weight have no measurable"
            " effect. Omit the key for equal weights."
        )
    if rule.normalise and rule.similarity != "pairwise":
        yield f"{key}.normalise = true: it has an effect only with similarity 'pairwise'."


def _at_the_cloud(key: str, rule: RuleSettings) -> Iterator[str]:
    if isinstance(rule, MultiModelSettings) and rule.on_new_model != "reset":
        yield f"{key}.aggregation.on_new_model = {rule.on_new_model!r}: the cloud has no parent that sends it a model."


def _below_the_cloud(tier: str, rule: RuleSettings, rounds: int, *, alone: bool) -> Iterator[str]:
    key = f"{tier}.aggregation"
    if isinstance(rule, MultiModelSettings) and rule.on_new_model == "reset" and rounds == 1:
        yield (
            f"{key}.name = {rule.name!r}: with {tier}.rounds = 1 and on_new_model 'reset' the mixed models are"
            f" discarded before any device trains on them; this is fedavg with {rule.weights} weights."
        )
    if isinstance(rule, MultiModelSettings) and rule.on_new_model == "recentre" and not alone:
        if not isinstance(rule, FedCross):
            yield f"{key}.on_new_model = 'recentre': hurts {rule.name} (fedmr on digits: 85 % against 93 %)."
        elif rule.alpha > RECENTRE_ALPHA_MOST:
            yield (
                f"{key}.on_new_model = 'recentre': hurts fedcross with alpha above {RECENTRE_ALPHA_MOST}, here"
                f" {rule.alpha}."
            )
    if isinstance(rule, FedCDA):
        if rule.history == "keep" and not alone:
            yield f"{key}.history = 'keep': uploads of past global models ruin training (53 % on digits against 92 %)."
        elif rule.history == "clear" and rounds == 1:
            yield (
                f"{key}.name = 'fedcda': with {tier}.rounds = 1 a history is cleared before it has a second"
                " upload, so there is nothing to choose from."
            )


def _epochs(experiment: Experiment) -> Iterator[str]:
    control = experiment.cloud.epoch_control
    if control.name == "tempo":
        if experiment.sizes()[0] == [1]:
            yield "cloud.epoch_control.name = 'tempo': with one child of the cloud the epochs remain training.epochs."
    elif control.model_dump(exclude={"name"}) != type(control)().model_dump(exclude={"name"}):
        yield "cloud.epoch_control.name = 'fixed': the other keys of the table have an effect only with tempo."


def _schedule(schedule: Schedule, *, global_rounds: int) -> Iterator[str]:
    key = "training.schedule"
    for part, owners in (("every", ["step"]), ("factor", ["step", "exponential"]), ("final", ["cosine"])):
        value = getattr(schedule, part)
        if schedule.name not in owners and value != Schedule.model_fields[part].default:
            yield f"{key}.{part} = {value}: no effect with {schedule.name}; it belongs to {' and '.join(owners)}."
    if schedule.name == "step" and schedule.warmup + (schedule.every or 1) >= global_rounds:
        yield f"{key}.every = {schedule.every}: the run ends before the first step."
    elif schedule.name != "constant" and schedule.warmup >= global_rounds:
        yield f"{key}.warmup = {schedule.warmup}: the run ends during the warm-up, so {schedule.name} never begins."


def _skew(data: Data) -> float:
    """Return the concentration of the labels' distribution over the devices; infinite without skew."""
    return float("inf") if data.partition == "iid" else data.concentration
