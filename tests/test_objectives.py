"""What devices minimise: against plain PyTorch loops, in-process and vmapped, in labs; the heads of
models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.models import classifier_of, head_places, with_features
from fedstrata.common.model.layout import Row
from fedstrata.common.settings.training import OBJECTIVES, CrossEntropy, FedProx, TrainingSettings
from fedstrata.deploy.planning import trainings
from fedstrata.device.jobs import Order
from fedstrata.device.training import trainer
from fedstrata.device.training.objectives import table
from fedstrata.device.training.objectives.objective import Minibatch, Objective
from fedstrata.device.training.objectives.table import objective_of
from fedstrata.device.training.sgd import features_of
from fedstrata.device.training.trainer import Trainer
from tests.helpers.commands import DEMO, run_lab, tensors
from tests.helpers.commands import table as device_rows
from tests.helpers.direct import run_direct
from tests.helpers.steps import run_steps
from tests.helpers.vmapped import needs_cuda
from tests.test_models import SIZES

Batches = list[tuple[int, Tensor, Tensor]]
SMALL = (
    "topology.institutions=2",
    "topology.devices=4",
    "rounds=2",
    "institution.rounds=2",
    "training.batch_size=50",
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# The experiment's tables


def test_the_default_is_cross_entropy() -> None:
    assert parse({}).training.objective == CrossEntropy()
    assert parse({"training": {"objective": {}}}).training.objective == CrossEntropy()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_known_by_its_name(name: str) -> None:
    rule = (
        {"institution": {"aggregation": {"name": OBJECTIVES[name].rule}}}
        if OBJECTIVES[name].rule
        else {}
    )
    lab = parse({"training": {"objective": {"name": name}}} | rule)
    assert type(lab.training.objective) is OBJECTIVES[name] and parse(lab.to_json()) == lab
    assert isinstance(objective_of(lab.training), Objective)
    assert {*table.BUILT, "cross_entropy"} == set(OBJECTIVES)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "fedprx"}, r"name = 'fedprx': no objective has this name.*mean 'fedprox'\?"),
        ({"name": "x"}, r"name = 'x': .*There are: cross_entropy, .*, feddyn, moon, fedgen\."),
        (
            {"mu": 0.1},
            r"mu = 0\.1: unknown key.*belongs to fedprox and moon; this is cross_entropy",
        ),
        (
            {"name": "fedsam", "mu": 0.1},
            r"mu = 0\.1: .*belongs to fedprox and moon; this is fedsam",
        ),
        ({"name": "fedprox", "muu": 0.1}, r"muu = 0\.1: unknown key.*Did you mean 'mu'\?"),
        ({"name": "fedprox", "mu": -0.1}, r"mu = -0\.1: too small. Write 0 or more"),
        ({"name": "fedprox", "mu": float("nan")}, r"mu = nan: .*finite"),
        ({"name": "fedprox", "mu": "0.1"}, r"mu = '0\.1': .*number"),
        ({"name": "fedsam", "rho": -1.0}, r"rho = -1\.0: too small. Write 0 or more"),
    ],
)
def test_what_cannot_be_is_refused(settings: Any, problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=rf"training\.objective\.{problem}"):
        parse({"training": {"objective": settings}})


# Steps against a plain loop


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def some_batches() -> Batches:
    source = torch.Generator().manual_seed(1)
    return [
        (epoch, torch.randn(size, 6, generator=source, dtype=torch.float64), torch.arange(size) % 3)
        for epoch, size in ((0, 5), (0, 2), (1, 5), (1, 2))
    ]


def proximal_gradients(
    module: nn.Module, received: Sequence[Tensor], mu: float, inputs: Tensor, labels: Tensor
) -> Any:
    """Write the gradients of the whole loss, by autograd; return the cross-entropy."""
    loss = functional.cross_entropy(module(inputs), labels)
    pairs = zip(module.parameters(), received, strict=True)
    torch.autograd.backward(loss + mu / 2 * sum((w - w0).square().sum() for w, w0 in pairs))
    return loss.item()


def sharpness_aware_gradients(
    module: nn.Module, received: Sequence[Tensor], rho: float, inputs: Tensor, labels: Tensor
) -> Any:
    """Write the gradients at the moved parameters, of a second module; return the cross-entropy."""
    moved = copy.deepcopy(module)
    loss = functional.cross_entropy(module(inputs), labels)
    slopes = torch.autograd.grad(loss, list(module.parameters()))
    norm = torch.cat([slope.flatten() for slope in slopes]).norm()
    with torch.no_grad():
        for w, slope in zip(moved.parameters(), slopes, strict=True):
            w.add_(rho * slope / norm)
    torch.autograd.backward(functional.cross_entropy(moved(inputs), labels))
    for w, other in zip(module.parameters(), moved.parameters(), strict=True):
        w.grad = other.grad
    return loss.item()


def stepped(module: nn.Module, training: TrainingSettings) -> Tensor:
    """Train a module on the batches; return the sum of the last epoch's losses."""
    losses, _ = run_steps(
        module,
        list(module.parameters()),
        some_batches(),
        training=training,
        learning_rate=0.1,
        last_epoch=1,
        watch=lambda _: None,
        buffers=list(module.buffers()),
    )
    return losses


