"""Convolutions as matrix products: the same outputs and gradients, and the shapes for which they
are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedstrata.common.experiment.reading import parse
from fedstrata.device.training import trained_network as network
from fedstrata.device.training.trained_network import as_products
from fedstrata.device.training.trainer import Trainer
from fedstrata.device.training.trials import TriedTraining


def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the products that are computed from now on."""
    names: list[str] = []

    def note(
        name: str, product: Callable[[nn.Conv2d, Tensor], Tensor], layer: nn.Conv2d, images: Tensor
    ) -> Tensor:
        names.append(name)
        return product(layer, images)

    for name in ("_whole", "_gray"):
        monkeypatch.setattr(network, name, partial(note, name, getattr(network, name)))
    return names


def passed(layer: nn.Conv2d, images: Tensor) -> list[Tensor]:
    """Return outputs and gradients."""
    outputs = layer(images)
    torch.autograd.backward(
        (outputs * torch.linspace(-1, 1, outputs.numel()).view(outputs.shape)).sum()
    )
    gradients = [weight.grad for weight in layer.parameters() if weight.grad is not None]
    layer.zero_grad()
    return [outputs.detach(), *gradients]


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(1, 16, 3, padding=1), (10, 1, 8, 8), ["_gray"]),
        (
            nn.Conv2d(1, 20, (2, 3), stride=(2, 1), padding=(0, 1), bias=False),
            (3, 1, 9, 7),
            ["_gray"],
        ),
        (nn.Conv2d(4, 6, (5, 3)), (7, 4, 5, 3), ["_whole"]),
        (nn.Conv2d(4, 6, 5, bias=False), (1, 4, 5, 5), ["_whole"]),
        (nn.Conv2d(1, 6, 5), (2, 1, 8, 8), []),
        (nn.Conv2d(1, 16, 5, padding=2), (10, 1, 28, 28), []),
        (nn.Conv2d(3, 16, 3), (2, 3, 8, 8), []),
        (nn.Conv2d(4, 6, 5, padding=1), (2, 4, 5, 5), []),
        (nn.Conv2d(1, 16, 3, padding="same"), (2, 1, 8, 8), []),
        (nn.Conv2d(1, 16, 3, dilation=2), (2, 1, 8, 8), []),
        (nn.Conv2d(1, 16, 3, padding=1, padding_mode="circular"), (2, 1, 8, 8), []),
        (nn.Conv2d(2, 6, 5, groups=2), (2, 2, 5, 5), []),
    ],
)
def test_a_product_is_the_convolution(
    layer: nn.Conv2d, shape: tuple[int, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = chosen(monkeypatch)
    layer = layer.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload, unused-ignore]
    images = torch.randn(shape, dtype=torch.float64)
    usual = passed(layer, images)
    as_products(layer)
    found = passed(layer, images)
    assert [gradient.stride() for gradient in found[1:]] == [
        weight.stride() for weight in layer.parameters()
    ]
    for one, other in zip(usual, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert names == expected


def test_inputs_with_gradients_are_convolved(monkeypatch: pytest.MonkeyPatch) -> None:
    names, layer = chosen(monkeypatch), nn.Conv2d(1, 16, 3)
    as_products(layer)
    layer(torch.randn(2, 1, 8, 8, requires_grad=True))
    assert names == []


@pytest.mark.parametrize(("keys", "products"), [({}, True), ({"precision": "bf16"}, False)])
def test_training_on_a_cpu_in_fp32_takes_them(
    keys: dict[str, object], products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = parse({"data": {"dataset": "digits"}, "model": {"name": "cnn_digits"}, "training": keys})
    monkeypatch.setattr(TriedTraining, "tried", lambda *_: None)
    trainer = Trainer(lab, node="device-0", accelerator="cpu")
    trainer.prepare()
    assert ("forward" in vars(trainer._prepared.source.network().module.conv1)) is products
