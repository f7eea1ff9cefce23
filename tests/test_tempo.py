"""Tempo's equation 9 against itself in high precision, and what must hold for any distances."""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedstrata.cloud.tempo import dealt, decide, next_epochs
from fedstrata.common.errors import RunFailed
from fedstrata.common.settings.cloud import EpochControl
from tests.helpers.examples import examples

EPOCHS = st.integers(1, 30)
OMEGA = st.floats(1e-9, 1e9)
OMEGAS = st.lists(OMEGA, min_size=2, max_size=8)


def named(omegas: list[float]) -> dict[str, float]:
    return {f"institution-{m}": omega for m, omega in enumerate(omegas)}


def epochs_of(omegas: list[float], c: int) -> list[int]:
    return list(next_epochs(named(omegas), c).values())


def equation_9(omegas: list[float], c: int) -> list[Decimal]:
    """Return tau_c[m] before it is rounded up, literally as printed, in 60 digits."""
    with localcontext(Context(prec=60)):
        logs = [Decimal(omega).ln() for omega in omegas]
        low, high = min(logs), max(logs)
        half = Decimal(c) / 2
        return [half / (low - high) * (3 * log + low - 4 * high) for log in logs]


def least(c: int) -> int:
    return math.ceil(Fraction(c, 2))


@examples(300)
@given(omegas=OMEGAS, c=EPOCHS)
def test_epochs_are_equation_9(omegas: list[float], c: int) -> None:
    assume(1 + 1e-6 < max(omegas) / min(omegas) < 1e12)
    exact = equation_9(omegas, c)
    for tau, value in zip(epochs_of(omegas, c), exact, strict=True):
        allowed = {math.ceil(value - Decimal("6e-10")), math.ceil(value - Decimal("4e-10"))}
        assert tau in allowed  # nine digits are kept before rounding up


@pytest.mark.parametrize("base", [2.0, 3.0, 5.0, 7.0, 10.0])
@pytest.mark.parametrize("steps", range(2, 13))
def test_exact_values_are_not_rounded_up_past_themselves(base: float, steps: int) -> None:
    """Distances in geometric steps give u = 0, 1/n, ... 1, where floats often land just above an
    integer.
    """
    omegas = [base**step for step in range(steps + 1)]
    for c in range(1, 13):
        exact = [
            Fraction(c, 2) * (1 + 3 * Fraction(steps - step, steps)) for step in range(steps + 1)
        ]
        assert epochs_of(omegas, c) == [math.ceil(value) for value in exact]


@given(omegas=OMEGAS, c=EPOCHS)
def test_the_ends_and_the_range(omegas: list[float], c: int) -> None:
    assume(max(omegas) / min(omegas) > 1 + 1e-9)
    epochs = epochs_of(omegas, c)
    assert all(isinstance(tau, int) and max(1, least(c)) <= tau <= 2 * c for tau in epochs)
    assert (
        epochs[omegas.index(max(omegas))] == least(c) and epochs[omegas.index(min(omegas))] == 2 * c
    )


@given(omega=st.one_of(st.just(0.0), st.floats(0, 1e300)), count=st.integers(0, 8), c=EPOCHS)
def test_one_institution_and_equal_distances_train_c(omega: float, count: int, c: int) -> None:
    assert epochs_of([omega] * count, c) == [c] * count


def test_a_spread_below_rounding_is_none() -> None:
    assert epochs_of([1.0, 1.0 + 2**-52, 1.0 - 2**-53], 6) == [6, 6, 6]
    assert epochs_of([1.0, 1.0 + 9e-6], 6) == [6, 6]
    # but the smallest real spread is stretched, as in eq. 9
    assert epochs_of([1.0, 1.0 + 1e-4], 6) == [12, 3]


@pytest.mark.parametrize(("variant", "samples"), [("paper", [100, 100]), ("plato", [100, 300])])
@pytest.mark.parametrize("seed", range(5))
def test_two_institutions_that_are_equally_far_train_c(
    variant: str, samples: list[int], seed: int
) -> None:
    # The weighted mean of two is equally far from both, each distance times its samples; the
    # float32 mean is not.
    rng = np.random.default_rng(seed)
    both = [rng.normal(size=10_000).astype(np.float32) for _ in samples]
    mean = np.average(both, axis=0, weights=samples).astype(np.float32)
    omegas = [float(np.linalg.norm((each - mean).astype(np.float64))) for each in both]
    assert omegas[0] * samples[0] != omegas[1] * samples[1]
    assert decided(omegas, 6, samples=samples, variant=variant) == [6, 6]


@given(c=EPOCHS, largest=st.floats(5e-324, 1e308))
def test_a_lone_zero_trains_twice_c(c: int, largest: float) -> None:
    assert epochs_of([largest, 0.0], c) == [least(c), 2 * c]
    assert epochs_of([0.0, largest, 0.0], c) == [2 * c, least(c), 2 * c]


