"""What an experiment's settings are known to do badly, or not at all: said before the run, never in its way.

Figures are of an independent simulation on scikit-learn's digits; the formulas are in `common/aggregation/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from common.experiment.aggregation import FedAdp, FedCDA, FedCross, FedMR, Independent, Rule, Several
from common.experiment.data import Data
from common.experiment.rounds import participants
from common.experiment.schema import Experiment
from common.experiment.training import Schedule

BATCH_NORM: Final = frozenset({"resnet18_cifar", "resnet20", "resnet20_b", "resnet20_preact", "vgg16_bn"})
SKEWED: Final = 1.0  # Dirichlet's concentration from which label skew shows
STRONGLY_SKEWED: Final = 0.1
FAST: Final = 0.1  # learning rate
NEARLY_ONE: Final = 0.99  # alpha
APART: Final = 0.9  # alpha above which recentred models leave each other


def warnings(experiment: Experiment) -> list[str]:
    """Return one line for each such setting: the key, and what it does."""
    cloud, institution = experiment.cloud, experiment.institution
    sizes = experiment.topology.sizes()
    drawn = [participants(size, institution.participation) for size in sizes]
    at_cloud = participants(len(sizes), cloud.participation)
    local_rounds = experiment.rounds * institution.rounds
    found = [
        *_at_each_tier("cloud", cloud.aggregation, experiment, rounds=experiment.rounds, fewest=at_cloud),
        *_at_each_tier("institution", institution.aggregation, experiment, rounds=local_rounds, fewest=min(drawn)),
        *_at_the_cloud(cloud.aggregation),
        *_at_an_institution(institution.aggregation, institution.rounds, institutions=len(sizes)),
        *_epochs(experiment),
        *_schedule(experiment.training.schedule, global_rounds=experiment.rounds),
    ]
    if experiment.model.name in BATCH_NORM and _skew(experiment.data) <= SKEWED:
        found.append(
            f"model.name = {experiment.model.name!r}: batch norm with label skew costs accuracy (about 9 points on"
            " digits) and reorders the rules."
        )
    partial = any(k < size for k, size in zip(drawn, sizes, strict=True))
    if isinstance(institution.aggregation, FedAdp) and partial and _skew(experiment.data) <= STRONGLY_SKEWED:
        found.append(
            "institution.aggregation.name = 'fedadp': with partial participation and strong label skew it is worse"
            " than fedavg."
        )
    return found


def _at_each_tier(tier: str, rule: Rule, experiment: Experiment, *, rounds: int, fewest: int) -> Iterator[str]:
    key = f"{tier}.aggregation"
    if isinstance(rule, Several) and fewest == 1:
        yield f"{key}.name = {rule.name!r}: with one child there is one model, and nothing to mix."
    if isinstance(rule, FedCross | FedMR) and 0 < rounds <= rule.first_stage_rounds:
        yield (
            f"{key}.first_stage_rounds = {rule.first_stage_rounds}: there are {rounds} rounds, all of the first stage,"
            " which is fedavg's."
        )
    if isinstance(rule, FedCDA) and rounds <= rule.warmup_rounds:
        yield (
            f"{key}.warmup_rounds = {rule.warmup_rounds}: there are {rounds} rounds, all of the warm-up, which is"
            " fedavg's; half of the rounds do well in short runs."
        )
    if isinstance(rule, FedCross):
        yield from _mixing(key, rule)
    unmixed = isinstance(rule, FedMR | Independent) or (isinstance(rule, FedCross) and rule.alpha >= NEARLY_ONE)
    if unmixed and experiment.training.learning_rate >= FAST:
        yield (
            f"training.learning_rate = {experiment.training.learning_rate}: models that hardly mix ({key}.name ="
            f" {rule.name!r}) collapsed at such rates where fedavg trained well."
        )


def _mixing(key: str, rule: FedCross) -> Iterator[str]:
    if rule.alpha == 1.0:
        yield f"{key}.alpha = 1.0: models are never mixed; `independent` says so by its name."
    if rule.propeller_rounds and rule.propeller_alpha is not None and rule.propeller_alpha >= APART:
        yield (
            f"{key}.propeller_alpha = {rule.propeller_alpha}: propellers of so little weight do nothing that can be"
            " measured; left out, all weights are alike."
        )
    if rule.normalise and rule.similarity != "pairwise":
        yield f"{key}.normalise = true: it is part of similarity 'pairwise' alone."


def _at_the_cloud(rule: Rule) -> Iterator[str]:
    if isinstance(rule, Several) and rule.carry != "reset":
        yield f"cloud.aggregation.carry = {rule.carry!r}: no model comes to the cloud from above."


def _at_an_institution(rule: Rule, rounds: int, *, institutions: int) -> Iterator[str]:
    key = "institution.aggregation"
    if isinstance(rule, Several) and rule.carry == "reset" and rounds == 1:
        yield (
            f"{key}.name = {rule.name!r}: with institution.rounds = 1 and carry 'reset' what was mixed is thrown away"
            f" before anybody trains on it; this is fedavg with {rule.weights} weights."
        )
    alone = institutions == 1  # then its own mean comes back
    if isinstance(rule, Several) and rule.carry == "recentre" and not alone:
        if not isinstance(rule, FedCross):
            yield f"{key}.carry = 'recentre': hurts {rule.name} (fedmr on digits: 85 % against 93 %)."
        elif rule.alpha > APART:
            yield f"{key}.carry = 'recentre': hurts fedcross with alpha above {APART}, here {rule.alpha}."
    if isinstance(rule, FedCDA):
        if rule.history == "keep" and not alone:
            yield f"{key}.history = 'keep': uploads of past global models ruin training (53 % on digits against 92 %)."
        elif rule.history == "clear" and rounds == 1:
            yield (
                f"{key}.name = 'fedcda': with institution.rounds = 1 a history is cleared before it has a second"
                " upload; there is nothing to choose."
            )


def _epochs(experiment: Experiment) -> Iterator[str]:
    control = experiment.cloud.epoch_control
    if control.name == "tempo":
        if len(experiment.topology.sizes()) == 1:
            yield "cloud.epoch_control.name = 'tempo': with one institution the epochs stay training.epochs."
    elif control.model_dump(exclude={"name"}) != type(control)().model_dump(exclude={"name"}):
        yield "cloud.epoch_control.name = 'fixed': its other settings are Tempo's."


def _schedule(schedule: Schedule, *, global_rounds: int) -> Iterator[str]:
    key = "training.schedule"
    for part, owners in (("every", ["step"]), ("factor", ["step", "exponential"]), ("final", ["cosine"])):
        value = getattr(schedule, part)
        if schedule.name not in owners and value != Schedule.model_fields[part].default:
            yield f"{key}.{part} = {value}: it is part of {' and '.join(owners)} alone, this is {schedule.name}."
    if schedule.name == "step" and schedule.warmup + (schedule.every or 1) >= global_rounds:
        yield f"{key}.every = {schedule.every}: the run ends before the first step."
    elif schedule.name != "constant" and schedule.warmup >= global_rounds:
        yield f"{key}.warmup = {schedule.warmup}: the run ends before it does, and {schedule.name} never begins."


def _skew(data: Data) -> float:
    """Return the concentration of the labels' distribution over the devices; infinite without skew."""
    return float("inf") if data.partition == "iid" else data.concentration
