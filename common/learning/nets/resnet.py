"""Residual nets for small images (He et al. 2016), and the pre-activation net of FedCross's and FedMR's code."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.learning.inputs import Inputs
from common.learning.nets.layers import draw_by_fan_out, sequence


def resnet18_cifar(inputs: Inputs) -> nn.Module:
    """Return ResNet-18 with a 3x3 stem of stride 1 and no max pool (Plato's, for Tempo)."""
    return _resnet(inputs, widths=(64, 128, 256, 512), blocks=2, pad=False)


def resnet20(inputs: Inputs) -> nn.Module:
    """Return ResNet-20 with He's shortcut A: strided, missing channels zero, no parameter."""
    return _resnet(inputs, widths=(16, 32, 64), blocks=3, pad=True)


def resnet20_b(inputs: Inputs) -> nn.Module:
    """Return ResNet-20 with He's shortcut B: 1x1 convolution and batch norm where the shape changes."""
    return _resnet(inputs, widths=(16, 32, 64), blocks=3, pad=False)


def resnet20_preact(inputs: Inputs) -> nn.Module:
    """Return the "ResNet-20" of FedCross's and FedMR's code: six pre-activation bottlenecks.

    As in that code, images of one channel pass a max pool of stride 1 after the first convolution.
    """
    return _PreActivation(inputs)


def draw_preact(module: nn.Module, source: torch.Generator) -> None:
    """Initialise convolutions by fan-out and set every batch norm's gamma to 0.5."""
    draw_by_fan_out(module, source)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.constant_(layer.weight, 0.5)


def _resnet(inputs: Inputs, *, widths: tuple[int, ...], blocks: int, pad: bool) -> nn.Module:
    width = widths[0]
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(inputs.shape[0], width, 3, padding=1, bias=False)),
        ("bn1", nn.BatchNorm2d(width)),
        ("relu", nn.ReLU()),
    ]
    before = width
    for stage, width in enumerate(widths, start=1):
        first = _Block(before, width, 1 if stage == 1 else 2, pad=pad)
        layers.append(
            (f"stage{stage}", nn.Sequential(first, *(_Block(width, width, 1, pad=pad) for _ in range(1, blocks))))
        )
        before = width
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(before, inputs.classes))]
    return sequence(layers)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, *, pad: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = _Padded(stride, outputs - inputs) if pad else _projection(inputs, outputs, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x_BCHW)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(x_BCHW))


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class _Padded(nn.Module):
    def __init__(self, stride: int, more: int) -> None:
        super().__init__()
        self.stride, self.more = stride, more

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = x_BCHW[:, :, :: self.stride, :: self.stride]
        return functional.pad(x_BCHW, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))


class _PreActivation(nn.Module):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs.shape[0], 16, 3, padding=1, bias=False)
        self.pool1 = nn.MaxPool2d(3, stride=1, padding=1) if inputs.shape[0] == 1 else nn.Identity()
        self.layer1 = nn.Sequential(_Bottleneck(16, 16, 1), _Bottleneck(64, 16, 1))
        self.layer2 = nn.Sequential(_Bottleneck(64, 32, 2), _Bottleneck(128, 32, 1))
        self.layer3 = nn.Sequential(_Bottleneck(128, 64, 2), _Bottleneck(256, 64, 1))
        self.bn = nn.BatchNorm2d(256)  # never called by the authors' code, but part of its state
        self.pool = nn.AdaptiveAvgPool2d(1)  # the authors' is of 8 on 8x8 and of 7 on 7x7
        self.fc = nn.Linear(256, inputs.classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = self.layer3(self.layer2(self.layer1(self.pool1(self.conv1(x_BCHW)))))
        logits: Tensor = self.fc(self.pool(inner).flatten(1))
        return logits


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = self.conv1(functional.relu(self.bn1(x_BCHW)))
        inner = self.conv2(functional.relu(self.bn2(inner)))
        inner = self.conv3(functional.relu(self.bn3(inner)))
        summed: Tensor = inner + self.shortcut(x_BCHW)
        return summed
