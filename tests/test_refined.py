"""FedDF, FedBE and FedLAW at a node: what the rule does with its refiner, the null settings, and whole labs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from common.experiment.reading import parse
from common.learning.refiner import NodeRefiner
from common.learning.splits import split_of
from common.methods.aggregator import build
from common.methods.rule import Aggregated, Rule, Uploads
from common.model.layout import ModelLayout, Section
from common.model.refinement import RoundModels
from tests.helpers.commands import tensors
from tests.helpers.direct import run_direct
from tests.helpers.examples import slow
from tests.test_aggregators import Report

NAMES: Final = ("feddf", "fedbe", "fedlaw")
NULL: Final[Mapping[str, dict[str, Any]]] = {"feddf": {"steps": 0}, "fedbe": {"epochs": 0}, "fedlaw": {"epochs": 0}}
LAYOUT: Final = ModelLayout.build(
    [("weight", (4, 5), Section.PARAMETER), ("mean", (3,), Section.BUFFER), ("steps", (), Section.COUNTER)]
)
CHILDREN: Final = ("a", "b", "c", "d")
SAMPLES: Final = (10, 20, 30, 40)


# The node


class Stand:
    """Refiner that adds one to the parameters of the mean, and returns given facts."""

    moves = 0

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self.asked: list[RoundModels] = []

    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        self.asked.append(models)
        LAYOUT.floats(models.mean)[: LAYOUT.parameters] += 1
        return self.facts

    def cancel(self) -> None:
        raise AssertionError

    def allow(self) -> None:
        raise AssertionError


def rule_of(tree: dict[str, Any], refiner: Stand | None = None) -> Rule:
    settings = parse({"cloud": {"aggregation": tree}, "data": {"node_samples": 5}}).tiers[0].aggregation
    return build(
        settings, layout=LAYOUT, node="cloud", seed=1, measures=True, refiner=refiner,
        rows=lambda name, count: np.empty(0, np.uint8),
    )  # fmt: skip


def uploaded(count: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    rows_K = np.zeros((count, LAYOUT.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:] = np.random.default_rng(seed).normal(size=(count, LAYOUT.columns))
    for k, row in enumerate(rows_K):
        LAYOUT.integers(row)[:] = k
    return rows_K


def play(rule: Rule, missing: tuple[int, ...] = (1,)) -> tuple[npt.NDArray[np.float32], Aggregated]:
    """Return the uploads' floats and the outcome of a round in which some children sent none."""
    start = np.zeros(LAYOUT.row_bytes, np.uint8)
    rule.begin(start)
    rule.dispatch(3, CHILDREN)
    rows_K = uploaded(len(CHILDREN))
    reports = tuple(None if k in missing else Report(SAMPLES[k], 0.1 * k) for k in range(len(CHILDREN)))
    outcome = rule.aggregate(3, Uploads(CHILDREN, rows_K, reports, lambda: None))
    return LAYOUT.floats(rows_K), outcome


@pytest.mark.parametrize("weights", ["data", "uniform"])
@pytest.mark.parametrize("name", NAMES)
def test_without_a_step_it_is_fedavg_bit_for_bit_and_needs_no_refiner(name: str, weights: str) -> None:
    null, plain = (rule_of(tree | {"weights": weights}) for tree in ({"name": name, **NULL[name]}, {"name": "fedavg"}))
    _, found = play(null)
    _, wanted = play(plain)
    assert np.array_equal(null.model, plain.model) and found == wanted
    assert parse({"cloud": {"aggregation": {"name": name, **NULL[name]}}}).data.node_samples == 0


