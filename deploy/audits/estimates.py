"""Numbers of an audit, with their uncertainty. No torch.

AUC      P(score of a member > score of another sample) + P(equal) / 2       bootstrap percentiles
TPR      members above a threshold that 1 % of the others exceed             Clopper, Pearson 1934
one run  r guesses about m canaries, v right: (epsilon, delta) is refuted with the p-value
         P[B >= v] + 2 m delta max_i P[v - i <= B < v] / i       B ~ Bin(r, 1 / (1 + e^-epsilon))
                                                 (Steinke, Nasr, Jagielski 2023, Theorem 5.2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import exp, lgamma, log, log1p
from typing import Final

import numpy as np

from fedstrata.common.methods.statistics import Doubles

LEVEL: Final = 0.95  # of all intervals, two-sided
FALSE_POSITIVES: Final = 0.01
RESAMPLES: Final = 1000
HALVINGS: Final = 40
EPSILON_MOST: Final = 50.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, its interval of 95 %, and how that was computed."""

    value: float
    low: float
    high: float
    interval: str

    @property
    def facts(self) -> dict[str, float | str]:
        """The same by name."""
        return asdict(self)


def auc(members: Doubles, others: Doubles, chance: np.random.Generator) -> Estimate:
    """Return the area under the curve of scores [n] and [m]."""
    above = (members[:, None] > others) + 0.5 * (members[:, None] == others)
    resampled = [
        chance.multinomial(len(each), np.full(len(each), 1 / len(each)), RESAMPLES) / len(each)
        for each in (members, others)
    ]
    found = ((resampled[0] @ above) * resampled[1]).sum(1)
    return Estimate(float(above.mean()), *_middle(found), "bootstrap")


def true_positives(members: Doubles, others: Doubles) -> Estimate:
    """Return the share of the members [n] found at 1 % false positives among the others [m]."""
    allowed = int(FALSE_POSITIVES * len(others))
    threshold = np.sort(others)[::-1][allowed]
    found = int((members > threshold).sum())
    low, high = clopper_pearson(found, len(members))
    return Estimate(found / len(members), low, high, "Clopper-Pearson")


def mean(values: Doubles, chance: np.random.Generator) -> Estimate:
    """Return the mean of values [n]."""
    drawn = values[chance.integers(0, len(values), (RESAMPLES, len(values)))].mean(1)
    return Estimate(float(values.mean()), *_middle(drawn), "bootstrap")


def clopper_pearson(found: int, count: int) -> tuple[float, float]:
    """Return the exact interval of a probability that `found` of `count` trials show."""
    half = (1 - LEVEL) / 2
    low = _root(lambda p: _tails(count, p)[found] < half, 0.0, 1.0) if found else 0.0
    high = 1.0
    if found < count:
        high = _root(lambda p: 1 - _tails(count, p)[found + 1] > half, 0.0, 1.0)
    return low, high


def least_epsilon(canaries: int, guesses: int, right: int, *, delta: float, p: float) -> float:
    """Return the largest epsilon that so many right guesses refute at the level p; 0 if none."""
    if _p_value(canaries, guesses, right, delta, 0.0) >= p:
        return 0.0

    def refuted(epsilon: float) -> bool:
        return _p_value(canaries, guesses, right, delta, epsilon) < p

    return _root(refuted, 0.0, EPSILON_MOST)


def _p_value(canaries: int, guesses: int, right: int, delta: float, epsilon: float) -> float:
    tails = _tails(guesses, 1 / (1 + exp(-epsilon)))
    before = tails[:right][::-1] - tails[right]  # P[v - i <= B < v], i = 1, 2, ...
    worst = (before / np.arange(1, right + 1)).max(initial=0.0)
    return float(tails[right] + 2 * canaries * delta * worst)


def _tails(count: int, p: float) -> Doubles:
    """Return P[Bin(count, p) >= k] of each k from 0 to count, and 0 behind."""
    if p in (0.0, 1.0):
        return np.array([1.0, *[p] * count, 0.0])
    logs = [
        lgamma(count + 1)
        - lgamma(k + 1)
        - lgamma(count - k + 1)
        + k * log(p)
        + (count - k) * log1p(-p)
        for k in range(count + 1)
    ]
    found: Doubles = np.append(np.exp(logs)[::-1].cumsum()[::-1], 0.0)
    return found


def _root(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the largest place up to which a condition holds."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _middle(found: Doubles) -> tuple[float, float]:
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
