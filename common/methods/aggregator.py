"""Building a node's rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from common.experiment.aggregation import (
    GAMF,
    CluSamp,
    FedAdagrad,
    FedAdam,
    FedAdp,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedCDA,
    FedCross,
    FedDyn,
    FedExP,
    FedMA,
    FedMR,
    FedNova,
    FedYogi,
    Independent,
    Krum,
    Median,
    NormBound,
    Scaffold,
    TrimmedMean,
)
from common.experiment.objectives import DynamicRegulariser
from common.experiment.refined_rules import FedBE, FedDF, FedGen, FedLAW
from common.experiment.rules import OwnRule, RuleSettings, Weights
from common.experiment.training import TrainingSettings
from common.lazy import np, npt
from common.methods import fedcross, fedmr, optimisers, robust
from common.methods.clusamp import ClusteredSampling
from common.methods.column_rule import MeanRule
from common.methods.extras import link_layouts, with_extras
from common.methods.fedadp import AngleMean
from common.methods.fedbuff import BufferedRule
from common.methods.fedcda import CachedUploadRule
from common.methods.feddyn import DynamicMean
from common.methods.fedgen import GeneratorRule
from common.methods.fedma import LayerMatchedRule
from common.methods.fednova import NormalisedSteps
from common.methods.gamf import GraphMatchedRule
from common.methods.multi_model import MultiModelRule, unmixed
from common.methods.norm_bound import NormBoundedRule
from common.methods.own_rule import GuardedRule
from common.methods.refined import DistilledRule, LearnedWeightsRule
from common.methods.rule import NO_TRAINING, Rule, RuleContext
from common.methods.scaffold import ControlledMean
from common.methods.single_model import SingleModelRule
from common.model.layout import ModelLayout
from common.model.refinement import Refiner

NO_BOUND: Final = NormBound()


def _of(rule: Callable[[Any, RuleContext], MeanRule]) -> Callable[[Any, RuleContext], Rule]:
    def built(settings: Any, context: RuleContext) -> Rule:
        weights: Weights = getattr(settings, "weights", "data" if isinstance(settings, FedAdp) else "uniform")
        made = rule(settings, context)
        return with_extras(
            settings,
            context,
            SingleModelRule(context, made, weights=weights, uploads_least=settings.uploads_least),
        )

    return built


def _keys(made: Callable[..., MeanRule]) -> Callable[[Any, RuleContext], Rule]:
    return _of(lambda s, _: made(**s.model_dump(exclude={"name", "weights"})))


BUILT: Final[Mapping[type[RuleSettings], Callable[[Any, RuleContext], Rule]]] = {
    FedAvg: _keys(MeanRule),
    FedAdp: _keys(AngleMean),
    FedAvgM: _keys(optimisers.Momentum),
    FedAdagrad: _keys(optimisers.Adaptive),
    FedAdam: _keys(optimisers.AdamMoments),
    FedYogi: _keys(optimisers.YogiMoments),
    FedExP: _keys(optimisers.Extrapolation),
    FedNova: _keys(NormalisedSteps),
    Scaffold: _keys(ControlledMean),
    Median: _keys(robust.Medians),
    TrimmedMean: _keys(robust.TrimmedMeans),
    Krum: _keys(robust.CloseMean),
    FedDyn: _of(
        lambda s, context: DynamicMean(
            moves=isinstance(o := context.training.objective, DynamicRegulariser) and o.alpha > 0
        )
    ),
    OwnRule: _of(lambda s, _: GuardedRule(s)),
    Independent: lambda s, context: MultiModelRule(s, context, unmixed(context)),
    FedCross: lambda s, context: MultiModelRule(s, context, fedcross.planner(s, context)),
    FedMR: lambda s, context: MultiModelRule(s, context, fedmr.planner(s, context)),
    FedCDA: CachedUploadRule,
    CluSamp: ClusteredSampling,
    FedBuff: BufferedRule,
    FedMA: LayerMatchedRule,
    GAMF: GraphMatchedRule,
    **dict.fromkeys((FedDF, FedBE), DistilledRule),
    FedLAW: LearnedWeightsRule,
    FedGen: GeneratorRule,
}


def build(
    settings: RuleSettings,
    *,
    layout: ModelLayout,
    node: str,
    seed: int,
    measures: bool,
    rows: Callable[[str, int], npt.NDArray[np.uint8]],
    folder: Path | None = None,
    children: int = 1,
    training: TrainingSettings = NO_TRAINING,
    learning_rate: Callable[[int], float] | None = None,
    rounds_below: int = 1,
    refiner: Refiner | None = None,
    bound: NormBound = NO_BOUND,
) -> Rule:
    """Return a node's rule, behind the bound of its children's steps; for the other arguments see `RuleContext`."""
    rate = learning_rate or (lambda _: training.learning_rate)
    context = RuleContext(layout, node, seed, measures, rows, folder, children, training, rate, rounds_below, refiner)
    rule = BUILT[type(settings)](settings, context)
    if bound.action == "off":
        return rule
    return NormBoundedRule(rule, bound, link_layouts(settings, layout))