@pytest.mark.parametrize("name", ["feddf", "fedbe"])
def test_the_refiner_moves_the_parameters_of_the_mean(name: str) -> None:
    refiner, plain = Stand(steps=7), rule_of({"name": "fedavg"})
    rule = rule_of({"name": name}, refiner)
    floats_K, outcome = play(rule)
    play(plain)
    D = LAYOUT.parameters
    assert np.array_equal(LAYOUT.floats(rule.model)[:D], LAYOUT.floats(plain.model)[:D] + np.float32(1))
    assert np.array_equal(rule.model[4 * D :], plain.model[4 * D :])  # buffers and counters
    (asked,) = refiner.asked
    assert asked.r == 3 and not asked.received.any()
    assert [LAYOUT.integers(row)[0] for row in asked.uploads] == [0, 2, 3]
    assert asked.weights_K == pytest.approx([10 / 80, 30 / 80, 40 / 80])
    assert outcome.facts["steps"] == 7
    for k, child in ((0, "a"), (2, "c"), (3, "d")):  # Tempo's distances are those to the next model
        far = np.linalg.norm(floats_K[k, :D].astype(np.float64) - LAYOUT.floats(rule.model)[:D])
        assert outcome.distances[child] == pytest.approx(float(far), rel=1e-5)
    ((dispatched, _),) = rule.dispatch(4, CHILDREN)
    assert np.array_equal(dispatched, rule.model)


def test_the_model_that_the_children_received_is_the_refined_one() -> None:
    refiner = Stand()
    rule = rule_of({"name": "fedbe"}, refiner)
    play(rule)
    after = rule.model.copy()
    rule.dispatch(4, CHILDREN)
    reports = tuple(Report(1, 0.5) for _ in CHILDREN)
    rule.aggregate(4, Uploads(CHILDREN, uploaded(4, seed=2), reports, lambda: None))
    assert np.array_equal(refiner.asked[1].received, after)


def test_fedlaw_mixes_parameters_by_gamma_and_lambda_and_buffers_by_lambda() -> None:
    lambdas = [0.5, 0.0, 0.5]
    rule = rule_of({"name": "fedlaw"}, Stand(gamma=1.5, lambdas=lambdas))
    floats_K, outcome = play(rule)
    D, mixed = LAYOUT.parameters, 0.5 * floats_K[0].astype(np.float64) + 0.5 * floats_K[3]
    np.testing.assert_allclose(LAYOUT.floats(rule.model)[:D], 1.5 * mixed[:D], rtol=1e-6)
    np.testing.assert_allclose(LAYOUT.floats(rule.model)[D:], mixed[D:], rtol=1e-6)
    assert LAYOUT.integers(rule.model)[0] == 0
    assert outcome.facts["lambdas"] == dict(zip("acd", lambdas, strict=True)) and "weights" not in outcome.facts
    assert outcome.loss == pytest.approx(0.5 * 0.0 + 0.5 * 0.3)


