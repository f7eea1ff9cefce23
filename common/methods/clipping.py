"""Centred clipping (Karimireddy et al. 2021): the mean of steps that are clipped around a centre, a
few times.

    v <- v + sum w_k (v_k - v) min(1, tau / ||v_k - v||)        from v = z, the model that the
    children received

The paper's centre is the last aggregate of momentum, which is z for steps. v is z plus a mixture of
the steps, so all distances follow from the inner products of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import CombiningSettings, Weights
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Count, Positive


class CentredClipping(CombiningSettings):
    """One model: the mean of the steps, each clipped around the result of the step before."""

    step_models = 1.0
    condition: ClassVar[str] = "n >= 10 f"

    name: Literal["centred_clipping"] = "centred_clipping"  # the rule
    weights: Weights = "uniform"  # of the steps: shares of the samples, or 1/K
    # the longest step (tau); omitted: the median length of the round's steps
    radius: Positive | None = None
    steps: Count = 3  # how often they are clipped

    def tolerates(self, uploads: int) -> int:
        """Return f, a tenth, as long as all uploads count alike."""
        return uploads // 10

    def build(self, context: RuleContext) -> Rule:
        rule = ClippedSteps(radius=self.radius, steps=self.steps)
        return single_model(self, context, rule, weights=self.weights)


class ClippedSteps(ColumnRule):
    """The model received, and a mixture of the steps."""

    compares = True

    def __init__(self, *, radius: float | None, steps: int) -> None:
        self._radius = radius
        self._steps = steps

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Compute the mixture; return the radius, and whose steps were clipped in the end."""
        assert facts.products is not None
        inner_KK = facts.products.offsets_KK
        weights_K = facts.weights_K
        lengths_K = np.sqrt(np.diagonal(inner_KK))
        radius = float(np.median(lengths_K)) if self._radius is None else self._radius
        mixed_K = shares_K = np.zeros(len(weights_K))
        for _ in range(self._steps):
            along_K = inner_KK @ mixed_K
            far_K = np.sqrt(np.maximum(lengths_K**2 - 2 * along_K + mixed_K @ along_K, 0.0))
            shares_K = np.minimum(1.0, radius / np.maximum(far_K, 1e-300))
            moves_K = weights_K * shares_K
            mixed_K = mixed_K * (1 - moves_K.sum()) + moves_K
        self._mixed_K = mixed_K
        clipped = [
            child for child, share in zip(facts.children, shares_K, strict=True) if share < 1
        ]
        return {"radius": radius, "clipped": clipped}

    def columns(self, block: Columns) -> Doubles:
        """Return the model plus the mixture of the steps, [C]."""
        found: Doubles = block.model_C + self._mixed_K @ (block.uploads_KC - block.model_C).astype(
            np.float64
        )
        return found
