"""FedNova, q-FedAvg and FedAdp, which weigh steps, and server optimisers: against plain twins, and
in labs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import RefusedModel
from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning import datasets, models, splits
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.learning.optimizers import optimizer_of
from fedstrata.common.methods.fedadp import gompertz
from fedstrata.common.methods.fednova import gradient_weights
from fedstrata.common.methods.rule import Aggregated, Rule
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.common.protocol.limits import check_report, limits_below
from fedstrata.common.protocol.messages import Key, Manifest, Result
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.settings.training import FedProx, TrainingSettings
from fedstrata.deploy.results.run import Run
from fedstrata.device.training.objectives.objective import Minibatch
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.sgd import step
from tests.helpers.direct import run_direct
from tests.helpers.examples import examples
from tests.helpers.rules import LAYOUT, Report, aggregate, rule_of
from tests.simulation.lab import ScenarioLab

D: Final = LAYOUT.parameters
NAMES: Final = "abcdefgh"
SAMPLES: Final = (100, 50, 50)
PLAIN: Final = TrainingSettings(momentum=0.0)

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


def play(
    tree: dict[str, Any],
    moves_KD: Doubles,
    *,
    steps: Sequence[int] = (1,) * 8,
    losses: Sequence[float | None] = (None,) * 8,
    r: int = 0,
    **context: Any,
) -> tuple[Doubles, Aggregated]:
    """Return the next model from uploads that moved so far from a model of ones, and the outcome."""
    rule = rule_of(tree, start=1.0, **{"training": PLAIN} | context)
    rows_K = np.zeros((len(moves_KD), LAYOUT.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:] = 1.0 + moves_KD
    reports = [
        Report((*SAMPLES, 60, 70)[k], 0.5, steps[k], losses[k]) for k in range(len(moves_KD))
    ]
    outcome = aggregate(rule, r, NAMES[: len(moves_KD)], rows_K, reports)
    return LAYOUT.floats(rule.model).astype(np.float64), outcome


def moves(count: int = 3, seed: int = 1) -> Doubles:
    found = 1 + np.random.default_rng(seed).normal(scale=0.1, size=(count, D + 3))
    return found.astype(np.float32).astype(np.float64) - 1


# FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_steps_are_divided_by_their_norms(momentum: float) -> None:
    steps, shares = (4, 10, 25), (0.5, 0.25, 0.25)
    found, outcome = play(
        {"name": "fednova"}, moves(), steps=steps, training=TrainingSettings(momentum=momentum)
    )
    # The L1 norm of the weights that plain momentum gives the gradients of tau steps.
    a = [sum(sum(momentum**j for j in range(i)) for i in range(1, tau + 1)) for tau in steps]
    effective = sum(p * each for p, each in zip(shares, a, strict=True))
    wanted = 1 + effective * sum(
        p * move / each for p, move, each in zip(shares, moves(), a, strict=True)
    )
    np.testing.assert_allclose(found[:D], wanted[:D], rtol=1e-6, atol=1e-6)
    # buffers by samples
    np.testing.assert_allclose(found[D:], 1 + np.array(shares) @ moves()[:, D:], rtol=1e-6)
    assert outcome.facts["effective_steps"] == pytest.approx(effective, rel=1e-12)
    # Tempo's distances are those to the next model
    far_K = np.linalg.norm(1 + moves()[:, :D] - found[:D], axis=1)
    assert list(outcome.distances.values()) == pytest.approx(far_K.tolist(), rel=1e-5)


@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_equal_steps_are_fedavg(weights: str) -> None:
    mine, _ = play({"name": "fednova", "weights": weights}, moves(), steps=(7, 7, 7))
    np.testing.assert_allclose(
        mine, play({"name": "fedavg", "weights": weights}, moves())[0], rtol=1e-6
    )


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
    "training",
    TRAININGS,
    ids=lambda t: f"{t.momentum}-{t.nesterov}-{t.weight_decay}-{t.objective.name}",
)


def trained(training: TrainingSettings, count: int) -> tuple[float, float]:
    """Return where so many steps on the loss `w` lead: those of a device, and those of torch's
    optimiser.
    """
    objective = objective_of(training)
    mine, momentum = (torch.zeros(1, dtype=torch.float64) for _ in range(2))
    theirs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD(
        [theirs],
        ETA,
        training.momentum,
        weight_decay=training.weight_decay,
        nesterov=training.nesterov,
    )
    prox = training.objective.mu if isinstance(training.objective, FedProx) else 0.0
    batch = Minibatch(
        lambda: mine, torch.empty(0), [mine.requires_grad_()], [mine.detach().clone()]
    )
    objective.losses = lambda _, logits: logits.sum()  # type: ignore[method-assign]
    for _ in range(count):
        step(
            batch, {"momentum": [momentum]} if training.momentum else {}, objective=objective,
            optimizer=optimizer_of(training), clip_norm=training.clip_norm, learning_rate=ETA,
        )  # fmt: skip
        optimiser.zero_grad()
        (theirs + prox / 2 * theirs**2).sum().backward()
        optimiser.step()
    return float(mine.detach()), float(theirs.detach())


@each_training
def test_the_weights_of_the_gradients_are_those_of_the_actual_steps(
    training: TrainingSettings,
) -> None:
    counts = [1, 2, 5, 12, 100]
    found = gradient_weights(np.array(counts, np.float64), training, ETA)
    for count, weight in zip(counts, found.tolist(), strict=True):
        assert [-end / ETA for end in trained(training, count)] == pytest.approx(
            [weight] * 2, rel=1e-9
        )


def test_a_step_at_least_and_shares_of_steps() -> None:
    training = TrainingSettings(momentum=0.9)
    assert gradient_weights(
        np.array([0.0, 1.0, 1.5, 2.0]), training, 0.1
    ).tolist() == pytest.approx([1, 1, 1.95, 2.9])
    assert gradient_weights(np.array([7.0]), PLAIN, 0.1).tolist() == [7.0]


def test_an_institutions_weights_are_the_sum_of_its_local_rounds() -> None:
    """Each begins with a fresh momentum. The rate is that of the global round."""
    training = TrainingSettings.model_validate(
        {"momentum": 0.9, "objective": {"name": "fedprox", "mu": 1.0}, "learning_rate": 0.7}
    )
    asked: list[int] = []

    def rate(local_round: int) -> float:
        asked.append(local_round)
        return ETA

    context = {"training": training, "learning_rate": rate, "rounds_below": 4}
    _, outcome = play(
        {"name": "fednova"}, moves(), steps=(4 * 3, 4 * 12, 4 * 5 + 1), r=2, **context
    )
    each = {
        count: float(gradient_weights(np.array([count]), training, ETA)[0])
        for count in (3, 5, 6, 12)
    }
    facts: Any = outcome.facts["steps"]
    assert list(facts.values()) == pytest.approx([4 * each[3], 4 * each[12], 3 * each[5] + each[6]])
    assert asked == [8]


def test_nodes_know_the_local_rounds_below_them() -> None:
    two = parse({"topology": {"institutions": 0, "devices": 4}})
    three = parse({"topology": {"institutions": 2, "devices": 4}, "institution": {"rounds": 3}})
    assert two.rounds_below("cloud") == 1
    assert [three.rounds_below(node) for node in ("cloud", "institution-1")] == [3, 1]


def test_a_lab_counts_steps_at_both_tiers() -> None:
    tree = {
        "rounds": 2,
        "topology": {"institutions": 2, "devices": 4},
        "links": {"check": "off"},
        "cloud": {"aggregation": {"name": "fednova"}},
        "institution": {"rounds": 2, "aggregation": {"name": "fednova"}},
    }
    outcome = ScenarioLab(parse(tree), seed=1, model_bytes=10_000).run()
    assert outcome.ok, outcome.result


# q-FedAvg

LAB: Final[dict[str, Any]] = {
    "rounds": 2, "topology": {"institutions": 0, "devices": 4}, "model": {"name": "mlp_digits"},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "training": {"batch_size": 50, "learning_rate": 0.05, "momentum": 0.0},
    "cloud": {"aggregation": {"name": "qfedavg", "q": 1.0}},
}  # fmt: skip


@examples(60)
@given(
    q=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 5.0]),
    losses=st.lists(st.floats(0.01, 4.0), min_size=1, max_size=5),
    rate=st.sampled_from([0.01, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_next_model_is_that_of_a_plain_twin(
    q: float, losses: list[float], rate: float, seed: int
) -> None:
    moves_KD = moves(len(losses), seed)
    delta, h, lipschitz = np.zeros(D), 0.0, 1 / rate
    for loss, move in zip(losses, moves_KD, strict=True):
        gradient = -lipschitz * move[:D]  # L (z - v_k)
        delta += loss**q * gradient
        h += q * loss ** (q - 1) * float(gradient @ gradient) + lipschitz * loss**q
    found, _ = play(
        {"name": "qfedavg", "q": q}, moves_KD, losses=losses, learning_rate=lambda _: rate
    )
    np.testing.assert_allclose(found[:D], 1 - delta / h, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[D:], 1 + moves_KD[:, D:].mean(0), rtol=1e-6)


def test_losses_are_those_of_the_model_received(tmp_path: Path) -> None:
    run = Run(run_direct(tmp_path, LAB))
    experiment = parse(LAB)
    tester, data = ModelTester(experiment), datasets.load(experiment.data)
    module = models.of(experiment, inputs=data.inputs)
    models.read_row(module, tester.layout, tester.first)
    first = next(event for event in run.events if event.name == "plan")
    for name, part in zip(
        experiment.tree.devices, splits.split_of(experiment).partitions, strict=True
    ):
        samples = torch.from_numpy(part)
        with torch.no_grad():
            outputs = module.eval()(data.normaliser()(data.train_images[samples]))
        wanted = float(functional.cross_entropy(outputs, data.train_labels[samples]))
        assert first.facts["start_losses"][name] == pytest.approx(wanted, rel=1e-5)


def test_a_result_without_the_loss_is_refused() -> None:
    limits = limits_below(parse(LAB), CLOUD)["device-0"]
    manifest = Manifest("0123456789abcdef", 1024, 1024, b"d" * 8, "fp32", "layout")
    result = Result(
        Key(0, 0, 0),
        manifest,
        None,
        Work(100, 0.5, 1, 12, 1.0, 0.0, 0.0),
        12,
        (),
        "",
        start_loss=2.3,
    )
    check_report(result, limits=limits)
    for loss in (None, float("nan"), 1e40):
        with pytest.raises(RefusedModel, match="model that it received"):
            check_report(replace(result, start_loss=loss), limits=limits)


# FedAdp


def weigh(
    models_KD: Floats,
    samples: Sequence[int],
    *,
    start_D: Floats | float = 0.0,
    a: float = 5.0,
    past: dict[str, Any] | None = None,
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Return the weights of a round, the children's angles, and what is kept of them, `past`
    beforehand.
    """
    layout = ModelLayout.build([("w", (models_KD.shape[1],), Section.PARAMETER)])
    rule, start = rule_of({"name": "fedadp", "a": a}, layout=layout), layout.empty()
    layout.floats(start)[:] = start_D
    rule.begin(start)
    rule.restore(Path(), {"numbers": past or {}})
    outcome = aggregate(
        rule, 0, NAMES[: len(samples)], models_KD.view(np.uint8), [Report(n, 0.0) for n in samples]
    )
    facts: Any = outcome.facts
    kept: Any = rule.save(Path())["numbers"]
    return list(facts["weights"].values()), facts["angles"], kept


