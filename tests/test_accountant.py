"""The accountant: closed forms, values kept of dp-accounting, and that package where it is
installed.

dp-accounting needs attrs below 24, which other packages of the environment do not allow:
`pip install dp-accounting` into an environment of its own, and run this file there with numpy,
pydantic and pytest.
"""

from __future__ import annotations

import math
import random
from typing import Final

import pytest
from scipy.special import log_ndtr

from fedstrata.common.settings import accountant
from fedstrata.common.settings.accountant import ORDERS, epsilon, renyi, steps_in_epoch

# noise multiplier, sampling rate, releases, delta, and epsilon of dp-accounting 0.6.0 with ORDERS
KEPT: Final = (
    (4.1043, 0.13944, 11311, 1e-08, 28.424770371167703),
    (4.6384, 0.210349, 2174, 0.0001, 10.562954741755261),
    (4.5792, 0.00028, 104, 0.0001, 0.010510446717545521),
    (1.4845, 1.0, 11, 1e-08, 15.265844127199808),
    (0.7454, 1.0, 8734, 1e-09, 9904.980885065797),
    (1.5396, 0.000193, 454, 1e-06, 0.23454311631517305),
    (0.5108, 1.0, 5596, 0.0001, 13439.003766327292),
    (7.7283, 0.000453, 5, 1e-05, 0.008371532643596089),
    (17.0125, 0.047897, 7, 1e-08, 0.03739959530149149),
    (0.6858, 0.003276, 1, 1e-06, 2.2403520551935423),
    (0.6023, 1.0, 1, 1e-05, 8.59164855848664),
    (9.2893, 0.022732, 1105, 0.001, 0.1865420414440998),
    (1.1027, 0.007961, 22, 1e-06, 1.0138937285624512),
    (2.1827, 1.0, 12, 0.001, 6.277301728643561),
    (16.1589, 0.003969, 229, 1e-06, 0.01644446387034652),
    (1.3964, 0.000109, 1, 0.0001, 0),
    (4.1183, 0.000296, 11, 1e-09, 0.05561554337671033),
    (15.6792, 0.002529, 180, 1e-09, 0.027598866864114908),
    (2.0956, 0.122522, 37, 1e-05, 1.862573036873608),
    (0.3499, 0.000229, 29, 1e-07, 9.693936886049553),
)


def error(found: float, expected: float) -> float:
    return abs(found - expected) / max(1.0, abs(expected))


@pytest.mark.parametrize(("multiplier", "rate", "releases", "delta", "expected"), KEPT)
def test_values_of_dp_accounting(
    multiplier: float, rate: float, releases: int, delta: float, expected: float
) -> None:
    found = epsilon(multiplier, releases=releases, delta=delta, sampling_rate=rate)
    assert error(found, expected) < 1e-9


def test_drawn_settings_agree_with_dp_accounting() -> None:
    events = pytest.importorskip("dp_accounting")
    accountants = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    drawn = random.Random(5)
    for _ in range(200):
        multiplier = math.exp(drawn.uniform(math.log(0.3), math.log(20)))
        rate = (
            1.0 if drawn.random() < 0.3 else math.exp(drawn.uniform(math.log(1e-4), math.log(0.9)))
        )
        releases, delta = (
            int(math.exp(drawn.uniform(0, math.log(20_000)))),
            10.0 ** -drawn.randint(3, 9),
        )
        event = events.GaussianDpEvent(multiplier)
        event = event if rate == 1 else events.PoissonSampledDpEvent(rate, event)
        theirs = accountants.RdpAccountant(ORDERS).compose(
            events.SelfComposedDpEvent(event, releases)
        )
        found = epsilon(multiplier, releases=releases, delta=delta, sampling_rate=rate)
        assert error(found, theirs.get_epsilon(delta)) < 1e-6


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
