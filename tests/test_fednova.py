"""FedNova: against a plain twin, at equal steps, and where FedAvg is pulled aside by children of many steps."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.training import FedProx, TrainingSettings
from common.learning.optimizers import optimizer_of
from common.methods.aggregator import build
from common.methods.fednova import gradient_weights
from common.methods.rule import Aggregated, Uploads
from common.model.layout import ModelLayout, Section
from deploy.simulation.lab import SimulatedLab
from device.training.objectives.objective import Minibatch
from device.training.objectives.table import objective_of
from device.training.sgd import step
from tests.test_aggregators import Report

LAYOUT: Final = ModelLayout.build(
    [("weight", (40, 1000), Section.PARAMETER), ("mean", (3,), Section.BUFFER), ("steps", (), Section.COUNTER)]
)
D: Final = LAYOUT.parameters
CHILDREN: Final = ("a", "b", "c")
SAMPLES: Final = (100, 50, 50)

Doubles = npt.NDArray[np.float64]


def play(
    tree: dict[str, Any], steps: tuple[int, ...], moves_KD: Doubles, *, r: int = 0, **keys: Any
) -> tuple[Doubles, Aggregated]:
    """Return the next model from uploads that moved so far from a model of ones; `keys`: of the rule's context."""
    settings = parse({"cloud": {"aggregation": tree}}).tiers[0].aggregation
    keys = {"training": TrainingSettings(momentum=0.0)} | keys
    rule = build(
        settings, layout=LAYOUT, node="cloud", seed=1, measures=True, rows=lambda name, count: np.empty(0, np.uint8),
        **keys,
    )  # fmt: skip
    start = LAYOUT.empty()
    LAYOUT.floats(start)[:] = 1.0
    LAYOUT.integers(start)[:] = 0
    rule.begin(start)
    rows_K = np.stack([start] * len(steps))
    LAYOUT.floats(rows_K)[:] += moves_KD
    reports = tuple(Report(SAMPLES[k], 0.5, count) for k, count in enumerate(steps))
    outcome = rule.aggregate(r, Uploads(CHILDREN[: len(steps)], rows_K, reports, lambda: None))
    return LAYOUT.floats(rule.model).astype(np.float64), outcome


