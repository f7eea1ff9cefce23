"""`make bench NAME=training`: one device's training against a plain PyTorch loop, samples per
second on one core.

The plain loop has float images in a TensorDataset, a DataLoader without workers and torch.optim.SGD
with its defaults, and reads the loss after each step. Both take the same batches from the same
start, each in a process of its own on one core, by turns: a pair's ratio is what counts. The table
has the median of the pairs' ratios, and the ratio of the fastest turn of each, which others on the
machine disturb least.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

from fedstrata.common.experiment import reading, schema
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.learning import datasets, models
from fedstrata.common.randomness import Purpose, generator
from fedstrata.device.jobs import Order
from fedstrata.device.training.trainer import Trainer

DEVICE = "device-0"


@dataclass(frozen=True, slots=True)
class Case:
    """A line of the table; `target` is the ratio that is wanted."""

    title: str
    model: str
    shape: tuple[int, int, int]
    samples: int
    target: float
    training: dict[str, Any]

    def lab(self) -> schema.Experiment:
        """Return an experiment of one device that has all the samples."""
        data = {
            "dataset": "synthetic",
            "image_shape": list(self.shape),
            "classes": 10,
            "samples": self.samples,
        }
        return reading.parse(
            {"data": data, "model": {"name": self.model}, "training": self.training}
        )


CASES = (
    Case("MLP 784-200-10", "training:mlp", (1, 28, 28), 600, 1.3, {}),
    Case("LeNet-5", "lenet5", (1, 28, 28), 600, 1.15, {}),
    Case("FedAvg CNN", "cnn_fedavg_padded", (1, 28, 28), 100, 1.3, {}),
    Case("ResNet-20", "resnet20", (3, 32, 32), 50, 1.1, {}),
    Case("FedAvg CNN, bf16", "cnn_fedavg_padded", (1, 28, 28), 100, 1.7, {"precision": "bf16"}),
)
OBJECTIVES = tuple(  # against a plain loop of FedAvg, whose loss must be near
    Case(
        f"{case.title}, {objective['name']}",
        case.model,
        case.shape,
        case.samples,
        0.0,
        {"objective": objective},
    )
    for case in CASES[:3]
    for objective in ({"name": "fedprox"}, {"name": "fedsam", "rho": 0.001})
)


def mlp(*, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return the multilayer perceptron of FedAvg's paper, with one hidden layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(shape)), 200), nn.ReLU(), nn.Linear(200, classes)
    )


class _Order(Sampler[int]):
    """The trainer's own order of the samples."""

    def __init__(self, samples: int, *, seed: int) -> None:
        self._samples = samples
        self._draw = generator(seed, Purpose.BATCHES, DEVICE, 0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._draw.permutation(self._samples).tolist())

    def __len__(self) -> int:
        return self._samples


def plain(lab: schema.Experiment) -> Callable[[], float]:
    """Return a textbook's local round, which gives its loss."""
    data, training = datasets.load(lab.data), lab.training
    images = data.normaliser()(data.train_images)
    dataset = TensorDataset(images, data.train_labels)
    module = models.build(lab.model.name, lab.seed, inputs=data.inputs)
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def train() -> float:
        module.load_state_dict(start)
        module.train()
        loader = DataLoader(
            dataset, training.batch_size, sampler=_Order(len(dataset), seed=lab.seed)
        )
        optimiser = torch.optim.SGD(module.parameters(), training.learning_rate, training.momentum)
        total = 0.0
        for some_images, some_labels in loader:
            optimiser.zero_grad()
            loss = functional.cross_entropy(module(some_images), some_labels)
            torch.autograd.backward(loss)
            optimiser.step()
            total += loss.item() * len(some_labels)
        return total / len(dataset)

    return train


def ours(lab: schema.Experiment) -> Callable[[], float]:
    """Return a device's local round, which gives its loss."""
    trainer = Trainer(lab, node=DEVICE, accelerator="cpu")
    trainer.prepare()
    row, out = trainer.layout.empty(), trainer.layout.empty()
    models.write_row(
        models.build(lab.model.name, lab.seed, inputs=datasets.load(lab.data).inputs),
        trainer.layout,
        row,
    )
    return lambda: trainer.train(Order(row, out, 1, 0)).work.loss


def take_turns(connection: Connection, case: Case, *, textbook: bool) -> None:
    """Train in a process of its own whenever asked, and tell the loss and the seconds of this core
    that it took.

    What others do on the core meanwhile does not count. A device's process keeps large buffers, a
    plain one does not.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    if not textbook:
        keep_large_buffers()
    started = time.monotonic()
    train = plain(case.lab()) if textbook else ours(case.lab())
    train()
    connection.send(time.monotonic() - started)
    while connection.recv():
        before = time.process_time()
        loss = train()
        connection.send((loss, time.process_time() - before))


def measure(case: Case, *, repeats: int) -> tuple[float, float, float, float, float]:
    """Return samples per second (ours, plain), the median of the pairs' ratios, the best's, our
    seconds to start.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    sides = [pipe[0] for pipe in pipes]
    processes = [
        context.Process(
            target=take_turns, args=(pipe[1], case), kwargs={"textbook": textbook}, daemon=True
        )
        for pipe, textbook in zip(pipes, (False, True), strict=True)
    ]
    started_s = []
    for process, side in zip(processes, sides, strict=True):
        process.start()
        started_s.append(side.recv())
    pairs = []
    for _ in range(repeats):
        turns = []
        for side in sides:
            side.send(True)
            turns.append(side.recv())
        losses, seconds = zip(*turns, strict=True)
        assert abs(losses[0] - losses[1]) < 0.05 * losses[1], losses
        pairs.append(seconds)
    for process, side in zip(processes, sides, strict=True):
        side.send(False)
        process.join()
    rates = [case.samples / statistics.median(column) for column in zip(*pairs, strict=True)]
    best = [min(column) for column in zip(*pairs, strict=True)]
    return (
        *rates,
        statistics.median(theirs / own for own, theirs in pairs),
        best[1] / best[0],
        started_s[0],
    )


def main() -> None:
    """Measure each case and print its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="lines whose title has this")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of trainings for each line")
    parser.add_argument(
        "--objectives", action="store_true", help="measure other objectives than cross-entropy too"
    )
    given = parser.parse_args()
    table = Table(
        "model", "ours", "plain loop", "ratio", "of the fastest", "target", "first round within"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    chosen = (*CASES, *(OBJECTIVES if given.objectives else ()))
    cases = [case for case in chosen if given.only in case.title]
    for case in cases:
        own, theirs, ratio, best, start_s = measure(case, repeats=given.repeats)
        rates = f"{own:,.0f}/s", f"{theirs:,.0f}/s"
        target = f"{case.target:.2f}" if case.target else "-"
        table.add_row(case.title, *rates, f"{ratio:.2f}", f"{best:.2f}", target, f"{start_s:.1f} s")
        print(".", end="", file=sys.stderr, flush=True)
    console = Console(width=120)
    console.print(
        f"\n{platform.machine()}, one core, torch {torch.__version__}, batches of 10, samples per "
        "second"
    )
    console.print(table)


if __name__ == "__main__":
    main()
