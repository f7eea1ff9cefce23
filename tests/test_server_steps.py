"""Server optimisers: against plain twins over many rounds, behind other rules, and at their null settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.methods.rule import Aggregated, Rule
from tests.helpers.rules import LAYOUT, Report, aggregate, rule_of

ROUNDS: Final = 50
CHILDREN: Final = ("a", "b", "c")
SHARES: Final = np.array([0.5, 0.25, 0.25])
Doubles = npt.NDArray[np.float64]


def play(rule: Rule, r: int) -> tuple[Doubles, Aggregated]:
    """Play a round in which each child moves a random step; return the uploads [K, D] and the outcome."""
    ((model, _),) = rule.dispatch(r, CHILDREN)
    rows_K = np.stack([model] * len(CHILDREN))
    floats_K = LAYOUT.floats(rows_K)
    floats_K += np.random.default_rng(r).normal(scale=0.1, size=floats_K.shape).astype(np.float32)
    LAYOUT.integers(rows_K)[:] += 1
    reports = [Report(int(100 * share), 0.5) for share in SHARES]
    uploads = floats_K[:, : LAYOUT.parameters].astype(np.float64)
    return uploads, aggregate(rule, r, CHILDREN, rows_K, reports)


def model_of(rule: Rule) -> Doubles:
    return LAYOUT.floats(rule.model)[: LAYOUT.parameters].astype(np.float64)


def momentum(beta: float, eta: float) -> Callable[[Doubles, Doubles], Doubles]:
    m = np.zeros(LAYOUT.parameters, np.float32)  # as the rule keeps it

    def step(z: Doubles, delta: Doubles) -> Doubles:
        now = beta * m.astype(np.float64) + delta
        m[:] = now
        return z + eta * now

    return step


def adaptive(kind: str, eta: float, beta_1: float, beta_2: float, tau: float) -> Callable[[Doubles, Doubles], Doubles]:
    m, v = np.zeros(LAYOUT.parameters, np.float32), np.full(LAYOUT.parameters, tau**2, np.float32)

    def step(z: Doubles, delta: Doubles) -> Doubles:
        before = v.astype(np.float64)
        first = beta_1 * m.astype(np.float64) + (1 - beta_1) * delta
        second = {
            "adagrad": before + delta**2,
            "adam": beta_2 * before + (1 - beta_2) * delta**2,
            "yogi": before - (1 - beta_2) * delta**2 * np.sign(before - delta**2),
        }[kind]
        m[:], v[:] = first, second
        return z + eta * first / (np.sqrt(second) + tau)

    return step


@pytest.mark.parametrize(
    ("tree", "step"),
    [
        ({"name": "fedavgm", "momentum": 0.9, "learning_rate": 0.5}, momentum(0.9, 0.5)),
        ({"name": "fedadagrad", "learning_rate": 0.1}, adaptive("adagrad", 0.1, 0.0, 0.0, 1e-3)),
        ({"name": "fedadam", "learning_rate": 0.01}, adaptive("adam", 0.01, 0.9, 0.99, 1e-3)),
        ({"name": "fedyogi", "learning_rate": 0.02, "tau": 0.01}, adaptive("yogi", 0.02, 0.9, 0.99, 1e-2)),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_fifty_rounds_are_those_of_a_plain_twin(
    tree: dict[str, Any], step: Callable[[Doubles, Doubles], Doubles]
) -> None:
    rule = rule_of(tree)
    for r in range(ROUNDS):
        z = model_of(rule) if r else np.zeros(LAYOUT.parameters)
        uploads, outcome = play(rule, r)
        expected = step(z, SHARES @ uploads - z)
        wrong = ~np.isclose(model_of(rule), expected, rtol=1e-5, atol=2e-6)
        # The mean is rounded to float32: where v is nearly delta^2, Yogi's sign may differ.
        assert wrong.sum() <= (2 if tree["name"] == "fedyogi" else 0)
        far = [float(np.linalg.norm(upload - model_of(rule))) for upload in uploads]
        assert list(outcome.distances.values()) == pytest.approx(far, rel=1e-6), "to the next model, not to the mean"
        assert LAYOUT.integers(rule.model).tolist() == [r + 1], "counters are those of the mean"


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
        ({"name": "fedadam", "learning_rate": 0.01}, lambda: adaptive("adam", 0.01, 0.9, 0.99, 1e-3)),
    ],
    ids=["fedavgm", "fedadam"],
)
def test_a_step_follows_another_rules_result(
    tree: dict[str, Any], own: dict[str, Any], twin: Callable[[], Callable[[Doubles, Doubles], Doubles]], tmp_path: Path
) -> None:
    """Combine, then step: FedCDA or the median, then the server optimiser in place of the result itself."""
    rule, step = rule_of({**tree, "step": own}), twin()
    z = np.zeros(LAYOUT.parameters)
    for r in range(8):
        uploads, outcome = play(rule, r)
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
        for tree in (*BEHIND, {"name": "fedadp"}, {"name": "krum", "wrong": 0}, {"name": "feddf", "steps": 0})
    ],
)
def test_the_null_setting_is_no_step(tree: dict[str, Any], null: dict[str, Any]) -> None:
    one, other = rule_of(tree), rule_of(null)
    for r in range(5):
        play(one, r)
        play(other, r)
        assert one.model.tobytes() == other.model.tobytes()


def test_fedexp_goes_as_far_as_its_formula() -> None:
    rule = rule_of({"name": "fedexp", "epsilon": 0.5})
    for r in range(5):
        z = model_of(rule) if r else np.zeros(LAYOUT.parameters)
        uploads, outcome = play(rule, r)
        delta = SHARES @ uploads - z
        squares = SHARES @ ((uploads - z) ** 2).sum(axis=1)
        eta = max(1.0, float(squares / (2 * (delta @ delta + 3 * 0.5))))
        assert eta > 1.2, "random steps point nowhere together"
        assert outcome.facts["server_learning_rate"] == pytest.approx(eta, rel=1e-6)
        np.testing.assert_allclose(model_of(rule), z + eta * delta, rtol=1e-5, atol=1e-6)
        assert rule.mixed is not None
        judged = LAYOUT.floats(rule.mixed)[: LAYOUT.parameters]
        np.testing.assert_allclose(judged, (z + model_of(rule)) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"name": "fedavgm", "momentum": 1.0}, r"momentum = 1.0: too large. Write a number below 1"),
        ({"name": "fedadam", "tau": 0.0}, r"tau = 0.0: too small. Write a number above 0"),
        ({"name": "fedyogi", "learning_rate": -1.0}, r"learning_rate = -1.0: too small"),
        ({"name": "fedadagrad"}, r"learning_rate = 'not set': fedadagrad needs .* Try 0.01, 0.1 and 1"),
        ({"name": "fedexp", "epsilon": 0.0}, r"epsilon = 0.0: too small"),
        ({"name": "krum", "wrong": 0, "step": {"name": "fedadam"}}, r"step.learning_rate = 'not set': fedadam needs"),
        ({"name": "fedcda", "step": {"name": "fedavgm", "weights": "uniform"}}, r"step.weights = .* those of fedcda"),
        (
            {"name": "fedcda", "step": {"name": "fedavg"}},
            r"step.name = 'fedavg': no step of a server has this name. Did you mean 'fedavgm'",
        ),
        ({"name": "fedcda", "step": {"name": "mine:Rule"}}, r"step.name = 'mine:Rule': no step of a server"),
        ({"name": "fedavgm", "beta_2": 0.9}, r"beta_2 = 0.9: unknown key. It belongs to fedadam and fedyogi"),
    ],
)
def test_what_cannot_be_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        parse({"cloud": {"aggregation": tree}})
