"""Recorded steps: the bits of autograd, and autograd where a step is not a function of the batch
and the state.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.jobs import Order
from fedstrata.device.training import sgd
from fedstrata.device.training import trained_network as network
from fedstrata.device.training.recording import CONTRASTS, NotRecordable, Program, program_of
from fedstrata.device.training.sgd import LocalSteps, run_sgd
from tests.helpers.plain import first_model, trainer_of

Forward = Callable[[nn.Linear, Tensor], Tensor]


def lab_of(model: str, objective: Mapping[str, Any], **keys: Any) -> Experiment:
    rule = "fedgen" if objective["name"] == "fedgen" else "fedavg"
    return parse(
        {
            "topology": {"institutions": 0, "devices": 1},
            "data": {
                "dataset": "synthetic",
                "image_shape": [1, 28, 28] if model == "lenet5" else [1, 8, 8],
                "classes": 10,
                "samples": 24,
            },
            "model": {"name": model},
            "training": {"batch_size": 10, "objective": objective, **keys},
            "cloud": {"aggregation": rule},
        }
    )


def trained(lab: Experiment) -> tuple[dict[int, bool], bytes, float]:
    """Train two rounds in one trainer, each of batches of 10, 10 and 4 samples; say which sizes
    have a program.
    """
    trainer = trainer_of(lab)
    row, out = trainer.vectors.received.empty(), trainer.vectors.returned.empty()
    row[:] = 0
    row[: trainer.layout.row_bytes] = first_model(lab)
    for local_round in (0, 1):
        result = trainer.train(Order(row, out, 3, local_round))
        row = row.copy()
        row[: trainer.layout.row_bytes] = out[: trainer.layout.row_bytes]
    programs = trainer._prepared.source.recorded.programs
    return (
        {size: program is not None for size, program in programs.items()},
        bytes(out),
        result.work.loss,
    )


@pytest.mark.parametrize(
    ("model", "objective", "keys"),
    [
        ("lenet5", {"name": "cross_entropy"}, {}),
        ("cnn_digits", {"name": "fedgen"}, {}),
        ("cnn_digits", {"name": "cross_entropy"}, {"precision": "bf16"}),
    ],
)
def test_training_is_that_of_autograd_bit_for_bit(
    model: str, objective: Mapping[str, Any], keys: Mapping[str, Any]
) -> None:
    programs, *outcome = trained(lab_of(model, objective, **keys))
    assert programs == {10: True, 4: True}
    assert trained(lab_of(model, objective, **keys, recorded=False)) == ({}, *outcome)


def test_a_large_model_trains_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_of("mlp_digits", {"name": "cross_entropy"})
    programs, *outcome = trained(lab)
    monkeypatch.setattr(network, "RECORDED_PARAMETERS", 100)
    assert programs == {10: True, 4: True} and trained(lab) == ({10: False, 4: False}, *outcome)


def batches(count: int, *, seed: int = 1) -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(4, 6, generator=source), torch.randint(0, 3, (4,), generator=source)]
        for _ in range(count)
    ]


def steps_of(forward: Forward, seed: int = 3) -> LocalSteps:
    torch.manual_seed(seed)
    layer = nn.Linear(6, 3)
    training = TrainingSettings.model_validate({"clip_norm": 1.0, "weight_decay": 0.1})
    return LocalSteps(
        lambda inputs: forward(layer, inputs),
        list(layer.parameters()),
        training=training,
        learning_rate=0.1,
    )


def program(forward: Forward, *, hidden: Callable[[], bytes] = bytes) -> Program:
    steps = steps_of(forward)
    before = [tensor.clone() for tensor in steps.state]
    try:
        return program_of(
            steps.take, steps.state, batches(2), rate=0.1, hidden=hidden, factors=CONTRASTS
        )
    finally:
        assert all(map(torch.equal, steps.state, before)), "a trial changes the state"
        assert not any(tensor.grad is not None for tensor in steps.state), "a gradient is left"


@pytest.mark.parametrize(
    "forward",
    [
        lambda layer, inputs: layer(inputs),
        # weights that share a gradient
        lambda layer, inputs: inputs[:, :3] + layer.bias + layer.weight.sum(1),
        lambda layer, inputs: functional.linear(inputs, layer.weight),  # a weight without one
    ],
    ids=["linear", "shared", "unused"],
)
def test_a_program_takes_the_steps_of_autograd(forward: Forward) -> None:
    found, some = program(forward), batches(5, seed=7)
    mine, theirs = steps_of(forward), steps_of(forward)
    stacked = [torch.stack(each) for each in zip(*some, strict=True)]
    losses, taken = run_sgd(
        mine, [(0, *stacked)], last_epoch=0, watch=lambda _: None, programs={4: found}
    )
    expected, _ = run_sgd(theirs, [(0, *stacked)], last_epoch=0, watch=lambda _: None)
    assert taken == 5 and torch.equal(losses, expected)
    assert all(map(torch.equal, mine.state, theirs.state))
    assert not any(weight.grad is not None for weight in mine.state)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weight: Tensor) -> Tensor:
        return outputs + 0 * weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise TypeError("later")


def _fails_after_backward(outputs: Tensor) -> Tensor:
    """Return outputs whose gradients fail, when those of others are there."""
    return _Late.apply(outputs, outputs)  # type: ignore[no-any-return, no-untyped-call]


GENERATOR = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (
            lambda layer, inputs: layer(inputs) + 0 * torch.rand(4, 3),
            "aten.rand may draw random numbers",
        ),
        (lambda layer, inputs: functional.dropout(layer(inputs)), "may draw random numbers"),
        (lambda layer, inputs: layer(inputs) * inputs.sum().item(), "gives Python a value"),
        (
            lambda layer, inputs: layer(inputs) if inputs.sum() > -1e9 else layer(0 * inputs),
            "gives Python a value",
        ),
        (
            lambda layer, inputs: layer(inputs) * (1 + 0 * inputs[inputs > 0].sum()),
            "a shape that depends on values",
        ),
        (
            lambda layer, inputs: (
                layer(inputs) * torch.from_numpy(inputs.numpy().max(1, keepdims=True))
            ),
            "differ from",
        ),
        (
            lambda layer, inputs: (
                layer(inputs) if max(inputs.tolist()[0]) < 50 else 2 * layer(inputs)
            ),
            "differ from",
        ),
        (
            lambda layer, inputs: (
                layer(inputs) if np.asarray(inputs).max() < 50 else 2 * layer(inputs)
            ),
            "differ from",
        ),
        (
            lambda layer, inputs: layer(inputs) + torch.full((4, 3), -np.inf),
            "aten.full has the argument -inf",
        ),
        (lambda layer, inputs: layer(inputs) * GENERATOR.random(), "differ from batch to batch"),
        (
            lambda layer, inputs: layer(inputs) * torch.tensor(GENERATOR.random()),
            "differ from batch to batch",
        ),
        (lambda layer, inputs: layer(inputs.clone()) * inputs.grad, "unsupported operand"),
        (lambda layer, inputs: _fails_after_backward(layer(inputs)), "later"),
    ],
    ids=[
        "random",
        "dropout",
        "item",
        "branch",
        "shape",
        "numpy",
        "list",
        "array",
        "infinite",
        "number",
        "constant",
        "error",
        "late error",
    ],
)
def test_what_depends_on_a_batch_in_other_ways_is_not_recorded(
    forward: Forward, problem: str
) -> None:
    with pytest.raises((NotRecordable, TypeError), match=problem):
        program(forward)


def test_what_code_keeps_beside_the_state_is_noticed() -> None:
    seen: list[int] = []

    def forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
        seen.append(len(inputs))
        result: Tensor = layer(inputs)
        return result

    with pytest.raises(NotRecordable, match="keeps something beside the state"):
        program(forward, hidden=lambda: bytes(len(seen)))
    assert program(forward) is not None  # who looks at nothing sees nothing


def test_progress_and_cancellation_are_looked_at_within_a_long_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sgd, "RUN_S", 0.0)
    found, some = program(lambda layer, inputs: layer(inputs)), batches(30)
    stacked = [torch.stack(each) for each in zip(*some, strict=True)]
    seen: list[int] = []
    steps = steps_of(lambda layer, inputs: layer(inputs))
    run_sgd(steps, [(0, *stacked)], last_epoch=0, watch=seen.append, programs={4: found})
    assert seen == [0, *range(8, 30)]


@pytest.mark.slow
def test_recording_does_not_import_the_compiler() -> None:
    """It would take seconds and 150 MB in each process that trains."""
    text = (
        "import sys, torch\n"
        "from torch import nn\n"
        "from fedstrata.common.settings.training import TrainingSettings\n"
        "from fedstrata.device.training.recording import program_of\n"
        "from fedstrata.device.training.sgd import LocalSteps\n"
        "layer = nn.Linear(3, 2)\n"
        "steps = LocalSteps(layer, list(layer.parameters()), training=TrainingSettings(), "
        "learning_rate=0.1)\n"
        "batches = [[torch.randn(2, 3), torch.arange(2)] for _ in range(2)]\n"
        "assert program_of(steps.take, steps.state, batches, rate=0.1)\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


def test_a_program_is_not_used_for_batches_of_another_form() -> None:
    found, steps, wide = program(lambda layer, inputs: layer(inputs)), [], torch.randn(3, 6, 4).mT
    labels = torch.zeros(3, 4, dtype=torch.int64)
    assert found.fits([wide.contiguous(), labels]) and not found.fits([wide, labels])
    assert not found.fits([wide.contiguous().double(), labels]) and not found.fits(
        [wide.contiguous(), labels.int()]
    )
    for inputs in (wide, wide.contiguous()):
        taken = steps_of(lambda layer, inputs: layer(inputs))
        run_sgd(taken, [(0, inputs, labels)], last_epoch=0, watch=steps.append, programs={4: found})
    assert steps == [0, 1, 2, 0]
