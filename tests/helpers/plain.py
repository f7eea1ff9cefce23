"""One device's training: by its trainer, and as a textbook does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment import schema
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.computing import seeded
from fedstrata.common.model.layout import Row
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings.own import is_own
from fedstrata.device.jobs import Ending, HostedDevice, LocalResult, Order
from fedstrata.device.pool.trainers import Trainers
from fedstrata.device.training import batches
from fedstrata.device.training.trainer import Trainer
from tests.helpers.steps import batches_of


def first_model(lab: schema.Experiment) -> Row:
    """Return the initial model."""
    make = models.anew if is_own(lab.model.name) else models.of
    return row_of(make(lab, inputs=datasets.load(lab.data).inputs))


def row_of(module: nn.Module) -> Row:
    """Return a module's flat model."""
    layout = models.layout_of(module)
    row = layout.empty()
    models.write_row(module, layout, row)
    return row


def trainer_of(
    lab: schema.Experiment, node: str = "device-0", *, accelerator: str = "cpu"
) -> Trainer:
    """Return a device's trainer, which is prepared."""
    trainer = Trainer(lab, node=node, accelerator=accelerator)
    trainer.prepare()
    return trainer


def trained(
    trainer: Trainer, row: Row, *, epochs: int = 1, local_round: int = 0, **more: Any
) -> tuple[Row, Work]:
    """Return what a trainer makes of a model, and its work; `more`: of its order."""
    out = np.zeros(trainer.vectors.links.up.row_bytes + trainer.vectors.kept_bytes, np.uint8)
    return out, trainer.train(Order(row, out, epochs, local_round, **more)).work


def trained_together(
    lab: schema.Experiment,
    nodes: Sequence[str],
    row: Row | None = None,
    *,
    epochs: int = 1,
    local_round: int = 0,
    times: int = 1,
) -> list[list[tuple[Row, Work]]]:
    """Return what devices of one process make of a model, in each of some trainings, and their
    work.

    None: of the first model.
    """
    trainers, devices = Trainers(), [HostedDevice(lab, lab.digest, node) for node in nodes]
    layouts = [trainers.prepare(device, "cpu").layout for device in devices]
    row, found = first_model(lab) if row is None else row, []
    for _ in range(times):
        orders, ended = (
            [Order(row, layout.empty(), epochs, local_round) for layout in layouts],
            dict[int, Ending](),
        )
        trainers.train(list(zip(devices, orders, strict=True)), "cpu", ended.__setitem__)
        results = [ended[number] for number in range(len(nodes))]
        works = [result.work for result in results if isinstance(result, LocalResult)]
        assert len(works) == len(nodes), results
        found.append([(order.out, work) for order, work in zip(orders, works, strict=True)])
    return found


def plain_training(
    lab: schema.Experiment, node: str, row: Row, *, epochs: int, local_round: int, joins: bool
) -> tuple[Row, int]:
    """Return the model and the steps of a plain PyTorch loop from a model; `joins`: see
    LocalDataset.
    """
    module = models.anew(lab, inputs=datasets.load(lab.data).inputs)
    layout = models.layout_of(module)  # the first one: a model may freeze parts of itself
    models.read_row(module, layout, row)
    steps = train_plainly(module, lab, node, epochs=epochs, local_round=local_round, joins=joins)
    out = layout.empty()
    models.write_row(module, layout, out)
    return out, steps


def train_plainly(
    module: nn.Module,
    lab: schema.Experiment,
    node: str,
    *,
    epochs: int,
    local_round: int,
    joins: bool,
) -> int:
    """Train a module in a plain PyTorch loop; return the steps."""
    training = lab.training
    local = replace(
        batches.load_local_dataset(lab, node, accelerator=torch.device("cpu")), joins=joins
    )
    optimiser = torch.optim.SGD(
        module.parameters(),
        training.learning_rate,
        training.momentum,
        weight_decay=training.weight_decay,
    )
    steps = 0
    with seeded(torch_seed(lab.seed, Purpose.OWN_CODE, node, local_round)):
        for _, inputs, labels in batches_of(
            local, lab, node=node, epochs=epochs, local_round=local_round
        ):
            optimiser.zero_grad()
            functional.cross_entropy(module.train()(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps += 1
    return steps