def test_the_papers_curve() -> None:
    found = [round(gompertz(angle, 5.0), 2) for angle in (0.0, 0.5, 1.0, math.pi / 2)]
    assert found == [5.0, 5.0, 3.16, 0.28]


@given(samples=st.lists(st.integers(1, 1000), min_size=1, max_size=8), seed=st.integers(0, 100))
def test_equal_steps_are_weighed_by_samples(samples: list[int], seed: int) -> None:
    model_D = np.random.default_rng(seed).normal(size=5).astype(np.float32)
    weights, _, _ = weigh(np.tile(model_D, (len(samples), 1)), samples)
    np.testing.assert_allclose(weights, np.array(samples) / sum(samples), rtol=1e-6)


def test_a_child_that_did_not_move_is_at_a_right_angle() -> None:
    _, angles, _ = weigh(np.array([[1, 0], [0, 0], [1, 1]], np.float32), [1, 1, 1])
    assert angles["b"] == pytest.approx(math.pi / 2)
    weights, angles, _ = weigh(np.zeros((2, 3), np.float32), [1, 3])
    assert list(angles.values()) == pytest.approx([math.pi / 2] * 2) and weights == [0.25, 0.75]


def test_angles_are_smoothed_over_a_childs_own_rounds() -> None:
    models_KD = np.array([[1, 0], [0, 1]], np.float32)
    _, _, kept = weigh(models_KD, [1, 1])
    assert kept["a"] == [1, pytest.approx(math.pi / 4)]
    for _ in range(3):  # alone, a child is the mean: angle 0
        _, _, kept = weigh(models_KD[:1], [1], past=kept)
    assert kept["a"] == [4, pytest.approx(math.pi / 16, abs=1e-7)]
    assert kept["b"] == [1, pytest.approx(math.pi / 4)]  # not there, not changed


