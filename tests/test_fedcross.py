"""FedCross against its text: who is whose partner, with which weight, and what mixing keeps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedstrata.common.methods import fedcross
from fedstrata.common.methods.fedcross import (
    FedCross,
    by_similarity,
    in_order,
    mixing_matrix,
    pairwise,
    stage,
)
from fedstrata.common.methods.statistics import Gram, gram_by_entry
from fedstrata.common.model.layout import ModelLayout, Section
from tests.helpers.rules import mixing_round

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

COUNTS = st.integers(2, 12)
ROUNDS = st.integers(0, 10_000)
ALPHAS = st.floats(0.5, 1.0)


def models(count: int, columns: int = 20, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(count, columns)).astype(np.float32)


def propelled(r: int, count: int, **settings: Any) -> Doubles:
    found = stage(FedCross(propeller_rounds=r + 1, **settings), r, count)
    assert not found.similar
    return mixing_matrix(
        found, [in_order(r, count, place) for place in range(found.partners)], count
    )


# Partners


@given(count=COUNTS, r=ROUNDS)
def test_in_order_is_the_papers_formula(count: int, r: int) -> None:
    partners = in_order(r, count)
    assert partners == [(j + (r % (count - 1)) + 1) % count for j in range(count)]
    assert sorted(partners) == list(range(count)) and all(j != k for j, k in enumerate(partners))


def scan(similarity: list[list[float]], lowest: bool) -> list[int]:
    """Return what the authors' loop finds."""
    found = []
    for j in range(len(similarity)):
        best = (j + 1) % len(similarity)
        for k in range(len(similarity)):
            if k == j:
                continue
            better = (
                similarity[j][k] < similarity[j][best]
                if lowest
                else similarity[j][k] > similarity[j][best]
            )
            if better:
                best = k
        found.append(best)
    return found


@given(
    values=st.integers(2, 7).flatmap(
        lambda k: hnp.arrays(np.float64, (k, k), elements=st.integers(-2, 2).map(float))
    ),
    lowest=st.booleans(),
)
def test_similarity_is_scanned_from_the_next_one(values: Doubles, lowest: bool) -> None:
    assert by_similarity(values, lowest=lowest) == scan(values.tolist(), lowest)


def test_nobody_is_its_own_partner() -> None:
    """Also where all others point the other way: the authors' loop would start from the model
    itself.
    """
    similarity_KK = np.full((3, 3), -0.5) + 1.5 * np.eye(3)
    assert (
        by_similarity(similarity_KK, lowest=False)
        == by_similarity(similarity_KK, lowest=True)
        == [1, 2, 0]
    )


def test_the_two_similarities_differ_where_norms_do() -> None:
    models_KF = np.array([[1, 0], [1, 0.1], [20, 18]], np.float32)
    products = Gram.of(list(models_KF), models_KF[0])
    assert by_similarity(products.cosines_KK(), lowest=True)[0] == 2
    assert by_similarity(products.ratios_KK(), lowest=True)[0] == 1


# The similarity of the authors' code

ENTRIES = [
    ("conv.weight", (3, 2), Section.PARAMETER),
    ("bn.weight", (3,), Section.PARAMETER),
    ("bn.running_mean", (3,), Section.BUFFER),
    ("bn.num_batches_tracked", (), Section.COUNTER),
    ("fc.weight", (2, 3), Section.PARAMETER),
    ("fc.bias", (2,), Section.PARAMETER),
]


def cosine(one: list[float], other: list[float]) -> float:
    norms = math.sqrt(sum(x * x for x in one)) * math.sqrt(sum(x * x for x in other))
    return sum(x * y for x, y in zip(one, other, strict=True)) / norms if norms else 0.0


def pairwise_twin(one: list[list[float]], other: list[list[float]], normalise: bool) -> float:
    """Go through the tensors with a buffer of two, as the authors' loop does, and count the last
    buffer once more.
    """
    total, held_one, held_other = 0.0, [], []
    pairs = 0
    for i, (x, y) in enumerate(zip(one, other, strict=True)):
        if i % 2 == 0:
            held_one, held_other = list(x), list(y)
        else:
            held_one, held_other = held_one + list(x), held_other + list(y)
            total += cosine(held_one, held_other)
            pairs += 1
    total += cosine(held_one, held_other)
    count = len(one)
    return total / (math.ceil(count / 2) if count % 2 else count / 2 + 1) if normalise else total


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("entries", range(1, len(ENTRIES) + 1))
def test_pairwise_is_the_authors_loop(entries: int, normalise: bool) -> None:
    layout = ModelLayout.build(ENTRIES[:entries])
    rows_K = np.zeros((4, layout.row_bytes), np.uint8)
    layout.floats(rows_K)[:] = models(4, layout.columns, seed=entries)
    for k, row in enumerate(rows_K):
        layout.integers(row)[:] = 100 + k
    states = [
        [layout.views(row)[name].ravel().tolist() for name, _, _ in ENTRIES[:entries]]
        for row in rows_K
    ]
    expected = [[pairwise_twin(one, other, normalise) for other in states] for one in states]
    found = pairwise(gram_by_entry(rows_K, layout), normalise=normalise)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_settings_name_the_similarity() -> None:
    models_KF = models(4)
    products = Gram.of(list(models_KF), models_KF[0])
    layout = ModelLayout.build([("w", (20,), Section.PARAMETER)])

    def found(**settings: Any) -> Doubles:
        return fedcross.similarity(
            FedCross(**settings), mixing_round(models_KF.view(np.uint8), layout)
        )

    assert np.array_equal(found(similarity="cosine"), products.cosines_KK())
    assert np.array_equal(found(similarity="sum_norm"), products.ratios_KK())
    one = found(similarity="pairwise", normalise=True)
    # one entry: counted once, divided by one
    np.testing.assert_allclose(one, products.cosines_KK(), rtol=1e-12)


