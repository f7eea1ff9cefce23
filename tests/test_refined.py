"""FedDF, FedBE and FedLAW: the rule and its refiner, null settings, the computation against plain
torch, labs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import log
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning import models
from fedstrata.common.learning.refiner import NodeRefiner, NodeSamples
from fedstrata.common.learning.splits import split_of
from fedstrata.common.methods.baselines.distillation import (
    distil,
    distil_ensemble,
    moments,
    sharpened,
)
from fedstrata.common.methods.baselines.learned_weights import learn_weights
from fedstrata.common.methods.baselines.refined import FedBE, FedDF, FedLAW
from fedstrata.common.methods.rule import Aggregated, Rule
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.model.refinement import RoundModels
from tests.helpers import rules
from tests.helpers.commands import tensors
from tests.helpers.direct import events, run_direct
from tests.helpers.examples import slow
from tests.helpers.rules import AddingRefiner, Report, aggregate

NAMES: Final = ("feddf", "fedbe", "fedlaw")
NULL: Final[Mapping[str, dict[str, Any]]] = {
    "feddf": {"steps": 0},
    "fedbe": {"epochs": 0},
    "fedlaw": {"epochs": 0},
}
LAYOUT: Final = ModelLayout.build(
    [
        ("weight", (4, 5), Section.PARAMETER),
        ("mean", (3,), Section.BUFFER),
        ("steps", (), Section.COUNTER),
    ]
)
CHILDREN: Final = ("a", "b", "c", "d")
SAMPLES: Final = (10, 20, 30, 40)


# The node


rule_of = partial(rules.rule_of, layout=LAYOUT)


def uploaded(count: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    rows_K = np.zeros((count, LAYOUT.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:] = np.random.default_rng(seed).normal(size=(count, LAYOUT.columns))
    for k, row in enumerate(rows_K):
        LAYOUT.integers(row)[:] = k
    return rows_K


def play(rule: Rule, missing: tuple[int, ...] = (1,)) -> tuple[npt.NDArray[np.float32], Aggregated]:
    """Return the uploads' floats and the outcome of a round in which some children sent none."""
    rule.dispatch(3, CHILDREN)
    rows_K = uploaded(len(CHILDREN))
    reports = [None if k in missing else Report(SAMPLES[k], 0.1 * k) for k in range(len(CHILDREN))]
    outcome = aggregate(rule, 3, CHILDREN, rows_K, reports)
    return LAYOUT.floats(rows_K), outcome


@pytest.mark.parametrize("weights", ["data", "uniform"])
@pytest.mark.parametrize("name", NAMES)
def test_without_a_step_it_is_fedavg_bit_for_bit_and_needs_no_refiner(
    name: str, weights: str
) -> None:
    null, plain = (
        rule_of(tree | {"weights": weights})
        for tree in ({"name": name, **NULL[name]}, {"name": "fedavg"})
    )
    _, found = play(null)
    _, wanted = play(plain)
    assert np.array_equal(null.model, plain.model) and found == wanted
    assert parse({"cloud": {"aggregation": {"name": name, **NULL[name]}}}).data.node_samples == 0


@pytest.mark.parametrize("name", ["feddf", "fedbe"])
def test_the_refiner_moves_the_parameters_of_the_mean(name: str) -> None:
    refiner, plain = AddingRefiner(steps=7), rule_of({"name": "fedavg"})
    rule = rule_of({"name": name}, refiner=refiner)
    floats_K, outcome = play(rule)
    play(plain)
    D = LAYOUT.parameters
    assert np.array_equal(
        LAYOUT.floats(rule.model)[:D], LAYOUT.floats(plain.model)[:D] + np.float32(1)
    )
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
    refiner = AddingRefiner()
    rule = rule_of({"name": "fedbe"}, refiner=refiner)
    play(rule)
    after = rule.model.copy()
    rule.dispatch(4, CHILDREN)
    aggregate(rule, 4, CHILDREN, uploaded(4, seed=2), [Report(1, 0.5)] * 4)
    assert np.array_equal(refiner.asked[1].received, after)


