"""What devices minimise: against plain PyTorch loops; the heads of models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.models import classifier_of, head_places, with_features
from fedstrata.common.settings.training import OBJECTIVES, CrossEntropy, FedProx, TrainingSettings
from fedstrata.deploy.planning import trainings
from fedstrata.device.training import trainer
from fedstrata.device.training.objectives import objectives_by_name
from fedstrata.device.training.objectives.objective import Minibatch, Objective
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.sgd import NO_VECTORS, features_of
from tests.helpers.plain import Vectors, plain_steps
from tests.helpers.steps import run_steps
from tests.test_models import SIZES

Batches = list[tuple[int, Tensor, Tensor]]


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
    assert {*objectives_by_name.BUILT, "cross_entropy"} == set(OBJECTIVES)


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


OPTIMISERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0},
    "momentum": {"momentum": 0.9, "weight_decay": 0.05},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "adam": {"optimizer": {"name": "adam", "weight_decay": 0.05, "beta2": 0.9}},
    "adamw": {"optimizer": {"name": "adamw", "beta1": 0.0, "epsilon": 0.1}},
}
VALUES: dict[str, list[dict[str, Any]]] = {
    "cross_entropy": [{}],
    "fedprox": [{"mu": 0.0}, {"mu": 1.0}],
    "fedsam": [{"rho": 0.0}, {"rho": 1.0}],
    "scaffold": [{}],
    "feddyn": [{"alpha": 0.3}],
    "moon": [{"mu": 0.0}, {"mu": 1.0}, {"mu": 5.0, "temperature": 0.1}],
}


def stepped(module: nn.Module, training: TrainingSettings, vectors: Vectors = NO_VECTORS) -> Tensor:
    """Train a module on the batches; return the sum of the last epoch's losses."""
    seen: list[int] = []
    losses, steps = run_steps(
        module,
        list(module.parameters()),
        some_batches(),
        training=training,
        learning_rate=0.1,
        last_epoch=1,
        watch=seen.append,
        buffers=list(module.buffers()),
        vectors=vectors,
        features=features_of(module, training, device=torch.device("cpu")),
    )
    assert seen == list(range(steps)) and steps == len(some_batches())
    return losses


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize(
    ("name", "keys"), [(name, keys) for name, all_of_them in VALUES.items() for keys in all_of_them]
)
def test_steps_are_those_of_a_plain_loop(name: str, keys: dict[str, Any], optimiser: str) -> None:
    """In double precision, where another formula makes a difference, however small a term it has."""
    source = torch.Generator().manual_seed(2)
    for clip_norm, kept in ((None, False), (0.3, True)):
        ours, theirs = net(), net()
        training = TrainingSettings.model_validate(
            {"objective": {"name": name, **keys}, "clip_norm": clip_norm, **OPTIMISERS[optimiser]}
        )
        objective = objective_of(training)
        vectors = {}
        for each in (*objective.keeps, *objective.receives):
            vectors[each] = [torch.zeros_like(weight) for weight in ours.parameters()]
            if kept or each != "previous":  # without one, the received model is the previous one
                for part in vectors[each]:
                    part.normal_(generator=source)
        losses = stepped(ours, training, vectors)
        wanted, _ = plain_steps(
            theirs, some_batches(), training=training, rate=0.1, last_epoch=1, vectors=vectors
        )
        for mine, other in zip(
            ours.state_dict().values(), theirs.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
        assert float(losses) == pytest.approx(wanted, rel=1e-9)


def test_a_layer_that_is_never_called_stays_as_it_is() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.fc = nn.Linear(4, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(x)
            return logits

    for name in ("fedprox", "fedsam"):
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
    monkeypatch.setattr(objectives_by_name, "named_in_module", lambda _: lambda _: Own())
    for mine, other in zip(trained(), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


# Devices


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
    for objective in ("cross_entropy", "fedsam"):
        passes = 0
        # so short that it ends before a first progress message
        training = {"objective": objective, "epochs": 1}
        data = {"dataset": "synthetic", "samples": 50, "classes": 10, "image_shape": [1, 8, 8]}
        lab = parse({"model": {"name": "mlp_digits"}, "data": data, "training": training})
        module = models.build(lab.model.name, lab.seed, inputs=datasets.load(lab.data).inputs)
        first = models.layout_of(module).empty()
        speed = trainings.train(lab, first=first, training_s=0.0)
        assert speed.step_s > 0
        steps.append(passes)
    assert steps[1] == 2 * steps[0] > 0


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


def test_what_gives_no_features_is_refused() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"model\.name = 'Conv2d': it has no torch\.nn\.Linear.*End it with"
    ):
        classifier_of(nn.Conv2d(1, 10, 3))


def test_a_head_is_part_of_the_experiment() -> None:
    plain, head = parse({}), parse({"model": {"projection": 256}})
    assert parse(head.to_json()) == head and head.digest != plain.digest
    module = models.of(head, inputs=Inputs((1, 8, 8), 10))
    assert classifier_of(module)[1].in_features == 256
