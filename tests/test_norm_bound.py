"""The bound of steps' lengths: before any rule, by its formula, and what it does to poisoned uploads."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidExperiment
from common.experiment.methods import RULES, NormBound
from common.experiment.reading import parse
from common.methods.aggregator import build
from common.methods.rule import Aggregated, Rule, Uploads
from common.model.layout import ModelLayout, Section
from deploy.simulation.lab import SimulatedLab
from tests.helpers.examples import examples, slow
from tests.helpers.rules import LEAST
from tests.test_aggregators import Report

LAYOUT: Final = ModelLayout.build(
    [("weight", (40, 1000), Section.PARAMETER), ("mean", (3,), Section.BUFFER), ("steps", (), Section.COUNTER)]
)
D: Final = LAYOUT.parameters
CHILDREN: Final = tuple("abcdefg")

Doubles = npt.NDArray[np.float64]


def rule_of(bound: NormBound, tree: dict[str, Any] | None = None) -> Rule:
    tree = tree or {"name": "fedavg", "weights": "uniform"}
    settings = RULES[tree["name"]](**tree)
    rule = build(
        settings, layout=LAYOUT, node="cloud", seed=1, measures=True, bound=bound,
        rows=lambda name, count: np.zeros((count, LAYOUT.row_bytes), np.uint8),
    )  # fmt: skip
    start = np.zeros(LAYOUT.row_bytes, np.uint8)
    LAYOUT.floats(start)[:] = 1.0
    rule.begin(start)
    return rule


def play(rule: Rule, lengths: list[float], *, r: int = 0) -> tuple[Doubles, Aggregated]:
    """Let the children move so far, in random directions; return the uploads' steps [K, D] and the outcome."""
    sent = {child: row for row, those in rule.dispatch(r, CHILDREN) for child in those}
    order = tuple(sent)
    rows_K = np.stack([sent[child] for child in order])
    floats_K = LAYOUT.floats(rows_K)
    steps_KD = np.random.default_rng(r).normal(size=(len(CHILDREN), D))
    steps_KD *= (np.array(lengths) / np.linalg.norm(steps_KD, axis=1))[:, None]
    steps_KD = steps_KD[[CHILDREN.index(child) for child in order]]
    floats_K[:, :D] += steps_KD.astype(np.float32)
    reports = tuple(Report(10, 0.5) for _ in order)
    return steps_KD, rule.aggregate(r, Uploads(order, rows_K, reports, lambda: None))


def moved(rule: Rule) -> Doubles:
    return LAYOUT.floats(rule.model)[:D].astype(np.float64) - 1.0


LENGTHS: Final = [1.0, 2.0, 3.0, 4.0, 5.0, 50.0, 800.0]  # the median is 4


def test_longer_steps_are_clipped_to_the_bound() -> None:
    rule = rule_of(NormBound(action="clip", factor=2.0))
    steps_KD, outcome = play(rule, LENGTHS)
    steps_KD[5] *= 8 / 50
    steps_KD[6] *= 8 / 800
    np.testing.assert_allclose(moved(rule), steps_KD.mean(axis=0), atol=2e-5)
    assert outcome.facts["clipped"] == ["f", "g"] and not outcome.left_out
    lengths = outcome.facts["step_lengths"]
    assert isinstance(lengths, dict) and lengths == pytest.approx(dict(zip(CHILDREN, LENGTHS, strict=True)), rel=1e-4)


def test_longer_steps_are_left_out_and_named() -> None:
    rule = rule_of(NormBound(action="refuse", factor=2.0))
    steps_KD, outcome = play(rule, LENGTHS)
    np.testing.assert_allclose(moved(rule), steps_KD[:5].mean(axis=0), atol=2e-5)
    assert outcome.left_out.keys() == {"f", "g"} and "200 times as long as the median" in outcome.left_out["g"]
    assert outcome.distances.keys() == set("abcde")


@pytest.mark.parametrize("action", ["clip", "refuse"])
@pytest.mark.parametrize("tree", LEAST.values(), ids=LEAST)
def test_a_bound_that_nobody_reaches_changes_no_bit_of_any_rule(tree: dict[str, Any], action: Any) -> None:
    bounded, plain = rule_of(NormBound(action=action, factor=1e6), tree), rule_of(NormBound(), tree)
    for r in range(3):
        for rule in (bounded, plain):
            play(rule, LENGTHS, r=r)
        assert np.array_equal(bounded.model, plain.model)


@pytest.mark.parametrize("action", ["clip", "refuse"])
@given(lengths=st.lists(st.floats(0, 1e6), min_size=7, max_size=7), factor=st.floats(1, 10))
@examples(30)
def test_half_of_the_uploads_stay_as_they_are(action: Any, lengths: list[float], factor: float) -> None:
    _, outcome = play(rule_of(NormBound(action=action, factor=factor)), lengths)
    named = outcome.facts["clipped" if action == "clip" else "left_out"]
    assert isinstance(named, list) and len(named) <= 3
    assert np.isfinite(outcome.loss)