def test_fedlaw_mixes_parameters_by_gamma_and_lambda_and_buffers_by_lambda() -> None:
    lambdas = [0.5, 0.0, 0.5]
    rule = rule_of({"name": "fedlaw"}, refiner=AddingRefiner(gamma=1.5, lambdas=lambdas))
    floats_K, outcome = play(rule)
    D, mixed = LAYOUT.parameters, 0.5 * floats_K[0].astype(np.float64) + 0.5 * floats_K[3]
    np.testing.assert_allclose(LAYOUT.floats(rule.model)[:D], 1.5 * mixed[:D], rtol=1e-6)
    np.testing.assert_allclose(LAYOUT.floats(rule.model)[D:], mixed[D:], rtol=1e-6)
    assert LAYOUT.integers(rule.model)[0] == 0
    assert (
        outcome.facts["lambdas"] == dict(zip("acd", lambdas, strict=True))
        and "weights" not in outcome.facts
    )
    assert outcome.loss == pytest.approx(0.5 * 0.0 + 0.5 * 0.3)


def test_fedadam_steps_towards_what_fedlaw_has_learned() -> None:
    """Four rounds against FedAdam written out, from the dispatched model by gamma times the mean by
    lambda.
    """
    lambdas, gamma, D = [0.2, 0.3, 0.4, 0.1], 1.2, LAYOUT.parameters
    step = {"name": "fedadam", "learning_rate": 0.1}
    rule = rule_of(
        {"name": "fedlaw", "step": step}, refiner=AddingRefiner(gamma=gamma, lambdas=lambdas)
    )
    z, m, v = np.zeros(D), np.zeros(D), np.full(D, 1e-6)
    for r in range(4):
        ((sent, _),) = rule.dispatch(r, CHILDREN)
        np.testing.assert_allclose(LAYOUT.floats(sent)[:D], z, rtol=1e-5, atol=1e-6)
        rows_K = uploaded(len(CHILDREN), seed=r)
        floats_K = LAYOUT.floats(rows_K).astype(np.float64)
        outcome = aggregate(rule, r, CHILDREN, rows_K, [Report(9, 0.5)] * 4)
        delta = gamma * np.array(lambdas) @ floats_K[:, :D] - z
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        z = z + 0.1 * m / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(LAYOUT.floats(rule.model)[:D], z, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            LAYOUT.floats(rule.model)[D:], np.array(lambdas) @ floats_K[:, D:], rtol=1e-5
        )
        far = {
            child: float(np.linalg.norm(floats_K[k, :D] - z)) for k, child in enumerate(CHILDREN)
        }
        assert outcome.distances == pytest.approx(far, rel=1e-5)
        assert outcome.facts["lambdas"] == dict(zip(CHILDREN, lambdas, strict=True))


def test_a_rule_without_its_refiner_cannot_be_built() -> None:
    with pytest.raises(RuntimeError, match="feddf needs a refiner"):
        rule_of({"name": "feddf"})


# The computation


class Toy(NodeSamples):
    """A module and its samples, as a node has them."""

    def __init__(self, module: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        self.module, self.labels, self.partition = module.eval(), labels, ""
        self.layout = models.layout_of(module)
        self.weights = list(module.parameters())
        self.moved = lambda: None
        self.inputs = self._samples = inputs
        self._normalise = lambda images: images
        self._node, self._seed, self._anew = "cloud", 1, None


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def toy(samples: int = 20) -> Toy:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=draw)
    return Toy(net(), inputs, torch.randint(3, (samples,), generator=draw))


def round_of(node: NodeSamples, count: int) -> RoundModels:
    """Return uploads of equal weights around a random model, and their mean."""
    layout, draw = node.layout, np.random.default_rng(2)
    rows = []
    for _ in range(count + 2):
        row = np.zeros(layout.row_bytes, np.uint8)
        layout.floats(row)[:] = 0.7 * draw.normal(size=layout.columns)
        layout.floats(row)[layout.parameters :] = 1 + 0.5 * draw.random(
            layout.columns - layout.parameters
        )
        rows.append(row)
    mean, received, *uploads = rows
    layout.floats(mean)[:] = np.mean([layout.floats(row) for row in uploads], axis=0)
    return RoundModels(5, layout, mean, received, uploads, np.full(count, 1 / count))


