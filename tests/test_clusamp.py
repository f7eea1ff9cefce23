"""CluSamp: the distributions, the distances, the weights of the draws, and state that is kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import acos, sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.clusamp import (
    Merges,
    clusters_below,
    distances,
    distributions,
    draw,
    linked,
)
from fedstrata.common.methods.rule import Rule
from fedstrata.common.methods.selection import ClientSelection
from tests.helpers import rules
from tests.helpers.examples import examples
from tests.helpers.rules import LAYOUT, Report

NAMES: Final = [f"device-{i}" for i in range(8)]
SAMPLES: Final = [10, 20, 30, 40, 50, 60, 70, 200]  # the last one is drawn once or twice


def random_merges(count: int, chance: np.random.Generator) -> Merges:
    nodes, merges = list(range(count)), []
    while len(nodes) > 1:
        a, b = (nodes.pop(int(chance.integers(len(nodes)))) for _ in range(2))
        nodes.append(count + len(merges))
        merges.append((a, b))
    return merges


@given(
    samples=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    share=st.floats(0.01, 1.0),
    seed=st.none() | st.integers(0, 1000),
)
@examples(150)
def test_each_distribution_sums_to_1_and_the_expected_weight_of_a_child_is_its_share(
    samples: list[int], share: float, seed: int | None
) -> None:
    m, whole = max(1, int(share * len(samples))), sum(samples)
    merges = [] if seed is None else random_merges(len(samples), np.random.default_rng(seed))
    found = distributions(samples, m, merges)
    assert len(found) == m and all(sum(masses.values()) == whole for masses in found)
    assert all(mass > 0 for masses in found for mass in masses.values())
    for k, n in enumerate(samples):
        assert sum(Fraction(masses.get(k, 0), whole) for masses in found) == Fraction(m * n, whole)


def test_equal_children_that_all_take_part_are_drawn_once_each() -> None:
    assert distributions([5] * 4, 4, []) == [{k: 20} for k in range(4)]
    assert draw(distributions([5] * 4, 4, []), np.random.default_rng(0)) == Counter(range(4))


def test_a_heavy_child_has_distributions_of_its_own() -> None:
    found = distributions([70, 10, 10, 10], 4, [])
    assert found[:2] == [{0: 100}] * 2 and sum(masses.get(0, 0) for masses in found) == 280


def test_the_clusters_are_the_largest_below_the_bound() -> None:
    merges = [(0, 1), (2, 3), (5, 6), (4, 7)]  # of 5: (0 1), (2 3), all four, all
    assert clusters_below(merges, [1, 1, 1, 1, 1], 2) == [[4], [0, 1], [2, 3]]
    assert clusters_below(merges, [1, 1, 1, 1, 1], 4) == [[4], [0, 1, 2, 3]]
    assert clusters_below(merges, [1, 1, 1, 1, 1], 1) == [[0], [1], [2], [3], [4]]


def test_each_cluster_that_fills_a_distribution_is_drawn_once() -> None:
    found = distributions([1] * 6, 2, [(0, 2), (1, 3), (6, 4), (7, 5), (8, 9)])
    assert [sorted(masses) for masses in found] == [[0, 2, 4], [1, 3, 5]]
    chance = np.random.default_rng(1)
    drawn = [draw(found, chance) for _ in range(600)]
    assert all(sum(one[k] for k in (0, 2, 4)) == 1 and one.total() == 2 for one in drawn)
    counts = sum(drawn, Counter())
    assert all(counts[k] == pytest.approx(200, abs=50) for k in range(6))


def vectors(count: int) -> Any:
    steps = np.random.default_rng(5).normal(size=(count, 7))
    steps[2] = 0
    return steps


@pytest.mark.parametrize("distance", ["cosine", "l1", "l2"])
def test_distances_are_those_of_a_plain_twin(distance: str) -> None:
    steps = vectors(5)
    pairs = (
        steps @ steps.T if distance != "l1" else np.abs(steps[:, None] - steps[None]).sum(axis=2)
    )
    found = distances(distance, pairs)
    for i, a in enumerate(steps.tolist()):
        for j, b in enumerate(steps.tolist()):
            if distance == "l1":
                wanted = sum(abs(x - y) for x, y in zip(a, b, strict=True))
            elif distance == "l2":
                wanted = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
            else:
                squares = sum(x * x for x in a) * sum(y * y for y in b)
                product = sum(x * y for x, y in zip(a, b, strict=True))
                wanted = acos(max(-1.0, min(1.0, product / sqrt(squares)))) if squares else 0.0
            assert found[i, j] == pytest.approx(wanted, abs=1e-6)


def test_children_of_like_steps_are_linked_first() -> None:
    base = np.eye(4)[[0, 1, 0, 1, 2, 2]] + 0.01 * np.random.default_rng(2).normal(size=(6, 4))
    merges = linked("cosine", base @ base.T)
    assert {frozenset(merge) for merge in merges[:3]} == {
        frozenset(p) for p in ((0, 2), (1, 3), (4, 5))
    }


def rule_of(distance: str = "cosine") -> Rule:
    def rows(name: str, count: int) -> Any:
        return np.full((count, LAYOUT.row_bytes + 13), 0xFF, np.uint8)[:, : LAYOUT.row_bytes]

    return rules.rule_of(
        {"name": "clusamp", "distance": distance}, seed=3, rows=rows, children=len(NAMES)
    )


def selection_of(rule: Rule, share: float = 0.5) -> ClientSelection:
    return ClientSelection(
        Tier(name="wan", participation=share), seed=3, node="cloud", choose=rule.choose
    )


def target_of(child: str) -> Any:
    """Return the direction in which a child steps: those of even and of odd number go two ways."""
    return np.random.default_rng(NAMES.index(child) % 2).normal(size=LAYOUT.columns)


def play(rule: Rule, selection: ClientSelection, r: int, *, missing: Sequence[str] = ()) -> Any:
    samples = {child: SAMPLES[k] for k, child in enumerate(NAMES)}
    chosen = selection.select(NAMES, r, samples=samples)
    ((row, children),) = rule.dispatch(r, chosen)
    rows_K = np.full((len(children), LAYOUT.row_bytes), 0xFF, np.uint8)
    for k, child in enumerate(children):
        if child not in missing:
            noise = np.random.default_rng([r, NAMES.index(child)]).normal(size=LAYOUT.columns)
            LAYOUT.floats(rows_K[k])[:] = LAYOUT.floats(row) + (
                target_of(child) + 0.1 * noise
            ).astype(np.float32)
            LAYOUT.integers(rows_K[k])[:] = 0
    reports = [None if child in missing else Report(samples[child], 1.0) for child in children]
    before = [LAYOUT.floats(one).astype(np.float64) for one in rows_K]
    outcome = rules.aggregate(rule, r, children, rows_K, reports)
    return chosen, before, outcome


@pytest.mark.parametrize("distance", ["cosine", "l1", "l2"])
def test_the_last_steps_of_those_that_answered_are_kept(distance: str, tmp_path: Path) -> None:
    rule = rule_of(distance)
    selection = selection_of(rule)
    last = np.zeros((len(NAMES), LAYOUT.parameters))
    received = np.zeros(LAYOUT.columns)
    for r in range(8):
        missing = NAMES[r : r + 2]
        chosen, uploads, outcome = play(rule, selection, r, missing=missing)
        draws = outcome.facts["draws"]
        assert list(draws) == chosen == [name for name in NAMES if name in chosen]
        assert sum(draws.values()) == 4
        for child, upload in zip(chosen, uploads, strict=True):
            if child not in missing:
                last[NAMES.index(child)] = (upload - received)[: LAYOUT.parameters]
        received = LAYOUT.floats(rule.model).astype(np.float64)
    rule.save(tmp_path)
    steps = np.fromfile(tmp_path / "steps", np.float32).reshape(last.shape).astype(np.float64)
    np.testing.assert_allclose(steps, last, rtol=0, atol=1e-5)
    pairs = steps @ steps.T
    if distance == "l1":
        pairs = np.array([np.abs(steps - step).sum(axis=1) for step in steps])
    np.testing.assert_allclose(
        np.fromfile(tmp_path / "pairs").reshape(pairs.shape), pairs, rtol=1e-6, atol=1e-6
    )


def test_a_restored_node_draws_as_the_other(tmp_path: Path) -> None:
    whole, killed, resumed = rule_of(), rule_of(), rule_of()
    selections = {id(rule): selection_of(rule) for rule in (whole, killed, resumed)}
    wanted = [play(whole, selections[id(whole)], r)[0] for r in range(10)]
    assert [play(killed, selections[id(killed)], r)[0] for r in range(5)] == wanted[:5]
    facts = json.loads(json.dumps(killed.save(tmp_path)))
    resumed.begin(killed.model.copy())
    resumed.restore(tmp_path, facts)
    assert [play(resumed, selections[id(resumed)], r)[0] for r in range(5, 10)] == wanted[5:]
    assert resumed.model.tobytes() == whole.model.tobytes()