@given(c=EPOCHS)
def test_distances_below_the_floor_are_raised_to_it(c: int) -> None:
    assert epochs_of([1.0, 1e-12, 0.0, 1e-300, 1e-6], c) == epochs_of(
        [1.0, 1e-12, 1e-12, 1e-12, 1e-6], c
    )


@pytest.mark.parametrize("omega", [math.nan, math.inf, -math.inf, -1e-9])
def test_a_diverged_institution_is_named(omega: float) -> None:
    with pytest.raises(RunFailed, match=f"institution-1 is at distance {omega}"):
        epochs_of([1.0, omega, 2.0], 6)
    with pytest.raises(RunFailed, match="institution-0"):
        epochs_of([omega], 6)


# Options


def decided(
    omegas: list[float],
    c: int,
    *,
    ran: list[int] | None = None,
    samples: list[int] | None = None,
    **options: object,
) -> list[int]:
    names = list(named(omegas))
    control = EpochControl.model_validate({"name": "tempo", **options})
    found = decide(
        control,
        named(omegas),
        c=c,
        ran=dict(zip(names, ran or [1] * len(names), strict=True)),
        samples=dict(zip(names, samples or [1] * len(names), strict=True)),
        draw=np.random.default_rng(0),
    )
    assert list(found) == names
    return list(found.values())


@given(omegas=OMEGAS, c=EPOCHS)
def test_without_options_it_is_the_paper(omegas: list[float], c: int) -> None:
    assert decided(omegas, c) == epochs_of(omegas, c)


@examples(200)
@given(omegas=OMEGAS, c=EPOCHS, data=st.data())
def test_plato_has_the_institutions_in_place_of_c(
    omegas: list[float], c: int, data: st.DataObject
) -> None:
    samples = data.draw(st.lists(st.integers(1, 1000), min_size=len(omegas), max_size=len(omegas)))
    weighed = [omega * n for omega, n in zip(omegas, samples, strict=True)]
    assume(max(weighed) / min(weighed) > 1 + 1e-6)
    found = decided(omegas, c, samples=samples, variant="plato")
    assert found == epochs_of(weighed, len(omegas))
    m = len(omegas)
    assert (
        found[weighed.index(max(weighed))] == math.ceil(m / 2)
        and found[weighed.index(min(weighed))] == 2 * m
    )


def test_plato_of_equal_distances_is_c() -> None:
    assert decided([2.0, 2.0, 2.0], 6, variant="plato") == [6, 6, 6]
    assert decided([2.0], 6, variant="plato") == [6]
    assert decided([0.0, 0.0], 6, variant="plato") == [6, 6]
    # a zero is the nearest, in place of ln 0
    assert decided([1.0, 0.0], 6, variant="plato") == [1, 4]


@given(omegas=OMEGAS, c=EPOCHS, data=st.data())
def test_distances_may_count_per_epoch(omegas: list[float], c: int, data: st.DataObject) -> None:
    ran = data.draw(st.lists(st.integers(1, 60), min_size=len(omegas), max_size=len(omegas)))
    divided = [omega / tau for omega, tau in zip(omegas, ran, strict=True)]
    assert decided(omegas, c, ran=ran, per_epoch=True) == epochs_of(divided, c)


def test_equal_steps_per_epoch_end_the_oscillation() -> None:
    assert decided([12.0, 3.0], 6, ran=[12, 3], per_epoch=True) == [6, 6]
    assert decided([12.0, 3.0], 6, ran=[12, 3]) == [3, 12]


@given(omegas=OMEGAS, c=EPOCHS, control=st.sampled_from(["shuffled", "fixed_mean"]))
def test_controls_spend_the_same_epochs(omegas: list[float], c: int, control: str) -> None:
    epochs, found = epochs_of(omegas, c), decided(omegas, c, control=control)
    assert sum(found) == sum(epochs) and min(found) >= 1
    if control == "shuffled":
        assert sorted(found) == sorted(epochs)
    else:
        assert max(found) - min(found) <= 1


def test_controls_do_not_look_at_distances() -> None:
    """Each institution gets each of the amounts equally often."""
    epochs = {f"institution-{m}": m + 1 for m in range(4)}
    for even in (False, True):
        total = dict.fromkeys(epochs, 0)
        for seed in range(2000):
            for name, tau in dealt(epochs, even=even, draw=np.random.default_rng(seed)).items():
                total[name] += tau
        assert all(abs(sum_ / 2000 - 2.5) < 0.1 for sum_ in total.values())
    assert dealt({}, even=True, draw=np.random.default_rng(0)) == {}
