"""Checks of what a tier has against the other tiers and against what devices do."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.tiers import Tier, key_of, refused_private, rounds_of, sizes_of
from fedstrata.common.model.codec_settings import PLAIN
from fedstrata.common.settings import privacy
from fedstrata.common.settings.cloud import EpochControl
from fedstrata.common.settings.data import NUMBERS, Data, ModelSettings
from fedstrata.common.settings.evaluation import EvaluationSettings
from fedstrata.common.settings.secure import LEAST
from fedstrata.common.settings.tables import Refused, check_table
from fedstrata.common.settings.training import TrainingSettings


def refused_entering(tiers: Sequence[Tier], tier: Tier, control: EpochControl) -> Refused:
    """Yield why a tier cannot take in devices."""
    key = key_of(tiers, tier)
    if not tier.entering:
        problem = "no parent takes in a device that moves"
        yield "move_after_s", problem, f"Set {key}.entering."
    if tier is not tiers[-1]:
        remedy = f"Use it in {key_of(tiers, tiers[-1])}."
        yield "entering", "its children must be devices", remedy
    if tier.min_available is None:
        yield "entering", "rounds wait for each child", f"Set {key}.min_available."
    if tier.aggregation.buffers:
        problem = f"the rule {tier.aggregation.name} has tasks of several rounds"
        yield "entering", problem, "Use another."
    if len(tiers) == 1 and control.name != "fixed":
        problem = "the epoch control compares the children that the experiment names"
        yield "entering", problem, 'Use cloud.epoch_control = "fixed".'
    if any(each.privacy.accounted for each in tiers):
        problem = "epsilon counts the devices that the experiment names"
        yield "entering", problem, "Omit privacy, or name all devices."


def refused_refiner(tier: Tier, data: Data) -> Refused:
    """Yield why the data are not those that a rule with a refiner's process needs."""
    if tier.aggregation.refines and data.targets == NUMBERS:
        problem = "it needs classes, and data.targets are numbers"
        yield "aggregation.name", problem, "Use another rule."
    if tier.aggregation.refines and tier.aggregation.reads_samples and not data.node_samples:
        problem = "needs samples at the node, and data.node_samples is 0"
        remedy = "Set data.node_samples, for instance to 2 % of the training samples."
        yield "aggregation.name", problem, remedy


def check_objective(tiers: Sequence[Tier], training: TrainingSettings) -> None:
    """Check that the objective and the tiers' rules belong together. Raises InvalidExperiment."""
    objective = training.objective
    last = tiers[-1]
    rule = last.aggregation
    rule_key = f"{key_of(tiers, last)}.aggregation"
    for tier in tiers:
        check_table(key_of(tiers, tier), tier, _refused_rule(tier, training, last, rule_key))
    key = "training.objective.name"
    if rule.objective not in (None, objective.name):
        problem = f"{_named(tiers, last)} needs another"
        raise InvalidExperiment(key, objective.name, problem, f"Use {rule.objective!r}.")
    if last.transfer.up.feedback and objective.reads_upload:
        at = f"{key_of(tiers, last, 'transfer')}.up.feedback"
        keeps = f"the objective {objective.name!r} keeps the change that it sends"
        problem = f"{keeps}, which has what was left out before"
        raise InvalidExperiment(at, True, problem, "Omit it, or use another objective.")
    if objective.rule not in (None, rule.name):
        problem = f"needs the rule {objective.rule!r}, {rule_key}.name is {rule.name!r}"
        raise InvalidExperiment(key, objective.name, problem, f"Set {rule_key}.name.")


def _refused_rule(tier: Tier, training: TrainingSettings, last: Tier, last_key: str) -> Refused:
    """Yield why a tier's rule does not get what it needs of the devices' training."""
    rule = tier.aggregation
    from_devices = rule.objective or rule.sends or rule.returns or rule.reads_losses
    trainer = training.trainer
    if not trainer.learns_module and (from_devices or rule.refines):
        problem = f"it needs fedstrata's own training, and training.trainer is {trainer.whose}"
        yield "aggregation.name", problem, "Use another rule, or omit training.trainer."
    if tier is not last and from_devices:
        yield "aggregation.name", "its children must be devices", f"Use it in {last_key}."


def check_privacy(tiers: Sequence[Tier], training: TrainingSettings) -> None:
    """Check what is protected, and that nothing else depends on it. Raises InvalidExperiment."""
    unit = ""
    sizes = sizes_of(tiers)
    for place in reversed(range(len(tiers))):
        tier = tiers[place]
        at = key_of(tiers, tier)
        key = f"{at}.privacy"
        settings = tier.privacy
        privacy.check_privacy(
            key,
            settings,
            children=tier.children,
            count=sum(sizes[place]),
            devices=tier is tiers[-1],
            rounds=rounds_of(tiers, place),
            epochs=training.epochs,
        )
        if settings.on_samples:
            privacy.check_training(key, settings, training)
        if settings.by_parent and tier.norm_bound.action != "off":
            problem = "it publishes the lengths of updates without noise"
            remedy = "Omit it: clip_norm bounds them."
            action = tier.norm_bound.action
            raise InvalidExperiment(f"{at}.norm_bound.action", action, problem, remedy)
        if settings.acts:
            unit = settings.unit
        if unit:
            check_table(at, tier, refused_private(tier.aggregation, unit))