def state(node: NodeSamples, row: Row) -> dict[str, Tensor]:
    """Return a flat model's tensors, copied."""
    return {name: torch.from_numpy(view.copy()) for name, view in node.layout.views(row).items()}


def module_with(node: NodeSamples, row: Row) -> nn.Module:
    module = net().eval()
    module.load_state_dict(state(node, row))
    return module


def order(node: Toy, size: int) -> list[Tensor]:
    """Return the batches of the first passes, which twins share."""
    passes = node.passes(size, r=5)
    return [places for _ in range(10) for places in next(passes)]


def assert_close(
    node: NodeSamples, row: Row, module: nn.Module, start: Row, *, atol: float = 2e-6
) -> None:
    """Compare parameters with a module's; buffers and counters must be those of the start, bit for
    bit.
    """
    found, begun = state(node, row), state(node, start)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)
    for name, _ in module.named_buffers():
        assert torch.equal(found[name], begun[name])


def test_feddf_is_torchs_adam_and_cosine_on_the_divergence() -> None:
    node = toy()
    these, settings = (
        round_of(node, 3),
        FedDF(steps=15, batch_size=8, learning_rate=0.01, clip_norm=0.1),
    )
    start = these.mean.copy()
    inputs = node.inputs
    with torch.no_grad():
        teachers = [module_with(node, row)(inputs) for row in these.uploads]
        target = functional.softmax(sum(teachers, torch.zeros(())) / 3, dim=1)
    student = module_with(node, start)
    optimiser = torch.optim.Adam(student.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 15)
    for places in order(node, 8)[:15]:
        optimiser.zero_grad()
        found = functional.softmax(student(inputs[places]), dim=1)
        (target[places] * (target[places] / found).log()).sum(1).mean().backward()
        nn.utils.clip_grad_norm_(student.parameters(), 0.1)
        optimiser.step()
        schedule.step()
    facts = distil(node, settings, these)
    assert_close(node, these.mean, student, start, atol=1e-5)
    with torch.no_grad():
        after = functional.softmax(student(inputs), dim=1)
    wanted = float((target * (target / after).log()).sum(1).mean())
    assert facts["steps"] == facts["kept_step"] == 15
    assert facts["divergence_after"] == pytest.approx(wanted, rel=1e-3)
    assert facts["divergence_after"] < facts["divergence_before"] / 1.2


def test_feddf_stops_without_gain_and_keeps_the_best_student() -> None:
    node = toy()
    these = round_of(node, 3)
    start = these.mean.copy()
    facts = distil(node, FedDF(steps=5000, patience=100, learning_rate=50.0, clip_norm=1e6), these)
    assert facts["steps"] == 100 and facts["kept_step"] == 0  # such steps lead nowhere
    assert facts["divergence_after"] == facts["divergence_before"] and np.array_equal(
        these.mean, start
    )


@pytest.mark.parametrize("kind", ["gaussian", "dirichlet"])
def test_fedbe_is_torchs_sgd_on_the_sharpened_ensemble(kind: Any) -> None:
    node = toy()
    these, settings = (
        round_of(node, 3),
        FedBE(teachers=kind, samples=4, epochs=5, batch_size=8, learning_rate=0.05),
    )
    start, inputs, layout = these.mean.copy(), node.inputs, node.layout
    draw, rows = node.chance(5, "teachers"), [start]
    V = np.stack([layout.floats(row).astype(np.float64) for row in these.uploads])
    z = layout.floats(these.received).astype(np.float64)
    for _ in range(4):
        row = start.copy()
        if kind == "dirichlet":
            layout.floats(row)[:] = draw.dirichlet([1.0] * 3) @ V
        else:
            noise = draw.standard_normal(layout.parameters, np.float32)
            for entry in layout.entries:
                if entry.section is Section.PARAMETER:
                    part = slice(entry.start, entry.stop)
                    steps = V[:, part] - z[part]
                    norms = np.linalg.norm(steps, axis=1, keepdims=True)
                    spread = np.sqrt(np.maximum((steps / norms).var(axis=0), 1e-5))
                    sampled = (steps / norms).mean(axis=0) + 0.1 * spread * noise[part]
                    layout.floats(row)[part] = z[part] + norms.mean() * sampled
        rows.append(row)
    with torch.no_grad():
        all_of_them = [
            functional.softmax(module_with(node, row)(inputs), 1) for row in (*rows, *these.uploads)
        ]
        squares = (sum(all_of_them, torch.zeros(())) / 8) ** 2
        target = squares / squares.sum(1, keepdim=True)
    student = module_with(node, start)
    optimiser = torch.optim.SGD(student.parameters(), 0.05, momentum=0.9)
    ends = []
    # 20 samples: three batches in each of five epochs
    for step, places in enumerate(order(node, 8)[:15], 1):
        optimiser.zero_grad()
        found = functional.softmax(student(inputs[places]), dim=1)
        (target[places] * (target[places] / found).log()).sum(1).mean().backward()
        optimiser.step()
        if step in (9, 12, 15):
            ends.append([weight.detach().clone() for weight in student.parameters()])
    with torch.no_grad():
        for weight, *values in zip(student.parameters(), *ends, strict=True):
            weight.copy_(sum(values, torch.zeros(())) / 3)
    facts = distil_ensemble(node, settings, these)
    assert_close(node, these.mean, student, start, atol=1e-5)
    assert (facts["teachers"], facts["steps"]) == (8, 15)
    assert facts["divergence_after"] < facts["divergence_before"]


