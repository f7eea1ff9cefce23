"""Small nets: convolutions and pools, then linear layers, no batch norm."""

from __future__ import annotations

from torch import nn

from common.learning.inputs import Inputs
from common.learning.nets.layers import sequence


def mlp_digits(inputs: Inputs) -> nn.Module:
    """Return a net with one hidden layer of 32."""
    return sequence(
        [
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(64, 32)),
            ("relu1", nn.ReLU()),
            ("fc2", nn.Linear(32, inputs.classes)),
        ]
    )


def cnn_digits(inputs: Inputs) -> nn.Module:
    """Return a net of two convolutions and a linear layer."""
    return sequence(
        [
            ("conv1", nn.Conv2d(1, 16, 3, padding=1)),
            ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(16, 32, 3, padding=1)),
            ("relu2", nn.ReLU()),
            ("pool", nn.MaxPool2d(2)),
            ("flatten", nn.Flatten()),
            ("fc", nn.Linear(512, inputs.classes)),
        ]
    )


def lenet5(inputs: Inputs) -> nn.Module:
    """Return LeNet-5 as in Tempo, with ReLU."""
    return sequence(
        [
            ("conv1", nn.Conv2d(1, 6, 5, padding=2)),
            ("relu1", nn.ReLU()),
            ("pool1", nn.MaxPool2d(2)),
            ("conv2", nn.Conv2d(6, 16, 5)),
            ("relu2", nn.ReLU()),
            ("pool2", nn.MaxPool2d(2)),
            ("conv3", nn.Conv2d(16, 120, 5)),
            ("relu3", nn.ReLU()),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(120, 84)),
            ("relu4", nn.ReLU()),
            ("fc2", nn.Linear(84, inputs.classes)),
        ]
    )


def lenet_cifar(inputs: Inputs) -> nn.Module:
    """Return the net that FedCross's and FedMR's code uses as "CNN" on CIFAR."""
    return sequence(
        [
            *_two_convolutions((3, 6, 16), padding=0),
            ("fc1", nn.Linear(400, 120)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(120, 84)),
            ("relu4", nn.ReLU()),
            ("fc3", nn.Linear(84, inputs.classes)),
        ]
    )


def cnn_femnist(inputs: Inputs) -> nn.Module:
    """Return the net that FedCross's and FedMR's code uses as "CNN" on FEMNIST."""
    return _two_and_two(inputs, widths=(16, 32, 256), padding=0)


def cnn_fedavg(inputs: Inputs) -> nn.Module:
    """Return FedCDA's "simple CNN": FedAvg's without padding."""
    return _two_and_two(inputs, widths=(32, 64, 512), padding=0)


def cnn_fedavg_padded(inputs: Inputs) -> nn.Module:
    """Return FedAvg's CNN (McMahan et al. 2017)."""
    return _two_and_two(inputs, widths=(32, 64, 512), padding=2)


def _two_and_two(inputs: Inputs, *, widths: tuple[int, int, int], padding: int) -> nn.Module:
    channels, *sides = inputs.shape
    for _ in range(2):
        sides = [(side - 4 + 2 * padding) // 2 for side in sides]
    first, second, hidden = widths
    return sequence(
        [
            *_two_convolutions((channels, first, second), padding=padding),
            ("fc1", nn.Linear(second * sides[0] * sides[1], hidden)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(hidden, inputs.classes)),
        ]
    )


def _two_convolutions(channels: tuple[int, int, int], *, padding: int) -> list[tuple[str, nn.Module]]:
    return [
        ("conv1", nn.Conv2d(channels[0], channels[1], 5, padding=padding)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(channels[1], channels[2], 5, padding=padding)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
    ]