def refused_secure(
    tiers: Sequence[Tier],
    tier: Tier,
    control: EpochControl,
    evaluation: EvaluationSettings,
    fewest: int,
) -> Refused:
    """Yield why a tier's parents cannot do with the sums of its children's models; `fewest`:
    children of a round.
    """
    rule = tier.aggregation
    assert tier.secure is not None, "asked for a tier that has it alone"
    at = f"{key_of(tiers, tier)}.secure is set"
    remedy = "Use a rule of the mean, such as fedavg or fedadam, or secure in another tier."
    if rule.of_mean is None or rule.returns or rule.buffers or rule.uploads_least > 1:
        problem = f"{at}: the next model must depend on the uploads' mean alone"
        yield "aggregation.name", problem, remedy
    if rule.compares_losses or rule.reads_losses:
        yield "aggregation.name", f"{at}: it needs each child's loss", remedy
    if tier.selection.compares_losses:
        yield "selection.name", f"{at}: it needs each child's loss", "Use another selector."
    if tier.transfer.up != PLAIN.up:
        yield "transfer.up.name", f"{at}: uploads are words of a sum", "Omit it."
    if tier.norm_bound.action != "off":
        yield "norm_bound.action", f"{at}: no upload is seen", "Omit it: secure.clip bounds values."
    if tier.privacy.by_parent:
        problem = f"{at}: the parent sees no update to clip"
        yield "privacy.noise_by", problem, 'Use "child".'
    if tier is tiers[0] and control.name != "fixed":
        problem = "the epoch control compares the uploads"
        yield "secure.threshold", problem, "Use it in a tier below the cloud."
    if tier is tiers[-1] and evaluation.on_devices:
        yield "secure.threshold", "devices send scores of their own", 'Use evaluation.at = "cloud".'
    uploads = tier.closing.uploads_of(fewest)
    needed = tier.secure.shares_needed(fewest)
    if fewest >= LEAST and uploads < needed:
        problem = f"of {fewest} children {needed} open a sum, by secure.threshold"
        yield "closing.quorum", problem, f"Use {needed} or more, or a lower threshold."
    if fewest < LEAST:
        yield (
            "secure.threshold",
            "the sum of a single child is its model",
            "Use two children or more.",
        )


def check_personal(
    tiers: Sequence[Tier],
    model: ModelSettings,
    training: TrainingSettings,
    evaluation: EvaluationSettings,
) -> None:
    """Check that nothing needs the arrays that devices keep. Raises InvalidExperiment."""
    patterns = ", ".join(model.personal)
    if not patterns:
        return
    if evaluation.on_cloud:
        problem = f"the cloud has no whole model to score, as {patterns} of it is personal"
        raise InvalidExperiment("evaluation.at", evaluation.at, problem, 'Use "devices".')
    key = "model.personal"
    if not training.objective.parts:
        problem = f"the objective {training.objective.name!r} needs the whole model"
        raise InvalidExperiment(key, patterns, problem, "Use another objective.")
    for tier in tiers:
        if tier.aggregation.reads_samples:
            problem = f"{_named(tiers, tier)} needs the whole model"
            raise InvalidExperiment(key, patterns, problem, "Use another rule.")


def check_buffering(
    tiers: Sequence[Tier], evaluation: EvaluationSettings, control: EpochControl
) -> None:
    """Check that nothing needs the uploads of one round where a rule has those of several."""
    for tier in tiers:
        if tier.aggregation.buffers and evaluation.on_devices:
            problem = f"{_named(tiers, tier)} has tasks of several rounds"
            raise InvalidExperiment("evaluation.at", evaluation.at, problem, 'Use "cloud".')
    rule = tiers[0].aggregation
    if rule.buffers and control.name != "fixed":
        key = "cloud.epoch_control.name"
        of_several = f"{rule.name} has uploads of several"
        problem = f"it compares the uploads of a global round, and {of_several}"
        raise InvalidExperiment(key, "tempo", problem, "Use another rule at the cloud.")


def _named(tiers: Sequence[Tier], tier: Tier) -> str:
    """Return the key of a tier's rule, and its name."""
    return f"{key_of(tiers, tier)}.aggregation.name = {tier.aggregation.name!r}"


def check_same_initial(tiers: Sequence[Tier], model: ModelSettings) -> None:
    """Check that uploads have their differences where devices begin with models of their own."""
    up = tiers[-1].transfer.up
    if not model.same_initial and up.delta and not up.exact:
        codec = f"{key_of(tiers, tiers[-1], 'transfer')}.up = {up.name!r}"
        problem = f"{codec} rounds differences to the model received, and devices begin with others"
        remedy = "Use fp32, or delta+fp32+zstd."
        raise InvalidExperiment("model.same_initial", False, problem, remedy)