@pytest.mark.parametrize("action", ["clip", "refuse"])
def test_poisoned_uploads_move_the_model_by_the_bound_at_most(action: Any) -> None:
    honest = [1.0] * 5
    rule, plain = rule_of(NormBound(action=action, factor=2.0)), rule_of(NormBound())
    for each in (rule, plain):
        play(each, [*honest, 1000.0, 1000.0])
    assert np.linalg.norm(moved(rule)) <= (5 * 1.0 + 2 * 2.0) / 7 < 100 < np.linalg.norm(moved(plain))


def changes_of(rule: Rule, lengths: list[float]) -> Aggregated:
    """Let all children of SCAFFOLD move by 1, and return changes of their control variates, [length, 0, 0, ...]."""
    ((row, children),) = rule.dispatch(0, CHILDREN)
    rows_K = np.stack([row] * len(children))
    LAYOUT.floats(rows_K)[:, 0] += 1.0
    changes_K = rows_K[:, LAYOUT.row_bytes :].view(np.float32)
    changes_K[:] = 0
    changes_K[:, 0] = lengths
    reports = tuple(Report(10, 0.5) for _ in children)
    return rule.aggregate(0, Uploads(tuple(children), rows_K, reports, lambda: None))


def test_vectors_behind_the_model_are_bounded_as_well(tmp_path: Path) -> None:
    """The model of a poisoned child is as the others', its control variate's change is not."""
    tree: dict[str, Any] = {"name": "scaffold"}
    clipped = rule_of(NormBound(action="clip", factor=2.0), tree)
    outcome = changes_of(clipped, LENGTHS)
    assert outcome.facts["control_change_lengths"] == dict(zip(CHILDREN, LENGTHS, strict=True))
    assert outcome.facts["clipped"] == ["f", "g"] and outcome.facts["step_lengths"]["g"] == 1.0
    ((row, _),) = clipped.dispatch(1, CHILDREN)
    control = row[LAYOUT.row_bytes :].view(np.float32)
    assert (
        control[0] == pytest.approx(1 + 2 + 3 + 4 + 5 + 8 + 8) and not control[1:].any()
    )  # over one child: see rule_of
    refused = changes_of(rule_of(NormBound(action="refuse", factor=2.0), tree), LENGTHS)
    assert refused.left_out["g"] == "its control_change is 200 times as long as the median"
    assert list(refused.left_out) == ["g", "f"]


def test_at_least_half_stay_however_many_vectors_are_long() -> None:
    """Three children are too long in their steps, and three others in the vectors behind: the farthest three go."""
    rule = rule_of(NormBound(action="refuse", factor=1.0), {"name": "scaffold"})
    ((row, children),) = rule.dispatch(0, CHILDREN)
    rows_K = np.stack([row] * len(children))
    LAYOUT.floats(rows_K)[:, 0] += np.array([1, 1, 1, 1, 10, 20, 30])
    rows_K[:, LAYOUT.row_bytes :].view(np.float32)[:, :1] = np.array([[40], [15], [5], [1], [1], [1], [1]])
    reports = tuple(Report(10, 0.5) for _ in children)
    outcome = rule.aggregate(0, Uploads(tuple(children), rows_K, reports, lambda: None))
    assert set(outcome.left_out) == {"a", "f", "g"}
    assert outcome.left_out["a"].startswith("its control_change") and outcome.left_out["f"].startswith("its step")


def test_its_rule_keeps_its_state(tmp_path: Path) -> None:
    one, other = (rule_of(NormBound(action="clip"), {"name": "fedavgm"}) for _ in range(2))
    play(one, LENGTHS)
    facts = one.save(tmp_path)
    other.begin(one.model.copy())
    other.restore(tmp_path, facts)
    for each in (one, other):
        play(each, LENGTHS, r=1)
    assert np.array_equal(one.model, other.model)


def test_a_factor_below_one_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"norm_bound.factor = 0.5: too small. Write 1 or more"):
        parse({"cloud": {"norm_bound": {"action": "clip", "factor": 0.5}}})


@pytest.mark.parametrize(
    ("action", "rule"),
    slow(
        product(("clip", "refuse"), ("fedavg", "fedcross", "fedcda")), but=[("clip", "fedcross"), ("refuse", "fedcda")]
    ),
)
def test_a_lab_with_tempo_ends_well(action: str, rule: str) -> None:
    """At both tiers, also for K models and for cached uploads, and with distances of those that are left out."""
    bound = {"action": action, "factor": 1.0}
    tree = {
        "rounds": 3,
        "topology": {"institutions": 3, "devices": 9},
        "links": {"check": "off"},
        "cloud": {"aggregation": {"name": rule}, "norm_bound": bound, "epoch_control": {"name": "tempo"}},
        "institution": {"aggregation": {"name": rule}, "norm_bound": bound},
    }
    outcome = SimulatedLab(parse(tree), seed=1, model_bytes=10_000).run()
    assert outcome.ok, outcome.result
