"""Rules and bounds against wrong uploads: against plain twins, and what poisoned uploads can do to
them.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.experiment import lint
from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning.refiner import NodeSamples
from fedstrata.common.methods.baselines.root_training import train
from fedstrata.common.methods.rule import Aggregated, Rule
from fedstrata.common.methods.settings import RULES, NormBound
from fedstrata.common.model.refinement import RoundModels
from fedstrata.common.settings.topology import share_of
from tests.helpers.examples import examples, slow
from tests.helpers.rules import LAYOUT, LEAST, AddingRefiner, Report, aggregate, rule_of
from tests.simulation.lab import ScenarioLab

D: Final = LAYOUT.parameters
SPREAD: Final = 0.1
UNIFORM: Final = {"name": "fedavg", "weights": "uniform"}

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


# The rules


def aggregated(tree: dict[str, Any], models_KD: Floats, **keys: Any) -> tuple[Doubles, Aggregated]:
    """Return the next model's trainable columns from these uploads, which have 1, 2, 3, ...
    samples.
    """
    rule = rule_of(tree, **keys)
    rows_K = np.zeros((len(models_KD), LAYOUT.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:, :D] = models_KD
    children = [f"c{k}" for k in range(len(models_KD))]
    rule.dispatch(0, children)
    outcome = aggregate(
        rule, 0, children, rows_K, [Report(k + 1, 0.5) for k in range(len(models_KD))]
    )
    found = LAYOUT.floats(rule.model)[:D].astype(np.float64)
    if not outcome.left_out:
        far_K = np.linalg.norm(models_KD.astype(np.float64) - found, axis=1)
        assert list(outcome.distances.values()) == pytest.approx(far_K.tolist(), rel=1e-5, abs=1e-4)
    return found, outcome


def models(count: int, *, poisoned: int = 0, seed: int = 1) -> Floats:
    """Return uploads around zero; the last ones are far away, in one direction."""
    found = np.random.default_rng(seed).normal(scale=SPREAD, size=(count, D)).astype(np.float32)
    found[count - poisoned :] = 1000.0
    return found


@given(hundredths=st.integers(1, 49), count=st.integers(1, 1000))
@examples(200)
def test_shares_are_of_decimal_numbers(hundredths: int, count: int) -> None:
    """0.29 * 100 is 28.999999999999996."""
    assert share_of(count, hundredths / 100) == hundredths * count // 100
    least = RULES["trimmed_mean"](name="trimmed_mean", trim=hundredths / 100).uploads_least
    assert hundredths * least >= 100 > hundredths * (least - 1)


NULL: Final[dict[str, dict[str, Any]]] = {
    "trimmed_mean": {"trim": 0.0},
    "bulyan": {"wrong": 0},
    "centred_clipping": {"radius": 1e9},
    "fltrust": {"epochs": 0},
}


@pytest.mark.parametrize("name", NULL)
def test_the_null_setting_is_the_uniform_mean(name: str) -> None:
    uploads = models(7)
    found, _ = aggregated({"name": name, **NULL[name]}, uploads)
    np.testing.assert_allclose(found, uploads.mean(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("count", "wrong", "keep"), [(5, 1, 1), (7, 2, 3), (11, 4, 2)])
def test_krum_chooses_by_its_formula(count: int, wrong: int, keep: int) -> None:
    uploads = models(count)
    found, outcome = aggregated({"name": "krum", "wrong": wrong, "keep": keep}, uploads)
    apart = np.array([[((a - b).astype(np.float64) ** 2).sum() for b in uploads] for a in uploads])
    scores = [
        float(np.sort(np.delete(row, k))[: count - wrong - 2].sum()) for k, row in enumerate(apart)
    ]
    scored: Any = outcome.facts["scores"]
    assert list(scored.values()) == pytest.approx(scores, rel=1e-5)
    chosen = sorted(np.argsort(scores)[:keep])
    assert outcome.facts["chosen"] == [f"c{k}" for k in chosen]
    np.testing.assert_allclose(found, uploads[chosen].mean(axis=0), rtol=1e-5, atol=1e-7)


# Rules of norms, of angles, and in two stages


@pytest.mark.parametrize(("count", "wrong"), [(7, 1), (11, 2), (13, 2)])
def test_bulyan_is_krum_again_and_again_and_a_mean_around_the_median(
    count: int, wrong: int
) -> None:
    uploads = models(count, poisoned=wrong)
    left, chosen = list(range(count)), []
    while len(chosen) < count - 2 * wrong:
        few = max(len(left) - wrong - 2, 1)
        far = {
            k: sorted(((uploads[k] - uploads[j]).astype(np.float64) ** 2).sum() for j in left)
            for k in left
        }
        chosen.append(min(left, key=lambda k: sum(far[k][1 : 1 + few])))
        left.remove(chosen[-1])
    values = uploads[sorted(chosen)].astype(np.float64)
    order = np.argsort(np.abs(values - np.median(values, axis=0)), axis=0, kind="stable")[
        : len(chosen) - 2 * wrong
    ]
    found, outcome = aggregated({"name": "bulyan", "wrong": wrong}, uploads)
    np.testing.assert_allclose(
        found, np.take_along_axis(values, order, axis=0).mean(axis=0), rtol=1e-6, atol=1e-6
    )
    assert outcome.facts["chosen"] == [f"c{k}" for k in sorted(chosen)]
    assert np.abs(found).max() < 10 * SPREAD, (
        "two of the wrong ones may be chosen, and the second stage drops them"
    )


def test_fltrust_takes_steps_as_long_as_its_own_by_their_angle() -> None:
    """The refiner of the test adds 1 to each parameter: that is the node's own step."""
    uploads = models(6) + np.float32(1.0)
    uploads[4:] *= -100
    uploads[3] = 0.25  # it did not move
    own = np.ones(D)
    steps = uploads.astype(np.float64) - 0.25
    lengths = np.maximum(np.linalg.norm(steps, axis=1), 1e-9)
    trust = np.maximum(0, steps @ own / (lengths * np.sqrt(D)))
    wanted = 0.25 + (trust / trust.sum() * np.sqrt(D) / lengths) @ steps
    found, outcome = aggregated(
        {"name": "fltrust"}, uploads, start=0.25, refiner=AddingRefiner(seen=1)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    weights: Any = outcome.facts["weights"]
    assert weights["c3"] == weights["c4"] == weights["c5"] == 0 and outcome.facts["seen"] == 1
    kept, outcome = aggregated(
        {"name": "fltrust"}, -abs(uploads) - 1, start=0.25, refiner=AddingRefiner()
    )
    assert (kept == 0.25).all() and outcome.left_out[
        "c0"
    ] == "no step is trusted: the model is kept"


def test_fltrust_trains_plainly_on_the_samples_of_its_node() -> None:
    tree = {
        "model": "mlp_digits",
        "data": {"node_samples": 50},
        "cloud": {"aggregation": "fltrust"},
    }
    node = NodeSamples(parse(tree), "cloud")
    row, mean = node.layout.empty(), node.layout.empty()
    node.store(row)
    settings: Any = RULES["fltrust"](name="fltrust", epochs=2, batch_size=20, learning_rate=0.1)
    facts = train(node, settings, RoundModels(3, node.layout, mean, row, [], np.ones(0)))
    node.load(row)
    passes = node.passes(20, r=3)
    for places in [*next(passes), *next(passes)]:
        loss = torch.nn.functional.cross_entropy(node.logits(places), node.labels[places])
        for weight, gradient in zip(
            node.weights, torch.autograd.grad(loss, node.weights), strict=True
        ):
            weight.data -= 0.1 * gradient
    again = node.layout.empty()
    node.store(again)
    np.testing.assert_allclose(
        node.layout.floats(mean), node.layout.floats(again), rtol=1e-6, atol=1e-7
    )
    assert facts["steps"] == 6 and facts["loss_after"] < facts["loss_before"]


# the most wrong ones of eleven inside each theorem
OUTSIDE: Final[list[tuple[dict[str, Any], int, int]]] = [
    ({"name": "median"}, 11, 5),
    ({"name": "trimmed_mean", "trim": 0.3}, 11, 3),
    ({"name": "krum", "wrong": 4}, 11, 4),
    ({"name": "geometric_median"}, 11, 5),
    ({"name": "bulyan", "wrong": 2}, 11, 2),
]


@pytest.mark.parametrize(("tree", "count", "most"), OUTSIDE)
def test_rules_hold_inside_their_theorems_and_break_outside(
    tree: dict[str, Any], count: int, most: int
) -> None:
    """Colluders send the same model, far away."""
    assert RULES[tree["name"]](**tree).tolerates(count) == most
    inside, _ = aggregated(tree, models(count, poisoned=most))
    # its bound: 2 (n - f) / (n - 2 f) times the farthest honest one
    if tree["name"] == "geometric_median":
        assert np.linalg.norm(inside) <= 12 * np.linalg.norm(models(count), axis=1).max()
    broken, _ = aggregated(tree, models(count, poisoned=count // 2 + 1))
    assert np.abs(inside).max() < 10 * SPREAD < 100 < np.abs(broken).max()


def test_an_experiment_names_where_the_condition_of_its_rule_holds() -> None:
    tree = {
        "topology": {"institutions": 2, "devices": 10},
        "institution": {"aggregation": {"name": "krum", "wrong": 1}},
        "cloud": {"aggregation": {"name": "geometric_median"}, "participation": 1.0},
        "adversaries": [{"attack": "scaled", "nodes": ["device-0", "device-5", "device-6"]}],
    }
    tree["topology"] = {"institutions": 3, "devices": 15}
    found = [line for line in lint.warnings(parse(tree)) if "theorem" in line]
    assert found == [
        "cloud.aggregation.name = 'geometric_median': its theorem needs n >= 2 f + 1. It holds at "
        "cloud"
        " (f = 0 of n = 3).",
        "institution.aggregation.name = 'krum': its theorem needs n >= 2 f + 3, with f of the key "
        "`wrong`. It holds at"
        " institution-0 (f = 1 of n = 5) and institution-2 (f = 0 of n = 5). It does not hold at "
        "institution-1"
        " (f = 2 of n = 5).",
    ]
    assert not [
        line for line in lint.warnings(parse(tree | {"adversaries": []})) if "theorem" in line
    ]


# Too few uploads

UNPROTECTED: Final[list[tuple[dict[str, Any], int]]] = [
    ({"name": "median"}, 3),
    ({"name": "trimmed_mean"}, 10),
    ({"name": "trimmed_mean", "trim": 0.3}, 4),
    ({"name": "trimmed_mean", "trim": 0.34}, 3),
    ({"name": "krum"}, 5),
    ({"name": "krum", "wrong": 2, "keep": 8}, 10),
    ({"name": "bulyan"}, 7),
    ({"name": "geometric_median"}, 3),
]


@pytest.mark.parametrize(("tree", "least"), UNPROTECTED)
def test_a_round_with_too_few_uploads_keeps_the_model(tree: dict[str, Any], least: int) -> None:
    found, outcome = aggregated(tree, models(least - 1, poisoned=1), start=0.25)
    assert (found == 0.25).all() and outcome.distances == {}
    assert outcome.facts == {"uploads": least - 1, "uploads_least": least}
    reason = f"{least - 1} uploads do not protect from wrong ones, {least} do: the model is kept"
    assert outcome.left_out == {f"c{k}": reason for k in range(least - 1)}
    enough, outcome = aggregated(tree, models(least, poisoned=1), start=0.25)
    assert np.abs(enough).max() < 10 * SPREAD and not outcome.left_out


def test_a_lab_whose_uploads_are_refused_goes_on_with_its_model() -> None:
    """Three devices, of which the bound leaves out at most one in a round: two uploads have no
    median.
    """
    tree = {
        "rounds": 2,
        "topology": {"institutions": 0, "devices": 3},
        "links": {"check": "off"},
        "cloud": {
            "aggregation": {"name": "median"},
            "norm_bound": {"action": "refuse", "factor": 1.0},
        },
    }
    seen: list[Any] = []
    lab = ScenarioLab(
        parse(tree),
        seed=1,
        model_bytes=10_000,
        observe=lambda event, facts: seen.append((event, facts)),
    )
    outcome = lab.run()
    assert outcome.ok, outcome.result
    reasons = [facts["reason"] for event, facts in seen if event == "refused"]
    assert len(reasons) == 2 * 3
    assert sum("2 uploads do not protect from wrong one" in reason for reason in reasons) == 2 * 2


# The bound of steps' lengths, before any rule

CHILDREN: Final = tuple("abcdefg")
LENGTHS: Final = [1.0, 2.0, 3.0, 4.0, 5.0, 50.0, 800.0]  # the median is 4


def bounded(action: Any, factor: float = 3.0, tree: dict[str, Any] | None = None) -> Rule:
    return rule_of(tree or UNIFORM, start=1.0, bound=NormBound(action=action, factor=factor))


def play(rule: Rule, lengths: list[float], *, r: int = 0) -> tuple[Doubles, Aggregated]:
    """Let the children move so far, in random directions; return the uploads' steps [K, D] and the
    outcome.
    """
    sent = {child: row for row, those in rule.dispatch(r, CHILDREN) for child in those}
    rows_K = np.stack(list(sent.values()))
    steps_KD = np.random.default_rng(r).normal(size=(len(CHILDREN), D))
    steps_KD *= (np.array(lengths) / np.linalg.norm(steps_KD, axis=1))[:, None]
    steps_KD = steps_KD[[CHILDREN.index(child) for child in sent]]
    LAYOUT.floats(rows_K)[:, :D] += steps_KD.astype(np.float32)
    return steps_KD, aggregate(rule, r, sent, rows_K, [Report(10, 0.5)] * len(sent))


def moved(rule: Rule) -> Doubles:
    return LAYOUT.floats(rule.model)[:D].astype(np.float64) - 1.0


def test_longer_steps_are_clipped_to_the_bound() -> None:
    rule = bounded("clip", 2.0)
    steps_KD, outcome = play(rule, LENGTHS)
    steps_KD[5] *= 8 / 50
    steps_KD[6] *= 8 / 800
    np.testing.assert_allclose(moved(rule), steps_KD.mean(axis=0), atol=2e-5)
    assert outcome.facts["clipped"] == ["f", "g"] and not outcome.left_out
    assert outcome.facts["step_lengths"] == pytest.approx(
        dict(zip(CHILDREN, LENGTHS, strict=True)), rel=1e-4
    )


def test_longer_steps_are_left_out_and_named() -> None:
    rule = bounded("refuse", 2.0)
    steps_KD, outcome = play(rule, LENGTHS)
    np.testing.assert_allclose(moved(rule), steps_KD[:5].mean(axis=0), atol=2e-5)
    assert (
        outcome.left_out.keys() == {"f", "g"}
        and "200 times as long as the median" in outcome.left_out["g"]
    )
    assert outcome.distances.keys() == set("abcde")


@pytest.mark.parametrize("action", ["clip", "refuse"])
@pytest.mark.parametrize("tree", LEAST.values(), ids=LEAST)
def test_a_bound_that_nobody_reaches_changes_no_bit_of_any_rule(
    tree: dict[str, Any], action: Any
) -> None:
    far, plain = bounded(action, 1e6, tree), bounded("off", tree=tree)
    for r in range(3):
        for rule in (far, plain):
            play(rule, LENGTHS, r=r)
        assert np.array_equal(far.model, plain.model)


@pytest.mark.parametrize("action", ["clip", "refuse"])
@given(lengths=st.lists(st.floats(0, 1e6), min_size=7, max_size=7), factor=st.floats(1, 10))
@examples(30)
def test_half_of_the_uploads_stay_as_they_are_and_the_model_moves_by_the_bound_at_most(
    action: Any, lengths: list[float], factor: float
) -> None:
    rule = bounded(action, factor)
    _, outcome = play(rule, lengths)
    named = outcome.facts["clipped" if action == "clip" else "left_out"]
    assert isinstance(named, list) and len(named) <= 3
    assert np.isfinite(outcome.loss)
    assert np.linalg.norm(moved(rule)) <= factor * np.median(lengths) * (1 + 1e-4) + 1e-4


def changes_of(rule: Rule, steps: list[float], changes: list[float]) -> Aggregated:
    """Let children of SCAFFOLD move, and return changes of their control variates, so far in the
    first column.
    """
    ((row, children),) = rule.dispatch(0, CHILDREN)
    rows_K = np.stack([row] * len(children))
    LAYOUT.floats(rows_K)[:, 0] += np.array(steps)
    changes_K = rows_K[:, LAYOUT.row_bytes :].view(np.float32)
    changes_K[:] = 0
    changes_K[:, 0] = changes
    return aggregate(rule, 0, children, rows_K, [Report(10, 0.5)] * len(children))


def test_vectors_behind_the_model_are_bounded_as_well() -> None:
    """The model of a poisoned child is as the others', its control variate's change is not."""
    tree: dict[str, Any] = {"name": "scaffold"}
    clipped = bounded("clip", 2.0, tree)
    outcome = changes_of(clipped, [1.0] * 7, LENGTHS)
    assert outcome.facts["control_change_lengths"] == dict(zip(CHILDREN, LENGTHS, strict=True))
    assert outcome.facts["clipped"] == ["f", "g"] and outcome.facts["step_lengths"]["g"] == 1.0  # type: ignore[index]
    ((row, _),) = clipped.dispatch(1, CHILDREN)
    control = row[LAYOUT.row_bytes :].view(np.float32)
    # over the node's one child
    assert control[0] == pytest.approx(1 + 2 + 3 + 4 + 5 + 8 + 8) and not control[1:].any()
    refused = changes_of(bounded("refuse", 2.0, tree), [1.0] * 7, LENGTHS)
    assert refused.left_out["g"] == "its control_change is 200 times as long as the median"
    assert list(refused.left_out) == ["g", "f"]


def test_at_least_half_stay_however_many_vectors_are_long() -> None:
    """Three children are too long in their steps, and three others in the vectors behind: the
    farthest three go.
    """
    rule = bounded("refuse", 1.0, {"name": "scaffold"})
    outcome = changes_of(rule, [1, 1, 1, 1, 10, 20, 30], [40, 15, 5, 1, 1, 1, 1])
    assert set(outcome.left_out) == {"a", "f", "g"}
    assert outcome.left_out["a"].startswith("its control_change") and outcome.left_out[
        "f"
    ].startswith("its step")


def test_uploads_that_a_bound_leaves_out_do_not_protect() -> None:
    """Krum gets four of five uploads, of which one may be wrong."""
    _, outcome = aggregated(
        {"name": "krum"}, models(5, poisoned=1), bound=NormBound(action="refuse", factor=2.0)
    )
    assert outcome.left_out["c4"].startswith("its step is") and outcome.left_out["c0"].startswith(
        "4 uploads"
    )


def test_its_rule_keeps_its_state(tmp_path: Path) -> None:
    one, other = (bounded("clip", tree={"name": "fedavgm"}) for _ in range(2))
    play(one, LENGTHS)
    facts = one.save(tmp_path)
    other.begin(one.model.copy())
    other.restore(tmp_path, facts)
    for each in (one, other):
        play(each, LENGTHS, r=1)
    assert np.array_equal(one.model, other.model)


@pytest.mark.parametrize(
    ("action", "rule"),
    slow(
        product(("clip", "refuse"), ("fedavg", "fedcross", "fedcda")),
        but=[("clip", "fedcross"), ("refuse", "fedcda")],
    ),
)
def test_a_lab_with_tempo_ends_well(action: str, rule: str) -> None:
    """At both tiers, also for K models and for cached uploads, and with distances of those that are
    left out.
    """
    bound = {"action": action, "factor": 1.0}
    tree = {
        "rounds": 3,
        "topology": {"institutions": 3, "devices": 9},
        "links": {"check": "off"},
        "cloud": {
            "aggregation": {"name": rule},
            "norm_bound": bound,
            "epoch_control": {"name": "tempo"},
        },
        "institution": {"aggregation": {"name": rule}, "norm_bound": bound},
    }
    outcome = ScenarioLab(parse(tree), seed=1, model_bytes=10_000).run()
    assert outcome.ok, outcome.result
