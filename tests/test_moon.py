"""MOON: against a plain PyTorch loop with modules of its own; the features, and the projection head."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.training import TrainingSettings
from common.learning import models
from common.learning.inputs import Inputs
from common.learning.models import classifier_of, head_places, with_features
from common.methods.fedgen import head_of
from device.training.objectives.objective import Minibatch
from device.training.objectives.table import objective_of
from device.training.sgd import features_of
from tests.helpers.commands import tensors
from tests.helpers.direct import run_direct
from tests.helpers.steps import run_steps
from tests.test_models import SIZES

CPU = torch.device("cpu")


def training(**keys: Any) -> TrainingSettings:
    return TrainingSettings.model_validate({"objective": {"name": "moon", **keys}, "momentum": 0.9})


class Net(nn.Module):
    """A net whose features a test reads without hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.hidden, self.out = nn.Linear(4 * 6 * 6, 8), nn.Linear(8, 3)

    def features(self, inputs: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.hidden(torch.tanh(self.norm(self.conv(inputs))).flatten(1)))
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(self.features(inputs))
        return logits


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def some_batches() -> list[tuple[int, Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(0, torch.randn(5, 1, 8, 8, generator=draw, dtype=torch.float64), torch.arange(5) % 3) for _ in range(4)]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (5.0, 0.1)])
def test_steps_are_those_of_a_plain_loop(mu: float, temperature: float, kept: bool) -> None:
    """The loss as its authors write it: a cross-entropy of two logits, of which the first one is right."""
    ours, theirs = net(), net()
    received, previous = copy.deepcopy(theirs), net(seed=4) if kept else copy.deepcopy(theirs)
    settings = training(mu=mu, temperature=temperature)
    vector = [w.detach() if kept else torch.zeros_like(w) for w in previous.parameters()]
    found, _ = run_steps(
        ours, list(ours.parameters()), some_batches(), training=settings, learning_rate=0.1, last_epoch=0,
        watch=lambda _: None, buffers=list(ours.buffers()), vectors={"previous": vector},
        features=features_of(ours, settings, device=CPU),
    )  # fmt: skip
    optimiser, losses = torch.optim.SGD(theirs.parameters(), 0.1, 0.9), 0.0
    for _, inputs, labels in some_batches():
        optimiser.zero_grad()
        z = theirs.features(inputs)
        with torch.no_grad():
            others = [other.features(inputs) for other in (received, previous)]
        pairs = torch.stack([functional.cosine_similarity(z, other) for other in others], 1) / temperature
        plain = functional.cross_entropy(theirs.out(z), labels)
        whole = plain + mu * functional.cross_entropy(pairs, torch.zeros(len(labels), dtype=torch.long))
        whole.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses += 5 * plain.item()
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert float(found) == pytest.approx(losses)


def gradients(settings: TrainingSettings, previous: list[Tensor]) -> tuple[list[Tensor], float]:
    module = net()
    weights = list(module.parameters())
    (_, inputs, labels), *_ = some_batches()
    features = features_of(module, settings, device=CPU)
    batch = Minibatch(
        lambda: module(inputs), labels, weights, [w.detach() + 0.1 for w in weights], vectors={"previous": previous},
        features=lambda at: features(inputs, at),
    )  # fmt: skip
    loss = objective_of(settings).backward(batch)
    return [weight.grad for weight in weights if weight.grad is not None], float(loss)


def test_without_a_previous_model_the_term_is_a_constant() -> None:
    zeros = [torch.zeros_like(weight) for weight in net().parameters()]
    without, loss = gradients(training(), zeros)
    plain, plain_loss = gradients(training(mu=0.0), zeros)
    for mine, other in zip(without, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert loss == plain_loss
    noise = [torch.randn(w.shape, dtype=torch.float64) for w in net().parameters()]
    assert any(not torch.allclose(a, b) for a, b in zip(gradients(training(), noise)[0], plain, strict=True))


def test_with_mu_0_a_run_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    tree = {"rounds": 2, "topology": {"institutions": 1, "devices": 2}, "model": {"name": "mlp_digits"}}
    found = []
    for objective in ({}, {"name": "moon", "mu": 0.0}, {"name": "moon"}):
        chosen = {"training": {"batch_size": 100, "objective": objective}}
        found.append(tensors(run_direct(tmp_path, tree | chosen)))
    assert found[0] == found[1] != found[2]


# Features and heads


@pytest.mark.parametrize(("name", "inputs"), {name: inputs for name, inputs, *_ in SIZES if name != "vgg16"}.items())
def test_every_model_has_features_and_takes_a_head(name: str, inputs: Inputs) -> None:
    plain, module = models.build(name, 1, inputs=inputs), models.build(name, 1, inputs=inputs, projection=16)
    shape = (2, *inputs.shape)
    batch = torch.randint(0, inputs.tokens, shape) if inputs.tokens else torch.rand(shape)
    width = classifier_of(plain)[1].in_features
    for each, wide in ((plain, width), (module, 16)):
        logits, features = with_features(each.eval(), batch)
        assert logits.shape == (2, inputs.classes) and features.shape == (2, wide)
        path, layout = classifier_of(each)[0], models.layout_of(each)
        weight, bias = head_of(layout)  # FedGen's, by the layout alone
        assert (weight.name, bias and bias.name) == (f"{path}.weight", f"{path}.bias")
        assert weight.shape == (inputs.classes, wide)
        names = [name for name, _ in each.named_parameters()]
        assert [names[i] for i in head_places(each, layout)] == [weight.name, f"{path}.bias"]
    path, _ = classifier_of(plain)
    more = width * width + width + 16 * width + 16 + (16 - width) * inputs.classes
    counts = [sum(weight.numel() for weight in each.parameters()) for each in (module, plain)]
    assert counts[0] - counts[1] == more
    assert not any(key.startswith(f"{path}.") and key.count(".") == path.count(".") + 1 for key in module.state_dict())


def test_other_parameters_take_the_place_of_the_modules() -> None:
    module, other = net(), net(seed=4)
    inputs = some_batches()[0][1]
    logits, features = with_features(module, inputs, dict(other.named_parameters()))
    torch.testing.assert_close(features, other.features(inputs))
    torch.testing.assert_close(logits, other(inputs))
    assert not torch.allclose(features, module.features(inputs))


def test_what_gives_no_features_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"model\.name = 'Conv2d': it has no torch\.nn\.Linear.*End it with"):
        classifier_of(nn.Conv2d(1, 10, 3))
    with pytest.raises(InvalidExperiment, match=r"model\.projection = 8: .*Build the layers in its function"):
        parse({"model": {"name": "mine:net", "projection": 8}, "data": {"dataset": "digits"}})


def test_a_head_is_part_of_the_experiment() -> None:
    plain, head = parse({}), parse({"model": {"projection": 256}})
    assert parse(head.to_json()) == head and head.digest != plain.digest
    module = models.of(head, inputs=Inputs((1, 8, 8), 10))
    assert classifier_of(module)[1].in_features == 256