def test_without_a_sample_all_weigh_alike() -> None:
    assert weigh(np.array([[1, 0], [1, 0]], np.float32), [0, 0])[0] == [0.5, 0.5]


# Server optimisers

SHARES: Final = np.array([0.5, 0.25, 0.25])


def advance(rule: Rule, r: int) -> tuple[Doubles, Aggregated]:
    """Play a round in which each child moves a random step; return the uploads [K, D] and the
    outcome.
    """
    ((model, _),) = rule.dispatch(r, NAMES[:3])
    rows_K = np.stack([model] * 3)
    floats_K = LAYOUT.floats(rows_K)
    floats_K += np.random.default_rng(r).normal(scale=0.1, size=floats_K.shape).astype(np.float32)
    LAYOUT.integers(rows_K)[:] += 1
    uploads = floats_K[:, :D].astype(np.float64)
    return uploads, aggregate(rule, r, NAMES[:3], rows_K, [Report(count, 0.5) for count in SAMPLES])


def model_of(rule: Rule) -> Doubles:
    return LAYOUT.floats(rule.model)[:D].astype(np.float64)


def momentum(beta: float, eta: float) -> Callable[[Doubles, Doubles], Doubles]:
    m = np.zeros(D, np.float32)  # as the rule keeps it

    def step(z: Doubles, delta: Doubles) -> Doubles:
        now = beta * m.astype(np.float64) + delta
        m[:] = now
        return z + eta * now

    return step