TWINS: dict[str, tuple[str, Callable[..., Any]]] = {
    "fedprox": ("mu", proximal_gradients),
    "fedsam": ("rho", sharpness_aware_gradients),
}


@pytest.mark.parametrize("name", TWINS)
@given(
    value=st.sampled_from([0.0, 0.01, 1.0]),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.05]),
    clip_norm=st.sampled_from([None, 0.3]),
)
def test_steps_are_those_of_a_plain_loop(
    name: str,
    value: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    clip_norm: float | None,
) -> None:
    ours, theirs = net(), net()
    key, gradients = TWINS[name]
    keys = {
        "momentum": momentum,
        "nesterov": nesterov and momentum > 0,
        "weight_decay": weight_decay,
    }
    keys |= {"clip_norm": clip_norm, "objective": {"name": name, key: value}}
    training = TrainingSettings.model_validate(keys)
    losses = stepped(ours, training)
    received = [weight.detach().clone() for weight in theirs.parameters()]
    optimiser = torch.optim.SGD(
        theirs.parameters(), 0.1, momentum, weight_decay=weight_decay, nesterov=training.nesterov
    )
    last = 0.0
    for epoch, inputs, labels in some_batches():
        optimiser.zero_grad()
        loss = gradients(theirs, received, value, inputs, labels)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
        optimiser.step()
        last += loss * len(labels) if epoch == 1 else 0.0
    for (entry, mine), other in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12, msg=entry)
    assert float(losses) == pytest.approx(last, rel=1e-10)


