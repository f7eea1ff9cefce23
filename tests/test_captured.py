"""Captured gradients: the bits of autograd, and autograd where a pass cannot be replayed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.learning import datasets, models
from device.training import network
from device.training.captured import CapturedGradients
from device.training.trainer import Trainer

Forward = Callable[[nn.Linear, Tensor], Tensor]

SHAPES: Mapping[str, list[int]] = {
    "mlp_digits": [1, 8, 8],
    "cnn_digits": [1, 8, 8],
    "lenet5": [1, 28, 28],
    "lenet_cifar": [3, 32, 32],
    "cnn_femnist": [1, 28, 28],
    "cnn_fedavg": [1, 28, 28],
    "cnn_fedavg_padded": [1, 28, 28],
}


def lab_of(model: str, objective: Mapping[str, Any], **keys: Any) -> Experiment:
    rule = objective["name"] if objective["name"] in ("scaffold", "feddyn") else "fedavg"
    return parse(
        {
            "topology": {"institutions": 0, "devices": 1},
            "data": {"dataset": "synthetic", "image_shape": SHAPES[model], "classes": 10, "samples": 24},
            "model": {"name": model},
            "training": {"batch_size": 10, "objective": objective, **keys},
            "cloud": {"aggregation": {"name": rule}},
        }
    )


def trained(lab: Experiment) -> tuple[CapturedGradients | None, bytes, float]:
    """Train two rounds in one trainer, each of batches of 10, 10 and 4 samples."""
    trainer = Trainer(lab, node="device-0", accelerator="cpu")
    trainer.prepare()
    row, out = trainer.vectors.received.empty(), trainer.vectors.returned.empty()
    row[:] = 0
    first = models.build(lab.model.name, 1, inputs=datasets.load(lab.data).inputs)
    models.write_row(first, trainer.layout, row[: trainer.layout.row_bytes])
    for local_round in (0, 1):
        result = trainer.train(
            row, out, epochs=3, local_round=local_round, progress=lambda *_: None, cancelled=threading.Event()
        )
        row = row.copy()
        row[: trainer.layout.row_bytes] = out[: trainer.layout.row_bytes]
    return trainer._prepared.source.network().captured, bytes(out), result.loss


@pytest.mark.parametrize(
    ("model", "objective", "keys"),
    [
        *((model, {"name": "cross_entropy"}, {}) for model in SHAPES if model != "cnn_fedavg_padded"),
        pytest.param("cnn_fedavg_padded", {"name": "cross_entropy"}, {}, marks=pytest.mark.slow),
        *(("cnn_digits", {"name": name}, {}) for name in ("fedprox", "fedsam", "scaffold", "feddyn")),
        ("mlp_digits", {"name": "cross_entropy"}, {"momentum": 0.0, "weight_decay": 0.1, "clip_norm": 0.5}),
    ],
)
def test_training_is_that_of_autograd_bit_for_bit(
    model: str, objective: Mapping[str, Any], keys: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = lab_of(model, objective, **keys)
    captured, replayed, loss = trained(lab)
    assert captured is not None and captured.replays()
    monkeypatch.setattr(network, "is_captured", lambda *_, **__: False)
    assert trained(lab) == (None, replayed, loss)


@pytest.mark.parametrize(
    ("model", "shape", "keys"),
    [
        ("resnet20", [3, 16, 16], {}),
        pytest.param("vgg16", [3, 32, 32], {}, marks=pytest.mark.slow),
        ("mlp_digits", [1, 8, 8], {"precision": "bf16"}),
    ],
)
def test_large_models_and_bf16_are_not_captured(model: str, shape: list[int], keys: Mapping[str, Any]) -> None:
    data = {"dataset": "synthetic", "image_shape": shape, "classes": 10, "samples": 24}
    lab = parse({"data": data, "model": {"name": model}, "training": {**keys}})
    trainer = Trainer(lab, node="device-0", accelerator="cpu")
    trainer.prepare()
    assert trainer._prepared.source.network().captured is None


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=source), torch.randint(0, 3, (4,), generator=source)) for _ in range(count)]


def compared(forward: Forward) -> CapturedGradients:
    """Compare a few steps of a linear layer's gradients with autograd's, and return the captured ones."""
    layer, other = nn.Linear(6, 3), nn.Linear(6, 3)
    other.load_state_dict(layer.state_dict())
    weights = list(layer.parameters())
    captured = CapturedGradients(lambda _, inputs, labels: functional.cross_entropy(forward(layer, inputs), labels))
    for inputs, labels in batches(5):
        loss = captured.backward(weights, inputs, labels)
        expected = functional.cross_entropy(forward(other, inputs), labels)
        torch.autograd.backward(expected)
        assert torch.equal(loss, expected) and not loss.requires_grad
        for one, same in zip(weights, other.parameters(), strict=True):
            if one.grad is None or same.grad is None:
                assert one.grad is same.grad
            else:
                assert torch.equal(one.grad, same.grad)
                one.grad.mul_(2)  # an objective may change gradients in place
            with torch.no_grad():
                one.add_(0.1)
                same.add_(0.1)
            one.grad = same.grad = None
    return captured


def test_a_linear_layer_is_replayed_at_its_present_weights() -> None:
    assert compared(lambda layer, inputs: layer(inputs)).replays()


def test_a_gradient_that_two_weights_share_is_copied() -> None:
    def forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
        return inputs[:, :3] + layer.bias + layer.weight.sum(1)

    assert compared(forward).replays()


@pytest.mark.parametrize(
    "forward",
    [
        lambda layer, inputs: layer(inputs) + 0 * torch.rand(4, 3),
        lambda layer, inputs: layer(inputs) * inputs.sum().item(),
        lambda layer, inputs: layer(inputs) * torch.from_numpy(inputs.numpy().max(1, keepdims=True)),
        lambda layer, inputs: layer(inputs) if np.sign(inputs.numpy().sum()) > 0 else 2 * layer(inputs),
        lambda layer, inputs: functional.linear(inputs, layer.weight),
    ],
    ids=["random", "item", "numpy", "branch", "unused weight"],
)
def test_what_depends_on_a_batch_in_other_ways_goes_by_autograd(forward: Forward) -> None:
    torch.manual_seed(3)
    assert not compared(forward).replays()


def test_recording_does_not_import_the_compiler() -> None:
    """It would take seconds and 150 MB in each process that trains."""
    text = (
        "import sys, torch\n"
        "from device.training.captured import CapturedGradients\n"
        "weight = torch.ones(3, requires_grad=True)\n"
        "captured = CapturedGradients(lambda _, inputs, labels: (inputs * weight).sum())\n"
        "for _ in range(3):\n"
        "    captured.backward([weight], torch.ones(2, 3), torch.ones(2))\n"
        "    weight.grad = None\n"
        "assert captured.replays()\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
