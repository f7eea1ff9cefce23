"""Differences and ratios of two series, seed by seed, with a confidence interval.

Runs of one seed share split, selection and batches, so these are sharper than the difference of the
means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import atan, cos, pi, sin, sqrt
from typing import Any, Final

from fedstrata.deploy.console.tabular import Spread, show
from fedstrata.deploy.results.run import Run

CONFIDENCE: Final = 0.95
SEEDS_LEAST: Final = 3  # from which on there is an interval
INTERVAL: Final = f"{100 * CONFIDENCE:.0f}\N{NO-BREAK SPACE}% interval"


@dataclass(frozen=True, slots=True)
class Pairs:
    """A value of each seed that two series have in common."""

    values: Mapping[str, float]

    @property
    def spread(self) -> Spread | None:
        """The mean and the deviation, None without a seed."""
        return Spread.of(list(self.values.values()))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's interval of the mean, for values that are distributed normally; None of fewer
        than SEEDS_LEAST.
        """
        found = self.spread
        count = len(self.values)
        if found is None or found.deviation is None or count < SEEDS_LEAST:
            return None
        half = quantile(count - 1) * found.deviation / sqrt(count)
        return found.mean - half, found.mean + half

    def text(self, digits: int) -> str | None:
        """Return the interval as it stands in tables, None without."""
        if self.interval is None:
            return None
        return " to ".join(show(end, digits) for end in self.interval)

    def plain(self) -> dict[str, Any] | None:
        """Return mean, deviation, interval and the value of each seed; None without a seed."""
        found = self.spread
        if found is None:
            return None
        ends = None if self.interval is None else list(self.interval)
        return {
            "mean": found.mean,
            "deviation": found.deviation,
            "interval": ends,
            "by_seed": dict(self.values),
        }


def paired(
    first: Mapping[str, float], other: Mapping[str, float], combine: Callable[[float, float], float]
) -> Pairs:
    """Return `combine(first, other)` of the common seeds."""
    return Pairs(
        {seed: combine(value, other[seed]) for seed, value in first.items() if seed in other}
    )


def by_seed(runs: Sequence[Run], value: Callable[[Run], float | None]) -> dict[str, float]:
    """Return the mean value of the runs of each seed, of seeds all of whose runs have one."""
    found: dict[str, list[float]] = {}
    without = set()
    for run in runs:
        seed = str(run.seed)
        known = value(run)
        if known is None:
            without.add(seed)
        else:
            found.setdefault(seed, []).append(known)
    return {seed: sum(own) / len(own) for seed, own in found.items() if seed not in without}


@cache
def quantile(freedom: int) -> float:
    """Return the t up to which Student's distribution has CONFIDENCE of its mass to both sides of
    0.
    """
    low = 0.0
    high = 1.0
    while _mass(high, freedom) < CONFIDENCE:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _mass(middle, freedom) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _mass(t: float, freedom: int) -> float:
    """Return the mass between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = atan(t / sqrt(freedom))
    odd = freedom % 2 == 1
    term = cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cos(angle) ** 2
        total += term
    if odd:
        return 2 / pi * (angle + sin(angle) * total)
    return sin(angle) * total
