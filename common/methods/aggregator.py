"""One node's aggregation rule: it chooses each child's model and aggregates the uploads.

Call order: `begin` with the parent's model (at the cloud once, with the initial model), then `dispatch` and `aggregate`
in each of the node's rounds. An institution calls `begin` in every global round. To resume from a checkpoint, the cloud
calls `begin` with the saved model and then `restore`; an institution calls `restore`, and `begin` when the next model
arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from common.experiment.aggregation import (
    GAMF,
    CluSamp,
    FedAdp,
    FedAvg,
    FedBuff,
    FedCDA,
    FedCross,
    FedMA,
    FedMR,
    Independent,
    Krum,
    NormBound,
    Scaffold,
)
from common.experiment.refined_rules import FedBE, FedDF, FedGen, FedLAW
from common.experiment.rules import OwnRule, RuleSettings
from common.experiment.training import TrainingSettings
from common.lazy import np, npt
from common.methods.cached_uploads import CachedUploadRule
from common.methods.clusamp import ClusteredSampling
from common.methods.extras import link_layouts, single_model
from common.methods.fedbuff import BufferedRule
from common.methods.fedgen import GeneratorRule
from common.methods.graph_matching import GraphMatchedRule
from common.methods.matching import LayerMatchedRule
from common.methods.multi_model import MultiModelRule
from common.methods.norm_bound import NormBoundedRule
from common.methods.refined import DistilledRule, LearnedWeightsRule
from common.methods.scaffold import ControlVariateRule
from common.methods.server_steps import STEPS
from common.methods.single_model import COLUMNS, SingleModelRule
from common.methods.uploads import NO_TRAINING, Aggregated, Aggregator, RuleContext, Uploads
from common.model.layout import ModelLayout
from common.model.refinement import Refiner

__all__ = ["Aggregated", "Aggregator", "Uploads", "build"]


NO_BOUND: Final = NormBound()

BUILT: Final[Mapping[type[RuleSettings], Callable[[Any, RuleContext], Aggregator]]] = {
    FedAvg: SingleModelRule,
    FedAdp: SingleModelRule,
    **dict.fromkeys((*STEPS, *COLUMNS, Krum), SingleModelRule),
    OwnRule: single_model,
    Independent: MultiModelRule,
    FedCross: MultiModelRule,
    FedMR: MultiModelRule,
    FedCDA: CachedUploadRule,
    Scaffold: ControlVariateRule,
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
) -> Aggregator:
    """Return a node's rule, behind the bound of its children's steps; for the other arguments see `RuleContext`."""
    rate = learning_rate or (lambda _: training.learning_rate)
    context = RuleContext(layout, node, seed, measures, rows, folder, children, training, rate, rounds_below, refiner)
    rule = BUILT[type(settings)](settings, context)
    if bound.action == "off":
        return rule
    return NormBoundedRule(rule, bound, link_layouts(settings, layout))
