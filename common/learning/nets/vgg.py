"""VGG nets (Simonyan and Zisserman 2015) as in torchvision and in FedCross's and FedMR's code."""

from __future__ import annotations

import torch
from torch import nn

from common.learning.inputs import Inputs
from common.learning.nets.layers import Dropout, draw_by_fan_out, sequence

_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(inputs: Inputs) -> nn.Module:
    """Return torchvision's VGG-16 without batch norm: the same names, shapes and initial distribution."""
    classifier = nn.Sequential(
        nn.Linear(25_088, 4096),
        nn.ReLU(),
        Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        Dropout(),
        nn.Linear(4096, inputs.classes),
    )
    return sequence(
        [
            ("features", _features(inputs.shape[0], batch_norm=False)),
            ("avgpool", nn.AdaptiveAvgPool2d(7)),
            ("flatten", nn.Flatten()),
            ("classifier", classifier),
        ]
    )


def draw_vgg16(module: nn.Module, source: torch.Generator) -> None:
    """Initialise as torchvision: convolutions by fan-out, linear weights with deviation 0.01, biases zero."""
    draw_by_fan_out(module, source)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0.0, 0.01, generator=source)
            nn.init.zeros_(layer.bias)


def vgg16_bn(inputs: Inputs) -> nn.Module:
    """Return VGG-16 with batch norm for images of 32x32, as in FedCross's and FedMR's code."""
    classifier = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), Dropout(), nn.Linear(4096, 4096), nn.ReLU(), Dropout())
    return sequence(
        [
            ("features", _features(inputs.shape[0], batch_norm=True)),
            ("flatten", nn.Flatten()),
            ("classifier", classifier),
            ("fc", nn.Linear(4096, inputs.classes)),
        ]
    )


def vgg_femnist(inputs: Inputs) -> nn.Module:
    """Return the "VGG-16" of the same code for images of one channel: five convolutions, two linear layers in a row."""
    features = nn.Sequential(
        nn.Conv2d(inputs.shape[0], 64, 1, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 512, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(25_088, 256),
    )
    return sequence([("features", features), ("fc", nn.Linear(256, inputs.classes))])


def _features(channels: int, *, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for stage in _STAGES:
        for width in stage:
            norm = [nn.BatchNorm2d(width)] if batch_norm else []
            layers += [nn.Conv2d(channels, width, 3, padding=1), *norm, nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)
