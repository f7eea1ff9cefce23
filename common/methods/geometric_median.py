"""The geometric median of the uploads (RFA, Pillutla et al. 2022), by smoothed Weiszfeld steps from
their mean.

    z <- sum b_k v_k / sum b_k,    b_k = a_k / max(nu, ||z - v_k||)

z stays a mean of the uploads, so all distances follow from the inner products of their steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import MeanRule, RoundFacts
from fedstrata.common.methods.robust import check_uploads
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import CombiningSettings, Weights
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Count, Positive


class GeometricMedian(CombiningSettings):
    """One model: the point with the least sum of distances to the uploads."""

    uploads_least: ClassVar[int] = 3
    condition: ClassVar[str] = "n >= 2 f + 1"

    name: Literal["geometric_median"] = "geometric_median"  # the rule
    weights: Weights = "uniform"  # of the distances (a): shares of the samples, or 1/K
    steps: Count = 100  # of Weiszfeld's algorithm; the paper takes 3, where each is a secure sum
    smoothing: Positive = 1e-6  # the least distance that counts (nu)

    def tolerates(self, uploads: int) -> int:
        """Return f, a minority, as long as all uploads count alike."""
        return max(0, (uploads - 1) // 2)

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that enough uploads come. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        check_uploads(
            f"{key}.name",
            self.name,
            self.uploads_least,
            children,
            uploads,
            instead="Use another rule",
        )

    def build(self, context: RuleContext) -> Rule:
        rule = MedianPoint(steps=self.steps, smoothing=self.smoothing)
        return single_model(self, context, rule, weights=self.weights)


class MedianPoint(MeanRule):
    """The mean of the uploads by the weights of the last step."""

    compares = True

    def __init__(self, *, steps: int, smoothing: float) -> None:
        self._steps = steps
        self._smoothing = smoothing

    def begin(self, facts: RoundFacts) -> Mapping[str, object] | None:
        """Take the steps."""
        assert facts.products is not None
        weights_K = facts.weights_K
        for _ in range(self._steps):
            near_K = facts.weights_K / np.maximum(
                facts.products.distances(weights_K), self._smoothing
            )
            weights_K = near_K / near_K.sum()
        self._weights_K = weights_K
        return None

    def weights(self, facts: RoundFacts) -> Doubles:
        return self._weights_K