def test_distances_are_similarities_too() -> None:
    """FedCross, arXiv: "Eucledian Distance, Manhattan Distance, and Cosine Similarity are all
    feasible metrics".
    """
    # a buffer at the end
    base = np.array([[0, 0, 0, 7], [3, 4, 0, 8], [0, 0, 5.5, 9], [1, 1, 1, 6]], np.float32)
    layout = ModelLayout.build(
        [("w", (3,), Section.PARAMETER), ("running_mean", (1,), Section.BUFFER)]
    )
    parameters = [row[:3] for row in base]
    for name, norm in (("euclidean", 2), ("manhattan", 1)):
        settings = FedCross.model_validate({"similarity": name})
        found = fedcross.similarity(settings, mixing_round(base.view(np.uint8), layout))
        expected = [
            [-np.linalg.norm((one - other).astype(np.float64), norm) for other in parameters]
            for one in parameters
        ]
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        # from the origin, (3, 4, 0) is 5 or 7 away, (0, 0, 5.5) 5.5 or 5.5: the farthest differs
        assert (
            by_similarity(found, lowest=True)[0] == {2: 2, 1: 1}[norm]
            and by_similarity(found, lowest=False)[0] == 3
        )


# Stages


def test_the_papers_three_presets() -> None:
    def kinds(**settings: int) -> dict[str, range]:
        names = [stage(FedCross(**settings), r, 10).name for r in range(250)]
        return {
            name: range(names.index(name), names.index(name) + names.count(name)) for name in names
        }

    assert kinds(propeller_rounds=100) == {"propellers": range(100), "plain": range(100, 250)}
    assert kinds(dynamic_alpha_rounds=100) == {
        "dynamic alpha": range(100),
        "plain": range(100, 250),
    }
    both = kinds(propeller_rounds=50, dynamic_alpha_rounds=50)
    assert both == {
        "propellers": range(50),
        "dynamic alpha": range(50, 100),
        "plain": range(100, 250),
    }


@given(alpha=ALPHAS, start=st.integers(0, 50), length=st.integers(1, 50))
def test_dynamic_alpha_is_a_line_from_a_half(alpha: float, start: int, length: int) -> None:
    settings = FedCross(alpha=alpha, propeller_rounds=start, dynamic_alpha_rounds=length)
    found = [stage(settings, r, 5).alpha for r in range(start, start + length + 3)]
    expected = [
        0.5 + (alpha - 0.5) * i / (length - 1) if length > 1 else alpha for i in range(length)
    ]
    assert (
        found[:length] == pytest.approx(expected, abs=1e-15) and found[length - 1 :] == [alpha] * 4
    )
    assert length == 1 or found[0] == 0.5


@pytest.mark.parametrize(
    ("strategy", "similar"), [("in_order", False), ("lowest", True), ("highest", True)]
)
def test_the_strategy_holds_outside_of_the_propellers(strategy: str, similar: bool) -> None:
    settings = FedCross.model_validate(
        {"strategy": strategy, "propeller_rounds": 1, "dynamic_alpha_rounds": 2}
    )
    assert [stage(settings, r, 5).similar for r in range(5)] == [False, *[similar] * 4]


def test_two_propellers_of_four() -> None:
    third = 1 / 3
    expected = [
        [third, third, third, 0],
        [0, third, third, third],
        [third, 0, third, third],
        [third, third, 0, third],
    ]
    np.testing.assert_allclose(propelled(0, 4), expected, rtol=1e-15)
    np.testing.assert_allclose(
        propelled(0, 4, propeller_alpha=0.9)[1], [0, 0.9, 0.05, 0.05], rtol=1e-13
    )


@given(count=COUNTS, r=st.integers(0, 200), propellers=st.integers(1, 15))
def test_propellers_are_distinct_in_order_partners(count: int, r: int, propellers: int) -> None:
    used = min(propellers, count - 1)
    for j, weights_K in enumerate(propelled(r, count, propellers=propellers)):
        offsets = [((r + p) % (count - 1)) + 1 for p in range(used)]
        expected = np.zeros(count)
        expected[[j, *((j + offset) % count for offset in offsets)]] = 1 / (used + 1)
        np.testing.assert_allclose(weights_K, expected, rtol=1e-14)


def test_values_near_one_are_distinguished() -> None:
    """All models lie within 1e-4 of each other: in float32 every cosine would be 1."""
    base = np.random.default_rng(1).normal(size=50_000)
    offsets = (
        np.random.default_rng(2).normal(size=(4, 50_000))
        * np.array([1e-4, 2e-4, 3e-4, 4e-4])[:, None]
    )
    models_KF = (base + offsets).astype(np.float32)
    exact_KF = models_KF.astype(np.longdouble)
    norms = np.sqrt((exact_KF**2).sum(axis=1))
    expected = (exact_KF @ exact_KF.T) / np.outer(norms, norms)
    found = Gram.of(list(models_KF), models_KF[0]).cosines_KK()
    np.testing.assert_allclose(1 - found, (1 - expected).astype(np.float64), rtol=0, atol=1e-14)
    assert by_similarity(found, lowest=True) == scan(expected.tolist(), lowest=True)
