"""Recorded steps of users' own code: none unless it is asked for, and then compared as they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import ARCHITECTURES, layers_in
from fedstrata.common.text import NOTE
from fedstrata.device.jobs import VMAPPED_DEVICES_MOST, most_together
from fedstrata.device.training import recording
from fedstrata.device.training import trained_network as network
from fedstrata.device.training.objectives.objective import Minibatch, Objective
from fedstrata.device.training.recording import Comparison, Program
from fedstrata.device.training.trained_network import record, source_of
from fedstrata.device.training.trainer import Trainer
from fedstrata.device.training.vectors import vectors_of
from tests.helpers import rare_models
from tests.helpers.odd_models import Net
from tests.helpers.plain import first_model, trained, trainer_of

RARE = "tests.helpers.rare_models"
ODD = "tests.helpers.odd_models"


def lab_of(model: str, **training: Any) -> Experiment:
    """Return an experiment whose first device has 63 samples: six batches of 10, and one of 3."""
    settings = {"batch_size": 10, "learning_rate": 0.02, **training}
    return parse({"topology": {"devices": 23}, "model": {"name": model}, "training": settings})


def recorded_sizes(trainer: Trainer) -> int:
    """Return how many sizes of batches have a program."""
    return sum(
        program is not None for program in trainer._prepared.source.recorded.programs.values()
    )


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.removeprefix(NOTE) for line in caplog.messages if line.startswith(NOTE)]


@pytest.mark.parametrize(
    ("name", "alone"),
    {
        "sequential": True,
        "frozen_layer": True,
        "own_layer": False,
        "own_stack": False,
        "counting_layer": False,
        "counting_hook": False,
        "counting_forward": False,
        "hooked_weight": False,
        "watched_weight": False,
        "parametrised": False,
        "orthogonal": False,
        "Exits": False,
    }.items(),
)
def test_a_net_of_torchs_layers_alone_is_recognised(name: str, alone: bool) -> None:
    assert (layers_in(getattr(rare_models, name)()) is not None) is alone
    assert recorded_sizes(trainer_of(lab_of(f"{RARE}:{name}"))) == (2 if alone else 0)


def test_a_hook_of_all_modules_is_own_code() -> None:
    net = rare_models.sequential()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert layers_in(net) is None
    finally:
        handle.remove()
    assert layers_in(net) is not None


def test_a_changed_class_of_torchs_is_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Tanh, "forward", Net.features)
    assert layers_in(rare_models.sequential()) is None


@pytest.mark.parametrize(
    ("model", "training", "count"),
    [
        ("mlp_digits", {}, 2),
        ("mlp_digits", {"objective": {"name": "fedprox"}}, 2),
        ("mlp_digits", {"recorded": False}, 0),
        ("mlp_digits", {"loss": f"{RARE}:plain_loss"}, 0),
        ("mlp_digits", {"objective": {"name": "tests.test_own_recorded:Halved"}}, 0),
        ("mlp_digits", {"loss": f"{RARE}:plain_loss", "recorded": True}, 2),
        (
            "mlp_digits",
            {"objective": {"name": "tests.test_own_recorded:Halved"}, "recorded": True},
            2,
        ),
        (f"{ODD}:Net", {}, 0),
        (f"{ODD}:Net", {"recorded": True}, 2),
        (f"{ODD}:Net", {"recorded": False}, 0),
        (f"{RARE}:sequential", {"recorded": True}, 2),
        (f"{RARE}:sequential", {"recorded": False}, 0),
        (f"{RARE}:dropped", {}, 0),
        (f"{RARE}:sequential", {"loss": f"{RARE}:plain_loss"}, 0),
    ],
)
def test_own_code_is_recorded_only_where_it_is_asked_for(
    model: str, training: Mapping[str, Any], count: int
) -> None:
    outcomes = []
    for more in ({}, {"recorded": False}):
        trainer = trainer_of(lab_of(model, **{**training, **more}))
        assert recorded_sizes(trainer) == (0 if more else count)
        out, result = trained(trainer, first_model(trainer._experiment), epochs=9)
        outcomes.append((bytes(out), result.loss, result.steps))
    assert outcomes[0] == outcomes[1]


class Halved(Objective):
    """Half the loss."""

    def losses(self, batch: Minibatch, logits: torch.Tensor) -> torch.Tensor:
        return super().losses(batch, logits) / 2


def test_own_code_is_not_vmapped_on_a_gpu() -> None:
    def most(model: str, **training: Any) -> int:
        return most_together(lab_of(model, **training), "cuda:0")

    assert most("mlp_digits") == VMAPPED_DEVICES_MOST
    assert most(f"{ODD}:Net") == 1
    assert most("mlp_digits", loss=f"{RARE}:plain_loss") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LSTMNet", "its operation aten.mkldnn_rnn_layer_backward cannot run in a program"),
        ("Masked", "its operation aten.full has the argument -inf, which a program cannot have"),
        (
            "Fused",
            (
                "its operation aten._scaled_dot_product_flash_attention_for_cpu may draw random "
                "numbers"
            ),
        ),
        ("ClampsData", "the program makes other bits"),
        ("NumpyInBackward", "the operations differ from batch to batch"),
        ("CountsByNumpy", "the operations differ from batch to batch"),
        ("CounterInAList", "code keeps something beside the state, or draws random numbers"),
        ("LateInAList", "code keeps something beside the state, or draws random numbers"),
        ("HookCounts", "code keeps something beside the state, or draws random numbers"),
        ("Replaced", "code keeps something beside the state, or draws random numbers"),
    ],
)
def test_a_net_that_was_asked_for_and_cannot_be_recorded_is_named_once_before_the_run(
    name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(lab_of(f"{RARE}:{name}", recorded=True))
    assert notes(caplog) == [
        f"training.recorded = true: {RARE}:{name} is not recorded, as {reason}."
    ]
    assert recorded_sizes(trainer) == 0
    caplog.clear()
    trainer_of(lab_of(f"{RARE}:{name}"))
    assert notes(caplog) == []


def test_a_net_that_ships_is_named_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "RECORDED_PARAMETERS", 100)
    trainer_of(lab_of("mlp_digits"))
    assert notes(caplog) == []
    trainer_of(lab_of("mlp_digits", recorded=True))
    assert notes(caplog) == [
        "training.recorded = true: mlp_digits is not recorded, as it has more than 100 parameters."
    ]


def test_a_step_that_differs_later_ends_the_programs_and_repeats_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lab = lab_of(f"{RARE}:WithinABand", recorded=True)
    trainer, plain = trainer_of(lab), trainer_of(lab_of(f"{RARE}:WithinABand", recorded=False))
    assert recorded_sizes(trainer) == 2 and notes(caplog) == []
    row = first_model(lab)
    for local_round in range(3):
        out, result = trained(trainer, row, epochs=2, local_round=local_round)
        wanted, right = trained(plain, row, epochs=2, local_round=local_round)
        assert (bytes(out), result.loss, result.steps) == (bytes(wanted), right.loss, right.steps)
        row = out
    problem = (
        f"training.recorded = true: {RARE}:WithinABand is not recorded any more: a recorded "
        "step makes other bits"
    )
    assert notes(caplog) == [f"{problem}. Its training is repeated step by step."]
    assert recorded_sizes(trainer) == 0
    trainer.prepare()
    assert recorded_sizes(trainer) == 0


def test_the_first_step_the_last_one_and_each_64th_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, shipped = lab_of(f"{ODD}:Net", recorded=True), lab_of("mlp_digits", recorded=True)
    trainers = {lab.digest: trainer_of(lab) for lab in (own, shipped)}
    count, compared, take, run = 0, list[int](), Comparison.take, Program.run

    def counted(program: Program, state: Any, batches: Any, **more: Any) -> None:
        nonlocal count
        count += len(batches[0])
        run(program, state, batches, **more)

    def noted(self: Comparison, *given: Any, **more: Any) -> None:
        compared.append(count)
        take(self, *given, **more)

    monkeypatch.setattr(Program, "run", counted)
    monkeypatch.setattr(Comparison, "take", noted)
    _, result = trained(trainers[own.digest], first_model(own), epochs=20)
    assert (result.steps, count, compared) == (140, 140, [0, 64, 128, 139])
    compared.clear()
    trained(trainers[shipped.digest], first_model(shipped), epochs=20)
    assert (count, compared) == (280, [])


def test_a_comparison_sees_what_the_model_begins_to_keep(caplog: pytest.LogCaptureFixture) -> None:
    """From its second comparison on the code draws random numbers, without an effect on the model."""
    lab = lab_of(f"{ODD}:Net", recorded=True)
    trainer = trainer_of(lab)
    calls = iter(range(10))

    def hidden() -> bytes:
        return bytes(next(calls) > 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.device.training.local_training.hidden_in", lambda *_: hidden)
        out, _ = trained(trainer, first_model(lab), epochs=10)
    (note,) = notes(caplog)
    assert (
        "is not recorded any more: code keeps something beside the state, or draws random numbers"
        in note
    )
    wanted, _ = trained(trainer_of(lab_of(f"{ODD}:Net")), first_model(lab), epochs=10)
    assert bytes(out) == bytes(wanted)


def test_a_module_that_a_later_call_makes_otherwise_takes_its_own_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, plain = lab_of(f"{RARE}:sequential"), lab_of(f"{RARE}:sequential", recorded=False)
    trainer, row = trainer_of(lab), first_model(lab)
    assert recorded_sizes(trainer) == 2
    made = rare_models._layers
    monkeypatch.setattr(rare_models, "_layers", lambda *layers: made(*layers, torch.nn.Sigmoid()))
    assert bytes(trained(trainer, row)[0]) == bytes(trained(trainer_of(plain), row)[0])


def test_without_torchscript_one_warning_has_the_factor_of_the_slower_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = lab_of("mlp_digits")
    wanted, _ = trained(trainer_of(lab), first_model(lab))
    monkeypatch.delattr("torch.jit.CompilationUnit")
    for cached in (recording._compiled, network._warn_without_torchscript):
        cached.cache_clear()
    for _ in range(2):
        trainer = trainer_of(lab)
        assert recorded_sizes(trainer) == 0
        assert bytes(trained(trainer, first_model(lab))[0]) == bytes(wanted)
    (note,) = notes(caplog)
    assert (
        "has no TorchScript, so no steps are recorded. Steps of small models take 1.1 to 4 times "
        "as long"
    ) in note
    network._warn_without_torchscript.cache_clear()


SHAPES: Mapping[str, tuple[int, ...]] = {  # of the inputs of the nets that are recorded
    "linear_digits": (1, 8, 8),
    "mlp_digits": (1, 8, 8),
    "cnn_digits": (1, 8, 8),
    "lenet5": (1, 28, 28),
    "lenet_cifar": (3, 32, 32),
    "cnn_femnist": (1, 28, 28),
    "cnn_motions": (6, 1, 128),
    "cnn_fedavg": (1, 28, 28),
    "cnn_fedavg_padded": (1, 28, 28),
    "resnet20": (3, 16, 16),
    "resnet20_b": (3, 16, 16),
    "resnet20_preact": (3, 16, 16),
}
NOT_RECORDED = {"char_lstm", "sent_lstm", "vgg_femnist", "vgg16", "vgg16_bn", "resnet18_cifar"}


def test_each_net_that_ships_is_recorded_or_not() -> None:
    assert ARCHITECTURES.keys() == SHAPES.keys() | NOT_RECORDED


@pytest.mark.parametrize("name", SHAPES)
def test_the_steps_of_nets_that_ship_are_recorded(name: str) -> None:
    """A silent return to steps by autograd would leave all results as they are."""
    data = {"dataset": "synthetic", "classes": 10, "image_shape": [1, 8, 8], "samples": 20}
    lab = parse({"model": {"name": name}, "topology": {"devices": 1}, "data": data})
    source = source_of(lab, Inputs(SHAPES[name], 10), accelerator=torch.device("cpu"))
    record(source, vectors_of(lab, "device-0", source.parts), draws=0, sizes=[2, 3])
    assert [program is not None for program in source.recorded.programs.values()] == [True, True]
