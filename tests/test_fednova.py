"""FedNova: against a plain twin, at equal steps, and where FedAvg is pulled aside by children of many steps."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from common.aggregation.aggregator import Aggregated, Uploads, build
from common.aggregation.fednova import norms
from common.experiment.reading import parse
from common.experiment.training import TrainingSettings
from common.model.layout import ModelLayout, Section
from deploy.simulation.lab import SimulatedLab
from tests.test_aggregators import Report

LAYOUT: Final = ModelLayout.build(
    [("weight", (40, 1000), Section.PARAMETER), ("mean", (3,), Section.BUFFER), ("steps", (), Section.COUNTER)]
)
D: Final = LAYOUT.parameters
CHILDREN: Final = ("a", "b", "c")
SAMPLES: Final = (100, 50, 50)

Doubles = npt.NDArray[np.float64]


def play(
    tree: dict[str, Any], steps: tuple[int, ...], moves_KD: Doubles, *, momentum: float = 0.0
) -> tuple[Doubles, Aggregated]:
    """Return the next model from uploads that moved so far from a model of ones."""
    settings = parse({"cloud": {"aggregation": tree}}).cloud.aggregation
    rule = build(
        settings, layout=LAYOUT, node="cloud", seed=1, measures=True, training=TrainingSettings(momentum=momentum),
        rows=lambda name, count: np.empty(0, np.uint8),
    )  # fmt: skip
    start = LAYOUT.empty()
    LAYOUT.floats(start)[:] = 1.0
    LAYOUT.integers(start)[:] = 0
    rule.begin(start)
    rows_K = np.stack([start] * len(steps))
    LAYOUT.floats(rows_K)[:] += moves_KD
    reports = tuple(Report(SAMPLES[k], 0.5, count) for k, count in enumerate(steps))
    outcome = rule.aggregate(0, Uploads(CHILDREN[: len(steps)], rows_K, reports, lambda: None))
    return LAYOUT.floats(rule.model).astype(np.float64), outcome


def moves(seed: int = 1) -> Doubles:
    return np.random.default_rng(seed).normal(scale=0.1, size=(3, D + 3)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_steps_are_divided_by_their_norms(momentum: float) -> None:
    steps, shares = (4, 10, 25), (0.5, 0.25, 0.25)
    found, outcome = play({"name": "fednova"}, steps, moves(), momentum=momentum)
    # The L1 norm of the weights that plain momentum gives the gradients of tau steps.
    a = [sum(sum(momentum**j for j in range(i)) for i in range(1, tau + 1)) for tau in steps]
    effective = sum(p * each for p, each in zip(shares, a, strict=True))
    wanted = 1 + effective * sum(p * move / each for p, move, each in zip(shares, moves(), a, strict=True))
    np.testing.assert_allclose(found[:D], wanted[:D], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[D:], 1 + np.array(shares) @ moves()[:, D:], rtol=1e-6)  # buffers by samples
    assert outcome.facts["effective_steps"] == pytest.approx(effective, rel=1e-12)
    for k, child in enumerate(CHILDREN):  # Tempo's distances are those to the next model
        far = np.linalg.norm(1 + moves()[k, :D] - found[:D])
        assert outcome.distances[child] == pytest.approx(float(far), rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_equal_steps_are_fedavg(momentum: float, weights: str) -> None:
    mine, _ = play({"name": "fednova", "weights": weights}, (7, 7, 7), moves(), momentum=momentum)
    plain, _ = play({"name": "fedavg", "weights": weights}, (7, 7, 7), moves())
    np.testing.assert_allclose(mine, plain, rtol=1e-6)


def test_a_child_of_many_steps_does_not_pull_the_model_its_way() -> None:
    """Two children with optima at -1 and 1 that step towards them; one takes ten times as many steps."""

    def ends_at(name: str) -> float:
        at = 0.0
        for _ in range(300):
            ends = [at + (target - at) * (1 - 0.99**count) for target, count in ((-1.0, 2), (1.0, 20))]
            moved = np.array([[end - at] * (D + 3) for end in ends])
            found, _ = play({"name": name, "weights": "uniform"}, (2, 20), moved)
            at += float(found[0]) - 1.0
        return at

    assert abs(ends_at("fednova")) < 0.06 and ends_at("fedavg") > 0.7


def test_norms_of_one_step_and_of_none() -> None:
    assert norms(np.array([0.0, 1.0]), 0.9).tolist() == pytest.approx([1.0, 1.0])


def test_the_momentum_is_that_of_devices_alone() -> None:
    experiment = parse({"topology": {"institutions": 2, "devices": 4}, "training": {"momentum": 0.5}})
    assert [experiment.training_below(node) for node in ("cloud", "institution-0")] == [None, experiment.training]


def test_a_lab_counts_steps_at_both_tiers() -> None:
    tree = {
        "rounds": 2,
        "topology": {"institutions": 2, "devices": 4},
        "links": {"check": "off"},
        "cloud": {"aggregation": {"name": "fednova"}},
        "institution": {"rounds": 2, "aggregation": {"name": "fednova"}},
    }
    outcome = SimulatedLab(parse(tree), seed=1, model_bytes=10_000).run()
    assert outcome.ok, outcome.result