def adam(
    eta: float, beta_1: float, beta_2: float, tau: float
) -> Callable[[Doubles, Doubles], Doubles]:
    m, v = np.zeros(D, np.float32), np.full(D, tau**2, np.float32)

    def step(z: Doubles, delta: Doubles) -> Doubles:
        first = beta_1 * m.astype(np.float64) + (1 - beta_1) * delta
        second = beta_2 * v.astype(np.float64) + (1 - beta_2) * delta**2
        m[:], v[:] = first, second
        return z + eta * first / (np.sqrt(second) + tau)

    return step


def combined(name: str, uploads: Doubles) -> Doubles:
    """Return what a rule makes of uploads [K, D] alone."""
    result: Doubles = np.median(uploads, axis=0) if name == "median" else uploads.mean(axis=0)
    return result


BEHIND: Final[list[dict[str, Any]]] = [
    {"name": "fedcda", "depth": 1, "groups": 1, "warmup_rounds": 0},
    {"name": "median"},
]


@pytest.mark.parametrize("tree", BEHIND, ids=lambda tree: tree["name"])
@pytest.mark.parametrize(
    ("own", "twin"),
    [
        ({"name": "fedavgm", "momentum": 0.5}, lambda: momentum(0.5, 1.0)),
        ({"name": "fedadam", "learning_rate": 0.01}, lambda: adam(0.01, 0.9, 0.99, 1e-3)),
    ],
    ids=["fedavgm", "fedadam"],
)
def test_a_step_follows_another_rules_result(
    tree: dict[str, Any],
    own: dict[str, Any],
    twin: Callable[[], Callable[[Doubles, Doubles], Doubles]],
    tmp_path: Path,
) -> None:
    """Combine, then step: FedCDA or the median, then the server optimiser in place of the result
    itself.
    """
    rule, step = rule_of({**tree, "step": own}), twin()
    z = np.zeros(D)
    for r in range(8):
        uploads, outcome = advance(rule, r)
        expected = step(z, combined(tree["name"], uploads) - z)
        np.testing.assert_allclose(model_of(rule), expected, rtol=1e-5, atol=2e-6)
        far = [float(np.linalg.norm(upload - model_of(rule))) for upload in uploads]
        assert list(outcome.distances.values()) == pytest.approx(far, rel=1e-6)
        z = model_of(rule)
        if r == 4:
            facts = rule.save(tmp_path)
            model, rule = rule.model.copy(), rule_of({**tree, "step": own})
            rule.begin(model)
            rule.restore(tmp_path, facts)


NULL: Final[dict[str, Any]] = {"name": "fedavgm", "momentum": 0.0}


@pytest.mark.parametrize(
    ("tree", "null"),
    [({"name": "fedavg"}, NULL), ({"name": "fedavg"}, {"name": "fedexp", "epsilon": 1e12})]
    + [
        (tree, {**tree, "step": NULL})
        for tree in (
            *BEHIND,
            {"name": "fedadp"},
            {"name": "krum", "wrong": 0},
            {"name": "feddf", "steps": 0},
        )
    ],
)
def test_the_null_setting_is_no_step(tree: dict[str, Any], null: dict[str, Any]) -> None:
    one, other = rule_of(tree), rule_of(null)
    for r in range(5):
        advance(one, r)
        advance(other, r)
        assert one.model.tobytes() == other.model.tobytes()


def test_fedexp_goes_as_far_as_its_formula() -> None:
    rule = rule_of({"name": "fedexp", "epsilon": 0.5})
    for r in range(5):
        z = model_of(rule) if r else np.zeros(D)
        uploads, outcome = advance(rule, r)
        delta = SHARES @ uploads - z
        squares = SHARES @ ((uploads - z) ** 2).sum(axis=1)
        eta = max(1.0, float(squares / (2 * (delta @ delta + 3 * 0.5))))
        assert eta > 1.2, "random steps point nowhere together"
        assert outcome.facts["server_learning_rate"] == pytest.approx(eta, rel=1e-6)
        np.testing.assert_allclose(model_of(rule), z + eta * delta, rtol=1e-5, atol=1e-6)
        assert rule.mixed is not None
        judged = LAYOUT.floats(rule.mixed)[:D]
        np.testing.assert_allclose(judged, (z + model_of(rule)) / 2, rtol=1e-5, atol=1e-6)
