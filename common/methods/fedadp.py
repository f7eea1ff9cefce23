"""FedAdp (Wu and Wang 2021): a child's weight grows with the alignment of its step and the mean step.

    theta_k = angle between d_k = v_k - g and dbar = sum of p_i d_i       over trainable columns
    s_k     = ((j - 1) s_k + theta_k) / j                                 at child k's j-th participation at this node
    f_k     = a (1 - exp(-exp(-a (s_k - 1))))
    w_k     = n_k exp(f_k) / sum of the same

j counts the child's participations, not the rounds. The angle of a child that did not move is a right angle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from common.experiment.aggregation import FedAdp
from common.lazy import np
from common.methods.mixing import Mixture
from common.methods.statistics import Doubles, Gram, Statistics, shares


@dataclass(frozen=True, slots=True)
class Angle:
    """A child's smoothed angle in radians, and the number of its participations."""

    count: int = 0
    smoothed: float = 0.0

    def with_next(self, theta: float) -> Angle:
        """Return the mean of all angles including `theta`."""
        return Angle(self.count + 1, (self.count * self.smoothed + theta) / (self.count + 1))


Angles = Mapping[str, Angle]


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


def plan(
    known: Angles, statistics: Statistics, products: Gram, *, children: Sequence[str], a: float
) -> tuple[Mixture, Angles, dict[str, object]]:
    """Return W [1, K] for the children's uploads, the updated angles, and facts for the plan."""
    thetas_K = angles(products, statistics.shares_K)
    seen = {
        child: known.get(child, Angle()).with_next(float(theta))
        for child, theta in zip(children, thetas_K, strict=True)
    }
    gains_K = np.array([gompertz(seen[child].smoothed, a) for child in children])
    counts_K = statistics.samples_K.astype(np.float64)
    if not counts_K.any():
        counts_K[:] = 1.0
    weights_K = shares(counts_K * np.exp(gains_K - gains_K.max()))  # relative to the largest: equal angles give p_k
    facts: dict[str, object] = {"angles": dict(zip(children, thetas_K.tolist(), strict=True))}
    return Mixture.of(weights_K), {**known, **seen}, facts


class AngleMean:
    """The mean by angles, which are kept from round to round."""

    compares = True

    def __init__(self, settings: FedAdp) -> None:
        self._a = settings.a
        self._angles: Angles = {}

    def of(
        self, r: int, statistics: Statistics, products: Gram | None, children: Sequence[str]
    ) -> tuple[Mixture, Mapping[str, object]]:
        """Return the weights, and the angles as facts."""
        assert products is not None
        mixture, self._angles, facts = plan(self._angles, statistics, products, children=children, a=self._a)
        return mixture, facts

    def save(self) -> dict[str, object]:
        """Return the children's angles."""
        return {"angles": {child: [angle.count, angle.smoothed] for child, angle in self._angles.items()}}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore the children's angles."""
        self._angles = {
            child: Angle(int(count), float(smoothed)) for child, (count, smoothed) in facts["angles"].items()
        }
