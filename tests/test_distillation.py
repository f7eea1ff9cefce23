"""FedDF, FedBE and FedLAW on a node's samples: against plain torch, and where the answer is known."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from common.learning import models
from common.learning.distillation import distil, distil_ensemble, moments, sharpened
from common.learning.learned_weights import learn_weights
from common.learning.refiner import NodeSamples
from common.methods.refined import FedBE, FedDF, FedLAW
from common.model.layout import Row, Section
from common.model.refinement import RoundModels
from common.randomness import Purpose


class Toy(NodeSamples):
    """A module and its samples, as a node has them."""

    def __init__(self, module: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        self.module, self.labels, self.partition = module.eval(), labels, ""
        self.layout = models.layout_of(module)
        self.weights = list(module.parameters())
        self.moved = lambda: None
        self._samples, self._normalise = inputs, lambda images: images
        self._node, self._seed, self._anew = "cloud", 1, None


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def toy(samples: int = 20) -> Toy:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=draw)
    return Toy(net(), inputs, torch.randint(3, (samples,), generator=draw))


def rows_of(node: NodeSamples, count: int) -> RoundModels:
    """Return uploads of equal weights around a random model, and their mean."""
    layout, draw = node.layout, np.random.default_rng(2)
    rows = []
    for _ in range(count + 2):
        row = np.zeros(layout.row_bytes, np.uint8)
        layout.floats(row)[:] = 0.7 * draw.normal(size=layout.columns)
        layout.floats(row)[layout.parameters :] = 1 + 0.5 * draw.random(layout.columns - layout.parameters)
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


def assert_close(node: NodeSamples, row: Row, module: nn.Module, start: Row, *, atol: float = 2e-6) -> None:
    """Compare parameters with a module's; buffers and counters must be those of the start, bit for bit."""
    found, begun = state(node, row), state(node, start)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)
    for name, _ in module.named_buffers():
        assert torch.equal(found[name], begun[name])


def inputs_of(node: Toy) -> Tensor:
    return node._samples


def test_feddf_is_torchs_adam_and_cosine_on_the_divergence() -> None:
    node = toy()
    these, settings = rows_of(node, 3), FedDF(steps=15, batch_size=8, learning_rate=0.01, clip_norm=0.1)
    start = these.mean.copy()
    inputs = inputs_of(node)
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
    these = rows_of(node, 3)
    start = these.mean.copy()
    facts = distil(node, FedDF(steps=5000, patience=100, learning_rate=50.0, clip_norm=1e6), these)
    assert facts["steps"] == 100 and facts["kept_step"] == 0  # such steps lead nowhere
    assert facts["divergence_after"] == facts["divergence_before"] and np.array_equal(these.mean, start)


@pytest.mark.parametrize("kind", ["gaussian", "dirichlet"])
def test_fedbe_is_torchs_sgd_on_the_sharpened_ensemble(kind: Any) -> None:
    node = toy()
    these, settings = rows_of(node, 3), FedBE(teachers=kind, samples=4, epochs=5, batch_size=8, learning_rate=0.05)
    start, inputs, layout = these.mean.copy(), inputs_of(node), node.layout
    draw, rows = node.draw(Purpose.TEACHERS, r=5), [start]
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
        all_of_them = [functional.softmax(module_with(node, row)(inputs), 1) for row in (*rows, *these.uploads)]
        squares = (sum(all_of_them, torch.zeros(())) / 8) ** 2
        target = squares / squares.sum(1, keepdim=True)
    student = module_with(node, start)
    optimiser = torch.optim.SGD(student.parameters(), 0.05, momentum=0.9)
    ends = []
    for step, places in enumerate(order(node, 8)[:15], 1):  # 20 samples: three batches in each of five epochs
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
    these = rows_of(node, 2)
    these.uploads[0][:] = these.received
    centres, scales = moments(node, these)
    assert np.isfinite(centres).all() and np.isfinite(scales).all()
    still = RoundModels(5, these.layout, these.mean, these.received, [these.received] * 2, these.weights_K)
    centres, scales = moments(node, still)
    np.testing.assert_array_equal(centres, node.layout.floats(these.received)[: node.layout.parameters])
    assert not scales.any()


def test_sharpening_at_1_leaves_probabilities() -> None:
    probabilities = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    torch.testing.assert_close(sharpened(probabilities, 1.0), probabilities)
    torch.testing.assert_close(
        sharpened(probabilities, 0.5), torch.tensor([[0.04, 0.64], [0.5, 0.5]]) / torch.tensor([[0.68], [1.0]])
    )


def test_fedlaw_is_torchs_adam_on_gamma_and_lambda() -> None:
    node = toy()
    these = rows_of(node, 3)
    these = RoundModels(5, these.layout, these.mean, these.received, these.uploads, np.array([0.5, 0.3, 0.2]))
    inputs, states = inputs_of(node), [state(node, row) for row in these.uploads]
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
    """Two features, each known to one upload: their best margins are ln 3 and ln 7, of 3 in 4 and 7 in 8 samples."""
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
    these = rows_of(node, 3)
    facts = learn_weights(
        node,
        FedLAW(epochs=3),
        RoundModels(5, these.layout, these.mean, these.received, these.uploads, np.array([0.5, 0.0, 0.5])),
    )
    assert facts["lambdas"][1] == 0 and np.isfinite(facts["lambdas"]).all() and np.isfinite(facts["loss_after"])
