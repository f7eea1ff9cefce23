"""Labs of made-up images: what benchmarks of training share. It imports no PyTorch, whose memory
some of them measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.device.jobs import DeviceOrder, HostedDevice, Order

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the images that it is given, and how many a device has."""

    title: str
    model: str
    shape: tuple[int, int, int]
    samples: int = 0


MLP = Case("MLP 784-200-10", "tests.bench.image_labs:mlp", (1, 28, 28), 600)
LENET = Case("LeNet-5", "lenet5", (1, 28, 28), 600)
RESNET = Case("ResNet-20", "resnet20", (3, 32, 32), 50)


def mlp(*, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return the multilayer perceptron of FedAvg's paper, with one hidden layer."""
    from torch import nn

    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(shape)), 200), nn.ReLU(), nn.Linear(200, classes)
    )


def image_lab(
    model: str,
    shape: Sequence[int],
    samples: int,
    *,
    devices: int = 1,
    training: dict[str, Any] | None = None,
    **data: Any,
) -> Experiment:
    """Return an experiment with so many images in all."""
    images = {"dataset": "synthetic", "image_shape": [*shape], "classes": 10, "samples": samples}
    return parse(
        {
            "data": images | data,
            "model": {"name": model},
            "topology": {"devices": devices},
            "training": training or {},
        }
    )


def first_order(lab: Experiment) -> Order:
    """Return the order to train the first model for one epoch."""
    from tests.helpers.plain import first_model

    row = first_model(lab)
    return Order(row, np.zeros_like(row), 1, 0)


def first_orders(lab: Experiment) -> list[DeviceOrder]:
    """Return this order for each device."""
    return [(HostedDevice(lab, lab.digest, name), first_order(lab)) for name in lab.tree.devices]
