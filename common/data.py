"""What an experiment may say about its data and its model.

The formulas and their sources are in `common/learning/`: `datasets.py`, `partitions.py`, `models.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.tables import Count, Positive, Table, proposal

DatasetName = Literal["digits", "mnist", "fashionmnist", "cifar10"]

MODELS: Final = (
    "mlp_digits", "cnn_digits", "lenet5", "lenet_cifar", "cnn_femnist", "cnn_fedavg", "cnn_fedavg_padded",
    "resnet20", "resnet20_b", "resnet20_preact", "resnet18_cifar", "vgg16_bn", "vgg16", "vgg_femnist",
    "char_lstm", "sent_lstm",
)  # fmt: skip
OWN_MODEL: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Data(Table):
    """The data set and how it is split over the devices (sources: `common/learning/partitions.py`)."""

    dataset: DatasetName = "digits"
    root: str = "data"
    noise: Annotated[float, Field(ge=0)] = 0.0  # deviation of Gaussian noise on all images, whose pixels are in 0 .. 1
    partition: Literal["iid", "dirichlet", "dirichlet_overlap", "institution_dirichlet"] = "iid"
    concentration: Positive = 1.0  # of every Dirichlet draw
    min_samples: Annotated[int, Field(ge=0)] = 10  # of each device under a Dirichlet split
    partition_size: Count = 600  # of each device under dirichlet_overlap


class Model(Table):
    """The model that every node trains or mixes: one of ours, or `package.module:function` of one's own."""

    name: str = "cnn_digits"


def check(model: Model) -> None:
    """Check what the model needs beyond its type. Raises InvalidExperiment."""
    if ":" in model.name:
        if not OWN_MODEL.fullmatch(model.name):
            raise InvalidExperiment(
                "model.name",
                model.name,
                "not of the form package.module:function",
                "Write for instance nets.own:build.",
            )
    elif model.name not in MODELS:
        remedy = proposal(model.name, [*MODELS, "package.module:function"], what="There are")
        raise InvalidExperiment("model.name", model.name, "no such model", remedy)
