"""Epsilon of Gaussian noise over many releases, by Renyi differential privacy, without numpy.

    Gaussian: RDP(a) = a / (2 z^2)                       (Mironov 2017, Corollary 3)
    Poisson-subsampled: RDP(a) = ln A_a / (a - 1)        (Mironov, Talwar, Zhang 2019, 3.3)
    n releases: n RDP(a)
    epsilon = min over a of n RDP(a) + ln(1 - 1/a) - ln(delta a) / (a - 1)
                                                         (Canonne, Kamath, Steinke 2020, Prop. 12)

z is the noise's standard deviation over the sensitivity. Neighbours differ by one unit, in whose
place there is a zero update, or a zero gradient.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, erfc, exp, expm1, inf, lgamma, log, log1p, pi, sqrt
from typing import Final

ORDERS: Final[tuple[float, ...]] = (
    1.25,
    1.5,
    1.75,
    2.0,
    2.25,
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    *map(float, range(5, 64)),
    128.0,
    256.0,
    512.0,
)
TERMS_MOST: Final = 1000  # of a fractional order; one that needs more is left out
NEGLIGIBLE: Final = 30.0  # in natural logarithms, below the sum
SERIES_FROM: Final = 25.0  # erfc of more is too small for a float


def epsilon(
    noise_multiplier: float, *, releases: int, delta: float, sampling_rate: float = 1.0
) -> float:
    """Return epsilon of so many releases of a unit, each with the noise z; infinite without noise.

    `sampling_rate`: the probability with which each release has the unit, independently of all
    others (Poisson); 1: no amplification.
    """
    if releases == 0:
        return 0.0
    if noise_multiplier == 0:
        return inf
    least = inf
    for order, once in zip(ORDERS, renyi(noise_multiplier, sampling_rate), strict=True):
        whole = releases * once
        # by the Kullback-Leibler divergence: delta <= sqrt(1 - exp(-KL))
        if delta**2 + expm1(-whole) > 0:
            return 0.0
        least = min(least, whole + log1p(-1 / order) - log(delta * order) / (order - 1))
    return max(0.0, least)


def steps_in_epoch(sampling_rate: float) -> int:
    """Return the steps in which each sample is expected once."""
    return ceil(1 / sampling_rate - 1e-9)


@lru_cache(maxsize=64)
def renyi(noise_multiplier: float, sampling_rate: float = 1.0) -> tuple[float, ...]:
    """Return the divergences of one release, for each of ORDERS."""
    if sampling_rate == 1:
        return tuple(order / (2 * noise_multiplier**2) for order in ORDERS)
    divergences = []
    for order in ORDERS:
        if order.is_integer():
            log_a = _of_whole(sampling_rate, noise_multiplier, int(order))
        else:
            log_a = _of_fraction(sampling_rate, noise_multiplier, order)
        divergences.append(max(0.0, log_a / (order - 1)))
    return tuple(divergences)


def _of_whole(q: float, z: float, order: int) -> float:
    """Return ln A of a whole order, by the binomial sum of the paper."""
    total = -inf
    for i in range(order + 1):
        term = _log_binomial(order, i) + i * log(q) + (order - i) * log1p(-q)
        total = _log_sum(total, term + (i * i - i) / (2 * z**2))
    return total


def _of_fraction(q: float, z: float, order: float) -> float:
    """Return ln A by the two series of the paper, from both sides of z0; the signs of late terms
    only lower it.
    """
    total = -inf
    before = (-inf, -inf)
    z0 = z**2 * log(1 / q - 1) + 0.5
    for i in range(TERMS_MOST):
        j = order - i
        binomial = _log_binomial(order, i)
        below = binomial + i * log(q) + j * log1p(-q) + (i * i - i) / (2 * z**2)
        below += _log_half_erfc((i - z0) / z)
        above = binomial + j * log(q) + i * log1p(-q) + (j * j - j) / (2 * z**2)
        above += _log_half_erfc((z0 - j) / z)
        total = _log_sum(total, _log_sum(below, above))
        if below < before[0] and above < before[1] and max(below, above) < total - NEGLIGIBLE:
            return total
        before = below, above
    return inf


def _log_binomial(n: float, k: float) -> float:
    """Return ln of the absolute value of n over k."""
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _log_sum(one: float, other: float) -> float:
    small, large = sorted((one, other))
    if small == -inf:
        return large
    return large + log1p(exp(small - large))


def _log_half_erfc(scaled: float) -> float:
    """Return ln(erfc(x) / 2) at x = scaled / sqrt(2)."""
    x = scaled / sqrt(2)
    if x < SERIES_FROM:
        return log(erfc(x) / 2)
    series = -0.5 * x**-2 + 0.625 * x**-4 - 37 / 24 * x**-6 + 353 / 64 * x**-8
    return -log(2) - log(pi) / 2 - log(x) - x**2 + series