def test_a_layer_that_is_never_called_stays_as_it_is() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.fc = nn.Linear(4, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(x)
            return logits

    for name in TWINS:
        module = Odd().double()
        before = copy.deepcopy(module.state_dict())
        stepped(
            module,
            TrainingSettings.model_validate({"weight_decay": 0.1, "objective": {"name": name}}),
        )
        changed = {
            entry
            for entry, tensor in module.state_dict().items()
            if not torch.equal(tensor, before[entry])
        }
        assert changed == {"fc.weight", "fc.bias"}


def test_an_objective_may_have_a_loss_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proximal term as a loss, differentiated by autograd, gives FedProx."""

    class Own(Objective):
        uses_received = True

        def losses(self, batch: Minibatch, logits: Tensor) -> Tensor:
            pairs = zip(batch.weights, batch.received, strict=True)
            return super().losses(batch, logits) + 0.5 * sum(
                (w - w0).square().sum() for w, w0 in pairs
            )

    def trained() -> list[Tensor]:
        module = net()
        stepped(module, TrainingSettings().model_copy(update={"objective": FedProx(mu=1.0)}))
        return list(module.parameters())

    wanted = trained()
    monkeypatch.setattr(table, "named_in_module", lambda _: lambda _: Own())
    for mine, other in zip(trained(), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


# Devices


def lab_of(
    objective: dict[str, Any] | None, model: str = "cnn_digits", **training: Any
) -> Experiment:
    chosen = {} if objective is None else {"objective": objective}
    shape = [3, 16, 16] if model == "resnet20" else [1, 8, 8]
    data = {"dataset": "synthetic", "samples": 50, "classes": 10, "image_shape": shape}
    return parse({"model": {"name": model}, "data": data, "training": {**training, **chosen}})


def trained(lab: Experiment) -> tuple[bytes, float]:
    trainer = Trainer(lab, node="device-0", accelerator="cpu")
    trainer.prepare()
    row, out = trainer.layout.empty(), trainer.layout.empty()
    module = models.build(lab.model.name, lab.seed, inputs=datasets.load(lab.data).inputs)
    models.write_row(module, trainer.layout, row)
    result = trainer.train(Order(row, out, 2, 1))
    return bytes(out), result.work.loss


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ("cnn_digits", {"batch_size": 32, "weight_decay": 0.01}),
        ("mlp_digits", {"batch_size": 50, "momentum": 0.0, "clip_norm": 0.5}),
        ("mlp_digits", {"batch_size": 50, "nesterov": True, "precision": "bf16"}),
        pytest.param("resnet20", {"batch_size": 10}, marks=pytest.mark.slow),
    ],
)
def test_the_null_setting_is_fedavg_bit_for_bit(model: str, training: dict[str, Any]) -> None:
    plain = trained(lab_of(None, model, **training))
    for null in (
        {"name": "cross_entropy"},
        {"name": "fedprox", "mu": 0.0},
        {"name": "fedsam", "rho": 0.0},
    ):
        assert trained(lab_of(null, model, **training)) == plain
    for other in ({"name": "fedprox"}, {"name": "fedsam"}):
        again = [trained(lab_of(other, model, **training)) for _ in range(2)]
        assert again[0] == again[1] and again[0][0] != plain[0]


def test_a_larger_mu_stays_nearer_to_the_received_model() -> None:
    module = models.build("cnn_digits", 1, inputs=datasets.load(lab_of(None).data).inputs)
    layout = models.layout_of(module)
    first: Row = layout.empty()
    models.write_row(module, layout, first)
    apart = []
    for mu in (0.0, 0.1, 1.0, 10.0):
        row = np.frombuffer(
            trained(lab_of({"name": "fedprox", "mu": mu}, batch_size=1))[0], np.uint8
        )
        apart.append(float(np.linalg.norm(layout.floats(row) - layout.floats(first))))
    assert all(a > b for a, b in pairwise(apart)) and apart[-1] < 0.5 * apart[0]


def test_calibration_measures_the_steps_of_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of a step, from which plans and emulated hardware follow, include the
    objective's.
    """
    passes = 0
    backward = Objective.backward

    def counted(*batch: Any) -> Tensor:
        nonlocal passes
        passes += 1
        return backward(*batch)

    monkeypatch.setattr(Objective, "backward", counted)
    monkeypatch.setattr(trainer, "record", lambda *_, **__: None)
    steps = []
    for objective in (None, {"name": "fedsam"}):
        passes = 0
        # so short that it ends before a first progress message
        lab = lab_of(objective, "mlp_digits", epochs=1)
        module = models.build(lab.model.name, lab.seed, inputs=datasets.load(lab.data).inputs)
        first = models.layout_of(module).empty()
        speed = trainings.train(lab, first=first, training_s=0.0)
        assert speed.step_s > 0
        steps.append(passes)
    assert steps[1] == 2 * steps[0] > 0


# MOON


def moon(**keys: Any) -> TrainingSettings:
    return TrainingSettings.model_validate({"objective": {"name": "moon", **keys}, "momentum": 0.9})


class FeatureNet(nn.Module):
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


def feature_net(seed: int = 3) -> FeatureNet:
    torch.manual_seed(seed)
    return FeatureNet().double()


def image_batches() -> list[tuple[int, Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (0, torch.randn(5, 1, 8, 8, generator=draw, dtype=torch.float64), torch.arange(5) % 3)
        for _ in range(4)
    ]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (5.0, 0.1)])