def test_an_upload_that_did_not_move_has_no_direction() -> None:
    node = toy()
    these = round_of(node, 2)
    these.uploads[0][:] = these.received
    centres, scales = moments(node, these)
    assert np.isfinite(centres).all() and np.isfinite(scales).all()
    still = RoundModels(
        5, these.layout, these.mean, these.received, [these.received] * 2, these.weights_K
    )
    centres, scales = moments(node, still)
    np.testing.assert_array_equal(
        centres, node.layout.floats(these.received)[: node.layout.parameters]
    )
    assert not scales.any()


def test_sharpening_at_1_leaves_probabilities() -> None:
    probabilities = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    torch.testing.assert_close(sharpened(probabilities, 1.0), probabilities)
    torch.testing.assert_close(
        sharpened(probabilities, 0.5),
        torch.tensor([[0.04, 0.64], [0.5, 0.5]]) / torch.tensor([[0.68], [1.0]]),
    )


def test_fedlaw_is_torchs_adam_on_gamma_and_lambda() -> None:
    node = toy()
    these = round_of(node, 3)
    these = RoundModels(
        5, these.layout, these.mean, these.received, these.uploads, np.array([0.5, 0.3, 0.2])
    )
    inputs, states = node.inputs, [state(node, row) for row in these.uploads]
    x = torch.tensor([log(0.5), log(0.3), log(0.2), 0.0], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([x], 0.05, betas=(0.5, 0.999))
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 20, 0.5)
    names = {name for name, _ in node.module.named_parameters()}
    passes = node.passes(8, r=5)

    def mixed() -> dict[str, Tensor]:
        lambdas, gamma = torch.softmax(x[:-1], 0), torch.exp(x[-1])
        found = {}
        for name in states[0]:
            total = sum((lambdas[k] * states[k][name].double() for k in range(3)), torch.zeros(()))
            found[name] = (gamma * total if name in names else total.detach()).float()
        return found

    for _ in range(25):
        for places in next(passes):
            optimiser.zero_grad()
            functional.cross_entropy(
                functional_call(node.module, mixed(), (inputs[places],)), node.labels[places]
            ).backward()
            optimiser.step()
        schedule.step()
    x, start = x.detach(), these.mean.copy()
    facts = learn_weights(node, FedLAW(epochs=25, batch_size=8, learning_rate=0.05), these)
    assert facts["gamma"] == pytest.approx(float(torch.exp(x[-1])), rel=1e-4) != 1
    assert facts["lambdas"] == pytest.approx(torch.softmax(x[:-1], 0).tolist(), abs=1e-4)
    assert facts["steps"] == 75 and facts["loss_after"] < facts["loss_before"]
    assert np.array_equal(these.mean, start)


