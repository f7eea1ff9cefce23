"""The accountant: closed forms, and 200 values kept of dp-accounting 0.6.0.

dp-accounting needs attrs below 24, which other packages of the environment do not allow. The rows
of epsilon.csv are `RdpAccountant(ORDERS).compose(SelfComposedDpEvent(event, releases))
.get_epsilon(delta)` of a GaussianDpEvent, or of PoissonSampledDpEvent where the rate is below 1,
with settings drawn log-uniformly.
"""

from __future__ import annotations

import math

import pytest
from scipy.special import log_ndtr

from fedstrata.common.settings import accountant
from fedstrata.common.settings.accountant import ORDERS, epsilon, renyi, steps_in_epoch
from tests.helpers.commands import table
from tests.refused import KEPT


def error(found: float, expected: float) -> float:
    return abs(found - expected) / max(1.0, abs(expected))


@pytest.mark.parametrize("row", table(KEPT / "epsilon.csv"), ids=lambda row: "-".join(row.values()))
def test_values_of_dp_accounting(row: dict[str, str]) -> None:
    found = epsilon(
        float(row["noise_multiplier"]),
        releases=int(row["releases"]),
        delta=float(row["delta"]),
        sampling_rate=float(row["sampling_rate"]),
    )
    assert error(found, float(row["epsilon"])) < 1e-9


def test_the_gaussian_mechanism_has_its_closed_form() -> None:
    """The least over all real orders is at most a little below that over ORDERS."""
    multiplier, releases, delta = 1.3, 20, 1e-5
    orders = [1.01 + 0.001 * step for step in range(60_000)]
    bounds = [
        releases * order / (2 * multiplier**2)
        + math.log1p(-1 / order)
        - math.log(delta * order) / (order - 1)
        for order in orders
    ]
    found = epsilon(multiplier, releases=releases, delta=delta)
    assert min(bounds) <= found <= 1.01 * min(bounds)


def test_the_second_order_of_sampling_has_its_closed_form() -> None:
    """E[(p / q)^2] of a mixture: 1 + q^2 (exp(1 / z^2) - 1)."""
    place = ORDERS.index(2.0)
    for multiplier, rate in ((0.7, 0.3), (1.0, 0.01), (4.0, 0.5)):
        expected = math.log1p(rate**2 * math.expm1(1 / multiplier**2))
        assert renyi(multiplier, rate)[place] == pytest.approx(expected, rel=1e-9)


def test_divergences_of_fractional_orders_lie_between_those_of_whole_ones() -> None:
    for multiplier, rate in ((1.0, 0.01), (2.0, 0.05)):
        found = [value for value in renyi(multiplier, rate) if value != math.inf]
        assert found == sorted(found)


def test_epsilon_grows_with_releases_and_falls_with_noise_and_with_sampling() -> None:
    def cost(multiplier: float = 1.0, releases: int = 100, rate: float = 1.0) -> float:
        return epsilon(multiplier, releases=releases, delta=1e-5, sampling_rate=rate)

    assert cost(releases=99) < cost() < cost(releases=101)
    assert cost(multiplier=1.1) < cost()
    assert cost(rate=0.01) < cost(rate=0.1) < cost()


def test_no_release_costs_nothing_and_no_noise_everything() -> None:
    assert epsilon(1.0, releases=0, delta=1e-5) == 0.0
    assert epsilon(0.0, releases=1, delta=1e-5) == math.inf
    assert epsilon(1e6, releases=1, delta=1e-3) == 0.0  # by the Kullback-Leibler divergence


def test_steps_of_an_epoch() -> None:
    assert [steps_in_epoch(rate) for rate in (0.1, 0.3, 0.05, 0.5)] == [10, 4, 20, 2]


@pytest.mark.parametrize("scaled", [0.0, 1.0, 10.0, 35.3, 35.4, 40.0, 100.0, 1000.0])
def test_the_tail_of_erfc_is_that_of_the_normal_distribution(scaled: float) -> None:
    assert accountant._log_half_erfc(scaled) == pytest.approx(log_ndtr(-scaled), rel=5e-15)