def moves(seed: int = 1) -> Doubles:
    return np.random.default_rng(seed).normal(scale=0.1, size=(3, D + 3)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_steps_are_divided_by_their_norms(momentum: float) -> None:
    steps, shares = (4, 10, 25), (0.5, 0.25, 0.25)
    found, outcome = play({"name": "fednova"}, steps, moves(), training=TrainingSettings(momentum=momentum))
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
    training = TrainingSettings(momentum=momentum)
    mine, _ = play({"name": "fednova", "weights": weights}, (7, 7, 7), moves(), training=training)
    plain, _ = play({"name": "fedavg", "weights": weights}, (7, 7, 7), moves())
    np.testing.assert_allclose(mine, plain, rtol=1e-6)


def test_a_child_of_many_steps_does_not_pull_the_model_its_way() -> None:
    """Two children with optima at -1 and 1 that step towards them; one takes ten times as many steps."""

    def ends_at(name: str) -> float:
        at = 0.0
        for _ in range(60):
            ends = [at + (target - at) * (1 - 0.99**count) for target, count in ((-1.0, 2), (1.0, 20))]
            moved = np.array([[end - at] * (D + 3) for end in ends])
            found, _ = play({"name": name, "weights": "uniform"}, (2, 20), moved)
            at += float(found[0]) - 1.0
        return at

    assert abs(ends_at("fednova")) < 0.06 and ends_at("fedavg") > 0.7


# The weights of the gradients

ETA: Final = 0.1
TRAININGS: Final = [
    TrainingSettings.model_validate(
        {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay, "learning_rate": ETA}
        | ({"objective": {"name": "fedprox", "mu": mu}} if mu else {})
    )
    for momentum in (0.0, 0.5, 0.9)
    for nesterov in (False, True)
    for decay in (0.0, 0.3)
    for mu in (0.0, 1.0)
    if momentum or not nesterov
]
each_training = pytest.mark.parametrize(
    "training", TRAININGS, ids=lambda t: f"{t.momentum}-{t.nesterov}-{t.weight_decay}-{t.objective.name}"
)


def trained(training: TrainingSettings, count: int, *, slope: float = 1.0, start: float = 0.0) -> tuple[float, float]:
    """Return where so many steps on the loss `slope w` lead: those of a device, and those of torch's optimiser."""
    objective = objective_of(training)
    mine, momentum = torch.full((1,), start, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    theirs = torch.full((1,), start, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD(
        [theirs], ETA, training.momentum, weight_decay=training.weight_decay, nesterov=training.nesterov
    )
    prox = training.objective.mu if isinstance(training.objective, FedProx) else 0.0
    batch = Minibatch(lambda: slope * mine, torch.empty(0), [mine.requires_grad_()], [mine.detach().clone()])
    objective.losses = lambda _, logits: logits.sum()  # type: ignore[method-assign]
    for _ in range(count):
        step(
            batch,
            {"momentum": [momentum]} if training.momentum else {},
            objective=objective,
            optimizer=optimizer_of(training),
            clip_norm=training.clip_norm,
            learning_rate=ETA,
        )
        optimiser.zero_grad()
        (slope * theirs + prox / 2 * (theirs - start) ** 2).sum().backward()
        optimiser.step()
    return float(mine.detach()), float(theirs.detach())


@each_training
def test_the_weights_are_those_of_the_actual_steps(training: TrainingSettings) -> None:
    counts = np.array([1, 2, 5, 12, 100])
    found = gradient_weights(counts.astype(np.float64), training, ETA)
    for count, weight in zip(counts.tolist(), found.tolist(), strict=True):
        mine, theirs = trained(training, count)
        assert -mine / ETA == pytest.approx(weight, rel=1e-9)
        assert -theirs / ETA == pytest.approx(weight, rel=1e-9)


@pytest.mark.parametrize("m", [0.5, 0.9])
def test_the_weights_are_the_closed_forms(m: float) -> None:
    tau = np.array([1.0, 5.0, 12.0])
    heavy = (tau - m * (1 - m**tau) / (1 - m)) / (1 - m)
    nesterov = (tau - m**2 * (1 - m**tau) / (1 - m)) / (1 - m)
    assert gradient_weights(tau, TrainingSettings(momentum=m), 0.1) == pytest.approx(heavy)
    assert gradient_weights(tau, TrainingSettings(momentum=m, nesterov=True), 0.1) == pytest.approx(nesterov)
    prox = TrainingSettings.model_validate({"momentum": 0.0, "objective": {"name": "fedprox", "mu": 1.0}})
    assert gradient_weights(tau, prox, 0.1) == pytest.approx([sum(0.9**j for j in range(int(t))) for t in tau])


def test_a_step_at_least_and_shares_of_steps() -> None:
    training = TrainingSettings(momentum=0.9)
    assert gradient_weights(np.array([0.0, 1.0, 1.5, 2.0]), training, 0.1).tolist() == pytest.approx([1, 1, 1.95, 2.9])
    assert gradient_weights(np.array([7.0]), TrainingSettings(momentum=0.0), 0.1).tolist() == [7.0]


@each_training
def test_children_of_linear_losses_meet_where_their_gradients_cancel(training: TrainingSettings) -> None:
    """The next model is a step along the mean of the gradients at z = 1, whatever steps led to the uploads."""
    steps, slopes, shares = (1, 4, 12), (2.0, -1.0, 0.5), np.array([0.5, 0.25, 0.25])
    ends = [trained(training, count, slope=slope, start=1.0)[0] for count, slope in zip(steps, slopes, strict=True)]
    moved = np.array(ends)[:, None] - np.ones((3, D + 3))
    found, outcome = play({"name": "fednova"}, steps, moved, training=training)
    gradient = shares @ (np.array(slopes) + training.weight_decay)
    effective: Any = outcome.facts["effective_steps"]
    np.testing.assert_allclose(found[:D], 1 - ETA * effective * gradient, rtol=0, atol=1e-6)


def test_an_institutions_weights_are_the_sum_of_its_local_rounds() -> None:
    """Each begins with a fresh momentum. The rate is that of the global round."""
    training = TrainingSettings.model_validate(
        {"momentum": 0.9, "objective": {"name": "fedprox", "mu": 1.0}, "learning_rate": 0.7}
    )
    asked: list[int] = []

    def rate(local_round: int) -> float:
        asked.append(local_round)
        return ETA

    steps = (4 * 3, 4 * 12, 4 * 5 + 1)
    keys = {"training": training, "learning_rate": rate, "rounds_below": 4}
    _, outcome = play({"name": "fednova"}, steps, moves(), r=2, **keys)
    each = {count: float(gradient_weights(np.array([count]), training, ETA)[0]) for count in (3, 5, 6, 12)}
    facts: Any = outcome.facts["steps"]
    assert list(facts.values()) == pytest.approx([4 * each[3], 4 * each[12], 3 * each[5] + each[6]])
    assert asked == [8]


def test_nodes_know_the_local_rounds_below_them() -> None:
    two = parse({"topology": {"institutions": 0, "devices": 4}})
    three = parse({"topology": {"institutions": 2, "devices": 4}, "institution": {"rounds": 3}})
    assert two.rounds_below("cloud") == 1
    assert [three.rounds_below(node) for node in ("cloud", "institution-1")] == [3, 1]


@pytest.mark.parametrize("tier", ["cloud", "institution"])
def test_clipped_steps_of_fedprox_are_refused(tier: str) -> None:
    tree = {
        "topology": {"institutions": 2, "devices": 4},
        "training": {"clip_norm": 1.0, "objective": {"name": "fedprox", "mu": 0.1}},
        tier: {"aggregation": {"name": "fednova"}},
    }
    with pytest.raises(InvalidExperiment, match=r"training\.clip_norm = 1\.0: fednova .* fedprox"):
        parse(tree)


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