def test_fedlaw_finds_the_gamma_and_the_lambda_that_are_known() -> None:
    """Two features, each known to one upload: their best margins are ln 3 and ln 7, of 3 in 4 and 7
    in 8 samples.
    """
    inputs = torch.eye(2).repeat_interleave(8, dim=0)
    labels = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0])
    node = Toy(nn.Linear(2, 2, bias=False), inputs, labels)
    rows = [np.zeros(node.layout.row_bytes, np.uint8) for _ in range(3)]
    for k in range(2):  # weight [class, feature]
        node.layout.floats(rows[k])[2 + k] = 1.0
    node.layout.floats(rows[2])[2:] = 0.5
    these = RoundModels(0, node.layout, rows[2], rows[2], rows[:2], np.full(2, 0.5))
    facts = learn_weights(node, FedLAW(epochs=200, learning_rate=0.1), these)
    assert facts["gamma"] == pytest.approx(log(21), abs=1e-2)
    assert facts["lambdas"] == pytest.approx([log(3) / log(21), log(7) / log(21)], abs=1e-2)


def test_fedlaw_leaves_a_child_without_samples_out() -> None:
    node = toy()
    these = round_of(node, 3)
    facts = learn_weights(
        node,
        FedLAW(epochs=3),
        RoundModels(
            5, these.layout, these.mean, these.received, these.uploads, np.array([0.5, 0.0, 0.5])
        ),
    )
    assert (
        facts["lambdas"][1] == 0
        and np.isfinite(facts["lambdas"]).all()
        and np.isfinite(facts["loss_after"])
    )


# Labs


def lab(name: str, tier: str = "institution", **keys: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "topology": {"institutions": 2, "devices": 4},
        "model": {"name": "mlp_digits"},
        "data": {"node_samples": 40, "partition": "dirichlet", "concentration": 0.1},
        "training": {"batch_size": 50, "learning_rate": 0.05},
        tier: {"aggregation": {"name": name, **keys}},
    }


@pytest.mark.parametrize(
    ("name", "tier"),
    slow(
        [("feddf", "cloud"), ("fedbe", "institution"), ("fedlaw", "institution")],
        but=[("fedbe", "institution")],
    ),
)
def test_a_labs_plans_report_what_the_refinement_did(name: str, tier: str, tmp_path: Path) -> None:
    tree = lab(name, tier, **({"steps": 60} if name == "feddf" else {}))
    folder = run_direct(tmp_path / "one", tree)
    found = events(folder, "plan", node="cloud" if tier == "cloud" else "institution-1")
    assert len(found) == 2
    for plan in found:
        kind = "loss" if name == "fedlaw" else "divergence"
        assert 0 < plan[f"{kind}_after"] < plan[f"{kind}_before"]
        assert plan["steps"] > 0 and plan["seconds"] >= 0
        if name == "fedlaw":
            assert sum(plan["lambdas"].values()) == pytest.approx(1) and plan["gamma"] > 0
    assert tensors(run_direct(tmp_path / "two", tree)) == tensors(folder)
    assert tensors(run_direct(tmp_path / "plain", lab("fedavg", tier))) != tensors(folder)


@pytest.mark.parametrize(("name", "batches"), [("feddf", 60), ("fedbe", 0), ("fedlaw", 0)])
def test_each_batch_of_a_refinement_is_progress(name: str, batches: int) -> None:
    experiment = parse(lab(name, **({"steps": batches} if batches else {})))
    counts: list[int] = []
    refiner = NodeRefiner(
        experiment,
        "institution-0",
        partition=split_of(experiment).digest,
        watch=lambda: counts.append(refiner.moves),
    )
    assert refiner.layout is not None
    rows = [refiner.layout.empty() for _ in range(4)]
    for seed, row in enumerate(rows):
        refiner.layout.floats(row)[:] = np.random.default_rng(seed).normal(
            0, 0.1, refiner.layout.columns
        )
    facts = refiner.refine(
        RoundModels(0, refiner.layout, rows[0], rows[1], rows[2:], np.full(2, 0.5))
    )
    assert counts == list(range(1, refiner.moves + 1)) and len(counts) > facts["steps"] > 0


def test_another_split_than_the_clouds_is_refused() -> None:
    experiment = parse(lab("feddf"))
    with pytest.raises(
        Exception, match=r"institution-0 splits the data differently than the cloud: digest"
    ):
        NodeRefiner(experiment, "institution-0", partition="other")
    assert (
        NodeRefiner(experiment, "institution-0", partition=split_of(experiment).digest).moves == 0
    )