def test_steps_of_moon_are_those_of_a_plain_loop(mu: float, temperature: float, kept: bool) -> None:
    """The loss as its authors write it: a cross-entropy of two logits, of which the first one is
    right.
    """
    ours, theirs = feature_net(), feature_net()
    received, previous = (
        copy.deepcopy(theirs),
        feature_net(seed=4) if kept else copy.deepcopy(theirs),
    )
    settings = moon(mu=mu, temperature=temperature)
    vector = [w.detach() if kept else torch.zeros_like(w) for w in previous.parameters()]
    found, _ = run_steps(
        ours,
        list(ours.parameters()),
        image_batches(),
        training=settings,
        learning_rate=0.1,
        last_epoch=0,
        watch=lambda _: None,
        buffers=list(ours.buffers()),
        vectors={"previous": vector},
        features=features_of(ours, settings, device=torch.device("cpu")),
    )
    optimiser, losses = torch.optim.SGD(theirs.parameters(), 0.1, 0.9), 0.0
    for _, inputs, labels in image_batches():
        optimiser.zero_grad()
        z = theirs.features(inputs)
        with torch.no_grad():
            others = [other.features(inputs) for other in (received, previous)]
        pairs = (
            torch.stack([functional.cosine_similarity(z, other) for other in others], 1)
            / temperature
        )
        plain = functional.cross_entropy(theirs.out(z), labels)
        whole = plain + mu * functional.cross_entropy(
            pairs, torch.zeros(len(labels), dtype=torch.long)
        )
        whole.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses += 5 * plain.item()
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert float(found) == pytest.approx(losses)


def gradients(settings: TrainingSettings, previous: list[Tensor]) -> tuple[list[Tensor], float]:
    module = feature_net()
    weights = list(module.parameters())
    (_, inputs, labels), *_ = image_batches()
    features = features_of(module, settings, device=torch.device("cpu"))
    batch = Minibatch(
        lambda: module(inputs),
        labels,
        weights,
        [w.detach() + 0.1 for w in weights],
        vectors={"previous": previous},
        features=lambda at: features(inputs, at),
    )
    loss = objective_of(settings).backward(batch)
    return [weight.grad for weight in weights if weight.grad is not None], float(loss)


