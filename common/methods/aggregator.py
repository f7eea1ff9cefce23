"""Building a node's rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from common.experiment.methods import NormBound, RuleSettings
from common.experiment.training import TrainingSettings
from common.lazy import np, npt
from common.methods.norm_bound import NormBoundedRule
from common.methods.rule import NO_TRAINING, Rule, RuleContext, link_layouts
from common.model.layout import ModelLayout
from common.model.refinement import Refiner

NO_BOUND: Final = NormBound()


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
    rule = settings.build(context)
    if bound.action == "off":
        return rule
    return NormBoundedRule(rule, bound, link_layouts(settings, layout))