def test_fedadam_steps_towards_what_fedlaw_has_learned() -> None:
    """Four rounds against FedAdam written out, from the dispatched model by gamma times the mean by lambda."""
    lambdas, gamma, D = [0.2, 0.3, 0.4, 0.1], 1.2, LAYOUT.parameters
    step = {"name": "fedadam", "learning_rate": 0.1}
    rule = rule_of({"name": "fedlaw", "step": step}, Stand(gamma=gamma, lambdas=lambdas))
    rule.begin(np.zeros(LAYOUT.row_bytes, np.uint8))
    z, m, v = np.zeros(D), np.zeros(D), np.full(D, 1e-6)
    for r in range(4):
        ((sent, _),) = rule.dispatch(r, CHILDREN)
        np.testing.assert_allclose(LAYOUT.floats(sent)[:D], z, rtol=1e-5, atol=1e-6)
        rows_K = uploaded(len(CHILDREN), seed=r)
        floats_K = LAYOUT.floats(rows_K).astype(np.float64)
        outcome = rule.aggregate(r, Uploads(CHILDREN, rows_K, tuple(Report(9, 0.5) for _ in CHILDREN), lambda: None))
        delta = gamma * np.array(lambdas) @ floats_K[:, :D] - z
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        z = z + 0.1 * m / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(LAYOUT.floats(rule.model)[:D], z, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(LAYOUT.floats(rule.model)[D:], np.array(lambdas) @ floats_K[:, D:], rtol=1e-5)
        far = {child: float(np.linalg.norm(floats_K[k, :D] - z)) for k, child in enumerate(CHILDREN)}
        assert outcome.distances == pytest.approx(far, rel=1e-5)
        assert outcome.facts["lambdas"] == dict(zip(CHILDREN, lambdas, strict=True))


def test_a_rule_without_its_refiner_cannot_be_built() -> None:
    with pytest.raises(RuntimeError, match="feddf needs a refiner"):
        rule_of({"name": "feddf"})


# Labs


def lab(name: str, tier: str = "institution", **keys: Any) -> dict[str, Any]:
    return {
        "rounds": 2, "topology": {"institutions": 2, "devices": 4}, "model": {"name": "mlp_digits"},
        "data": {"node_samples": 40, "partition": "dirichlet", "concentration": 0.1},
        "training": {"batch_size": 50, "learning_rate": 0.05}, tier: {"aggregation": {"name": name, **keys}},
    }  # fmt: skip


def plans(folder: Path, node: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "plan" and event["node"] == node]


@pytest.mark.parametrize(
    ("name", "tier"),
    slow([("feddf", "cloud"), ("fedbe", "institution"), ("fedlaw", "institution")], but=[("fedbe", "institution")]),
)
def test_a_labs_plans_report_what_the_refinement_did(name: str, tier: str, tmp_path: Path) -> None:
    tree = lab(name, tier, **({"steps": 60} if name == "feddf" else {}))
    folder = run_direct(tmp_path / "one", tree)
    found = plans(folder, "cloud" if tier == "cloud" else "institution-1")
    assert len(found) == 2
    for plan in found:
        kind = "loss" if name == "fedlaw" else "divergence"
        assert 0 < plan[f"{kind}_after"] < plan[f"{kind}_before"]
        assert plan["steps"] > 0 and plan["seconds"] >= 0
        if name == "fedlaw":
            assert sum(plan["lambdas"].values()) == pytest.approx(1) and plan["gamma"] > 0
    assert tensors(run_direct(tmp_path / "two", tree)) == tensors(folder)
    null = run_direct(tmp_path / "null", lab(name, tier, **NULL[name]))
    assert tensors(null) == tensors(run_direct(tmp_path / "plain", lab("fedavg", tier))) != tensors(folder)


@pytest.mark.parametrize(("name", "batches"), [("feddf", 60), ("fedbe", 0), ("fedlaw", 0)])
def test_each_batch_of_a_refinement_is_progress(name: str, batches: int) -> None:
    experiment = parse(lab(name, **({"steps": batches} if batches else {})))
    counts: list[int] = []
    refiner = NodeRefiner(
        experiment, "institution-0", partition=split_of(experiment).digest, watch=lambda: counts.append(refiner.moves)
    )
    assert refiner.layout is not None
    rows = [refiner.layout.empty() for _ in range(4)]
    for seed, row in enumerate(rows):
        refiner.layout.floats(row)[:] = np.random.default_rng(seed).normal(0, 0.1, refiner.layout.columns)
    facts = refiner.refine(RoundModels(0, refiner.layout, rows[0], rows[1], rows[2:], np.full(2, 0.5)))
    assert counts == list(range(1, refiner.moves + 1)) and len(counts) > facts["steps"] > 0


def test_another_split_than_the_clouds_is_refused() -> None:
    experiment = parse(lab("feddf"))
    with pytest.raises(Exception, match=r"institution-0 splits the data differently than the cloud: digest"):
        NodeRefiner(experiment, "institution-0", partition="other")
    assert NodeRefiner(experiment, "institution-0", partition=split_of(experiment).digest).moves == 0
