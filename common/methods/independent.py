"""The baseline of the multi-model rules: no mixing, each model continues from its own upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from common.experiment.aggregation import Independent
from common.methods.mixing import MixedColumns, Mixture, Mixtures, whole
from common.methods.statistics import Gram
from common.methods.uploads import Planner, RuleContext, Uploads


def planner(settings: Independent, context: RuleContext) -> Planner:
    """Return what decides a node's rounds."""

    def decide(
        r: int, uploads: Uploads, compare: Callable[[], Gram]
    ) -> tuple[Sequence[MixedColumns], Mapping[str, object]]:
        return whole(context.layout, plan(len(uploads.children))), {"stage": "unmixed"}

    return decide


def plan(count: int) -> Mixtures:
    """Return the identity [K, K]."""
    return tuple(Mixture.copy(k) for k in range(count))
