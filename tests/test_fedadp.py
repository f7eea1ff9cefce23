"""FedAdp against its formulas in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.experiment.training import TrainingSettings
from common.methods import fedadp
from common.methods.column_rule import RoundFacts
from common.methods.fedadp import AngleMean, gompertz
from common.methods.statistics import Gram, Statistics, gram

Floats = npt.NDArray[np.float32]

NAMES = "abcdefgh"


@dataclass
class Report:
    samples: int
    loss: float = 0.0
    path_steps: int = 1
    start_loss: float | None = None


def statistics_of(samples: list[int]) -> Statistics:
    return Statistics.of([Report(count) for count in samples])


def weigh(rule: AngleMean, samples: list[int], products: Gram, children: str) -> Any:
    """Return the weights of a round, and the facts of its plan."""
    found = statistics_of(samples)
    facts = RoundFacts(
        children, found.samples_K, found.losses_K, found.steps_K, found.weights_K("data"), products, len(NAMES),
        TrainingSettings(), 0.1, 1, found.start_losses_K,
    )  # fmt: skip
    published = rule.begin(facts)
    return rule.weights(facts), published


def products_of(models_KD: Floats, start_D: Floats) -> Gram:
    return gram(list(models_KD), start_D)


def twin(deltas: list[list[float]], samples: list[int], past: list[tuple[int, float]], a: float) -> list[float]:
    total = sum(samples)
    mean = [sum(n / total * d[i] for n, d in zip(samples, deltas, strict=True)) for i in range(len(deltas[0]))]
    raw = []
    for delta, n, (count, smoothed) in zip(deltas, samples, past, strict=True):
        norms = math.hypot(*delta) * math.hypot(*mean)
        cosine = sum(x * y for x, y in zip(delta, mean, strict=True)) / norms if norms else 0.0
        theta = math.acos(min(1.0, max(-1.0, cosine)))
        angle = (count * smoothed + theta) / (count + 1)
        raw.append(n * math.exp(a * (1 - math.exp(-math.exp(-a * (angle - 1))))))
    return [weight / sum(raw) for weight in raw]


@given(
    count=st.integers(1, 8),
    seed=st.integers(0, 1000),
    a=st.floats(0, 8),
    samples=st.lists(st.integers(1, 1000), min_size=8, max_size=8),
    past=st.lists(st.tuples(st.integers(0, 9), st.floats(0, math.pi)), min_size=8, max_size=8),
)
def test_weights_are_the_formulas(
    count: int, seed: int, a: float, samples: list[int], past: list[tuple[int, float]]
) -> None:
    models_KD = np.random.default_rng(seed).normal(size=(count, 12)).astype(np.float32)
    start_D = np.random.default_rng(seed + 1).normal(size=12).astype(np.float32)
    rule = AngleMean(a=a)
    rule.numbers = {name: list(before) for name, before in zip(NAMES[:count], past, strict=False)}
    weights_K, facts = weigh(rule, samples[:count], products_of(models_KD, start_D), NAMES[:count])
    deltas = (models_KD.astype(np.float64) - start_D).tolist()
    expected = twin(deltas, samples[:count], past[:count], a)
    np.testing.assert_allclose(weights_K, expected, rtol=1e-6)
    assert {name: times for name, (times, _) in rule.numbers.items()} == {
        name: past[k][0] + 1 for k, name in enumerate(NAMES[:count])
    }
    assert list(facts["angles"]) == list(NAMES[:count])


def test_the_papers_curve() -> None:
    found = [round(gompertz(angle, 5.0), 2) for angle in (0.0, 0.5, 1.0, math.pi / 2)]
    assert found == [5.0, 5.0, 3.16, 0.28]


@given(samples=st.lists(st.integers(0, 1000), min_size=1, max_size=8), seed=st.integers(0, 100))
def test_a_zero_is_fedavg_bit_for_bit(samples: list[int], seed: int) -> None:
    models_KD = np.random.default_rng(seed).normal(size=(len(samples), 5)).astype(np.float32)
    products = products_of(models_KD, np.zeros(5, np.float32))
    weights_K, _ = weigh(AngleMean(a=0.0), samples, products, NAMES[: len(samples)])
    assert weights_K.tolist() == statistics_of(samples).shares_K.tolist()


@given(samples=st.lists(st.integers(1, 1000), min_size=1, max_size=8), seed=st.integers(0, 100))
def test_equal_steps_are_fedavg_bit_for_bit(samples: list[int], seed: int) -> None:
    model_D = np.random.default_rng(seed).normal(size=5).astype(np.float32)
    products = products_of(np.tile(model_D, (len(samples), 1)), np.zeros(5, np.float32))
    weights_K, _ = weigh(AngleMean(a=5.0), samples, products, NAMES[: len(samples)])
    np.testing.assert_allclose(weights_K, statistics_of(samples).shares_K, rtol=1e-6)


def test_who_did_not_move_is_at_a_right_angle() -> None:
    models_KD = np.array([[1, 0], [0, 0], [1, 1]], np.float32)
    products = products_of(models_KD, np.zeros(2, np.float32))
    found = fedadp.angles(products, np.full(3, 1 / 3))
    assert found[1] == pytest.approx(math.pi / 2)
    nothing = products_of(np.zeros((2, 3), np.float32), np.zeros(3, np.float32))
    assert fedadp.angles(nothing, np.array([0.5, 0.5])).tolist() == pytest.approx([math.pi / 2] * 2)
    assert weigh(AngleMean(a=5.0), [1, 3], nothing, "ab")[0].tolist() == [0.25, 0.75]


def test_angles_are_smoothed_over_a_childs_own_rounds() -> None:
    rule = AngleMean(a=5.0)
    models_KD = np.array([[1, 0], [0, 1]], np.float32)
    products = products_of(models_KD, np.zeros(2, np.float32))
    single = products_of(models_KD[:1], np.zeros(2, np.float32))
    weigh(rule, [1, 1], products, "ab")
    assert rule.numbers["a"] == [1, pytest.approx(math.pi / 4)]
    for _ in range(3):  # alone, a child is the mean: angle 0
        weigh(rule, [1], single, "a")
    assert rule.numbers["a"] == [4, pytest.approx(math.pi / 16, abs=1e-7)]
    assert rule.numbers["b"] == [1, pytest.approx(math.pi / 4)]  # not there, not changed


def test_nobody_has_a_sample() -> None:
    models_KD = np.array([[1, 0], [1, 0]], np.float32)
    products = products_of(models_KD, np.zeros(2, np.float32))
    assert weigh(AngleMean(a=5.0), [0, 0], products, "ab")[0].tolist() == [0.5, 0.5]


def test_who_points_elsewhere_counts_less() -> None:
    models_KD = np.array([[1, 0.1], [1, -0.1], [1, 0], [-1, 0.5]], np.float32)
    products = products_of(models_KD, np.zeros(2, np.float32))
    weights_K, _ = weigh(AngleMean(a=5.0), [1, 1, 1, 1], products, "abcd")
    assert weights_K[3] < 0.01 and min(weights_K[:3]) > 0.3
