"""FedAdp (Wu and Wang 2021): a child's weight grows with the alignment of its step and the mean
step.

    theta_k = angle between d_k = v_k - g and dbar = sum of p_i d_i       over trainable columns
    s_k     = ((j - 1) s_k + theta_k) / j                                 at child k's j-th
    participation at this node f_k     = a (1 - exp(-exp(-a (s_k - 1))))
    w_k     = n_k exp(f_k) / sum of the same

j counts the child's participations, not the rounds. The angle of a child that did not move is a
right angle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import MeanRule, RoundFacts
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import CombiningSettings, RuleUse
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles, Gram, shares

STRONGLY_SKEWED_CONCENTRATION: Final = 0.1  # of the Dirichlet split


class FedAdp(CombiningSettings):
    """One model: a mean that favours children whose step points where the mean of all points."""

    remembers: ClassVar[bool] = True  # the angles

    name: Literal["fedadp"] = "fedadp"  # the rule
    # height and steepness of the weight over the angle; 0 is FedAvg
    a: Annotated[float, Field(ge=0)] = 5.0

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield a warning for few children with unlike labels, and for uploads that change few
        columns.
        """
        if use.over_devices and use.partial and use.skew <= STRONGLY_SKEWED_CONCENTRATION:
            yield (
                f"{use.key}.aggregation.name = 'fedadp': with partial participation and strong "
                "label skew it is worse"
                " than fedavg."
            )
        if use.sparse:
            yield (
                f"{use.key}.aggregation.name = 'fedadp': the codec of the uploads sends few "
                "columns, each child others,"
                " so all steps are nearly at right angles, whatever the devices learn."
            )

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, AngleMean(**self.keywords), weights="data")


class AngleMean(MeanRule):
    """The mean by angles. `numbers` has each child's participations j, and its smoothed angle s in
    radians.
    """

    compares = True

    def __init__(self, *, a: float) -> None:
        self._a = a

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Smooth the children's angles; return those of this round."""
        assert facts.products is not None
        thetas = facts.by_child(angles(facts.products, facts.weights_K))
        seen = {}
        for child, theta in thetas.items():
            count, smoothed = self.numbers.get(child, (0, 0.0))
            seen[child] = [count + 1, (count * smoothed + theta) / (count + 1)]
        self.numbers = {**self.numbers, **seen}
        return {"angles": thetas}

    def weights(self, facts: RoundFacts) -> Doubles:
        """Return the weights by the smoothed angles."""
        gains_K = np.array([gompertz(self.numbers[child][1], self._a) for child in facts.children])
        counts_K = facts.samples_K.astype(np.float64)
        if not counts_K.any():
            counts_K[:] = 1.0
        # relative to the largest: equal angles give p_k
        return shares(counts_K * np.exp(gains_K - gains_K.max()))


def angles(products: Gram, shares_K: Doubles) -> Doubles:
    """Return theta_k in radians from the products of the steps: relative to g, C = <d_i, d_j>."""
    along_K = products.offsets_KK @ shares_K
    lengths_K = np.sqrt(np.maximum(np.diagonal(products.offsets_KK), 0.0))
    scale_K = lengths_K * np.sqrt(max(float(shares_K @ along_K), 0.0))
    cosines_K = np.divide(along_K, scale_K, out=np.zeros_like(along_K), where=scale_K > 0)
    found: Doubles = np.arccos(np.clip(cosines_K, -1.0, 1.0))
    return found


def gompertz(angle: float, a: float) -> float:
    """Return f: near a for small angles, falling around 1 rad."""
    return a * (1 - exp(-exp(-a * (angle - 1))))