def test_without_a_previous_model_the_term_is_a_constant() -> None:
    zeros = [torch.zeros_like(weight) for weight in feature_net().parameters()]
    without, loss = gradients(moon(), zeros)
    plain, plain_loss = gradients(moon(mu=0.0), zeros)
    for mine, other in zip(without, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert loss == plain_loss
    noise = [torch.randn(w.shape, dtype=torch.float64) for w in feature_net().parameters()]
    assert any(
        not torch.allclose(a, b) for a, b in zip(gradients(moon(), noise)[0], plain, strict=True)
    )


def test_with_mu_0_a_run_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    tree = {
        "rounds": 2,
        "topology": {"institutions": 1, "devices": 2},
        "model": {"name": "mlp_digits"},
    }
    found = []
    for objective in ({}, {"name": "moon", "mu": 0.0}, {"name": "moon"}):
        chosen = {"training": {"batch_size": 100, "objective": objective}}
        found.append(tensors(run_direct(tmp_path, tree | chosen)))
    assert found[0] == found[1] != found[2]


# Features and heads


@pytest.mark.parametrize(
    ("name", "inputs"), {name: inputs for name, inputs, *_ in SIZES if name != "vgg16"}.items()
)
def test_every_model_has_features_and_takes_a_head(name: str, inputs: Inputs) -> None:
    plain, module = (
        models.build(name, 1, inputs=inputs),
        models.build(name, 1, inputs=inputs, projection=16),
    )
    shape = (2, *inputs.shape)
    batch = torch.randint(0, inputs.tokens, shape) if inputs.tokens else torch.rand(shape)
    width = classifier_of(plain)[1].in_features
    for each, wide in ((plain, width), (module, 16)):
        logits, features = with_features(each.eval(), batch)
        assert logits.shape == (2, inputs.classes) and features.shape == (2, wide)
        path, layout = classifier_of(each)[0], models.layout_of(each)
        weight, bias = layout.head  # FedGen's, by the layout alone
        assert (weight.name, bias and bias.name) == (f"{path}.weight", f"{path}.bias")
        assert weight.shape == (inputs.classes, wide)
        names = [name for name, _ in each.named_parameters()]
        assert [names[i] for i in head_places(each, layout)] == [weight.name, f"{path}.bias"]
    path, _ = classifier_of(plain)
    more = width * width + width + 16 * width + 16 + (16 - width) * inputs.classes
    counts = [sum(weight.numel() for weight in each.parameters()) for each in (module, plain)]
    assert counts[0] - counts[1] == more
    assert not any(
        key.startswith(f"{path}.") and key.count(".") == path.count(".") + 1
        for key in module.state_dict()
    )


def test_other_parameters_take_the_place_of_the_modules() -> None:
    module, other = feature_net(), feature_net(seed=4)
    inputs = image_batches()[0][1]
    logits, features = with_features(module, inputs, dict(other.named_parameters()))
    torch.testing.assert_close(features, other.features(inputs))
    torch.testing.assert_close(logits, other(inputs))
    assert not torch.allclose(features, module.features(inputs))


def test_what_gives_no_features_is_refused() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"model\.name = 'Conv2d': it has no torch\.nn\.Linear.*End it with"
    ):
        classifier_of(nn.Conv2d(1, 10, 3))
    with pytest.raises(
        InvalidExperiment, match=r"model\.projection = 8: .*Build the layers in its function"
    ):
        parse({"model": {"name": "mine:net", "projection": 8}, "data": {"dataset": "digits"}})


def test_a_head_is_part_of_the_experiment() -> None:
    plain, head = parse({}), parse({"model": {"projection": 256}})
    assert parse(head.to_json()) == head and head.digest != plain.digest
    module = models.of(head, inputs=Inputs((1, 8, 8), 10))
    assert classifier_of(module)[1].in_features == 256


# Labs


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [{"name": "fedprox", "mu": 0.0}, {"name": "fedprox", "mu": 1.0}]
)
def test_real_agents_train_with_the_announced_objective(
    objective: dict[str, Any], tmp_path: Path
) -> None:
    pairs = (*SMALL, f'training.objective={{name="fedprox", mu={objective["mu"]}}}')
    plain = run_lab(DEMO, tmp_path / "plain", *SMALL, flags=["--direct"])
    direct = run_lab(DEMO, tmp_path / "direct", *pairs, flags=["--direct"])
    real = run_lab(DEMO, tmp_path / "real", *pairs)
    assert tensors(real) == tensors(direct)
    assert (tensors(real) == tensors(plain)) == (objective["mu"] == 0)


@pytest.mark.gpu
@needs_cuda
def test_real_agents_train_vmapped_with_the_announced_objective(tmp_path: Path) -> None:
    # so many that some come together at any load
    lab = (*SMALL, "topology.institutions=1", "topology.devices=8")
    pairs = (*lab, 'training.objective={name="fedprox", mu=1.0}')
    direct = run_lab(DEMO, tmp_path / "direct", *pairs, flags=["--direct", "--accelerator", "cpu"])
    real = run_lab(DEMO, tmp_path / "real", *pairs)
    assert "vmapped" in {row["path"] for row in device_rows(real / "devices.csv")}
    plain = run_lab(DEMO, tmp_path / "plain", *lab, flags=["--direct", "--accelerator", "cpu"])
    found, wanted, without = (
        load_file(folder / "model.safetensors") for folder in (real, direct, plain)
    )
    for entry, tensor in found.items():
        np.testing.assert_allclose(tensor, wanted[entry], rtol=0, atol=1e-4)
    assert max(np.abs(found[entry] - without[entry]).max() for entry in found) > 1e-3
