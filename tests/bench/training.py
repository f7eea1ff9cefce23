"""`make bench NAME=training`: one device's training against a plain PyTorch loop, samples per
second on one core.

The plain loop has float images in a TensorDataset, a DataLoader without workers and torch.optim.SGD
with its defaults, and reads the loss after each step. Both take the same batches from the same
start, each in a process of its own on one core, by turns: a pair's ratio is what counts. The table
has the median of the pairs' ratios, and the ratio of the fastest turn of each, which others on the
machine disturb least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from statistics import median
from typing import Annotated, Any, Final, TypeAlias

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.learning import datasets, models
from fedstrata.common.randomness import Purpose, generator
from tests.bench.image_labs import LENET, MLP, RESNET, Case, first_order, image_lab
from tests.bench.running import SPAWN, Table, on_one_core, run, spawned
from tests.helpers.plain import trainer_of

DEVICE: Final = "device-0"
CNN: Final = Case("FedAvg CNN", "cnn_fedavg_padded", (1, 28, 28), 100)

# what is added to a case's title, the case, its training, and the ratio that is wanted
Line: TypeAlias = tuple[str, Case, dict[str, Any], float]
LINES: Final[tuple[Line, ...]] = (
    ("", MLP, {}, 1.3),
    ("", LENET, {}, 1.15),
    ("", CNN, {}, 1.3),
    ("", RESNET, {}, 1.1),
    (", bf16", CNN, {"precision": "bf16"}, 1.7),
)
OBJECTIVES: Final[tuple[Line, ...]] = tuple(  # against a plain loop of FedAvg, whose loss is near
    (f", {objective['name']}", case, {"objective": objective}, 0.0)
    for case in (MLP, LENET, CNN)
    for objective in ({"name": "fedprox"}, {"name": "fedsam", "rho": 0.001})
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


def plain(lab: Experiment) -> Callable[[], float]:
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


def ours(lab: Experiment) -> Callable[[], float | None]:
    """Return a device's local round, which gives its loss."""
    trainer = trainer_of(lab, DEVICE)
    order = first_order(lab)
    return lambda: trainer.train(order).work.loss


def take_turns(connection: Connection, lab: Experiment, *, textbook: bool) -> None:
    """Train in a process of its own whenever asked, and report the loss and the seconds of this
    core that it took.

    What others do on the core meanwhile does not count. A device's process keeps large buffers, a
    plain one does not.
    """
    on_one_core()
    torch.set_num_threads(1)
    if not textbook:
        keep_large_buffers()
    started = time.monotonic()
    make = plain if textbook else ours
    train = make(lab)
    train()
    connection.send(time.monotonic() - started)
    while connection.recv():
        before = time.process_time()
        loss = train()
        connection.send((loss, time.process_time() - before))


def measure(table: Table, line: Line, *, repeats: int) -> None:
    """Measure both sides in turn and print a row."""
    suffix, case, training, target = line
    lab = image_lab(case.model, case.shape, case.samples, training=training)
    sides = []
    started_s = []
    with ExitStack() as stack:
        for textbook in (False, True):
            ours, theirs = SPAWN.Pipe()
            stack.enter_context(spawned(take_turns, theirs, lab, textbook=textbook))
            stack.callback(ours.send, False)
            sides.append(ours)
            started_s.append(ours.recv())
        pairs = []
        for _ in range(repeats):
            losses = []
            seconds = []
            for side in sides:
                side.send(True)
                loss, taken_s = side.recv()
                losses.append(loss)
                seconds.append(taken_s)
            assert abs(losses[0] - losses[1]) < 0.05 * losses[1], losses
            pairs.append(seconds)
    own_s, plain_s = zip(*pairs, strict=True)
    ratio = median(theirs / own for own, theirs in pairs)
    table.add(
        f"{case.title}{suffix}",
        *(f"{case.samples / median(column):,.0f}/s" for column in (own_s, plain_s)),
        f"{ratio:.2f}",
        f"{min(plain_s) / min(own_s):.2f}",
        f"{target:.2f}" if target else "-",
        f"{started_s[0]:.1f} s",
    )


def main(
    *,
    only: Annotated[str, "lines whose title has this"] = "",
    repeats: Annotated[int, "pairs of trainings for each line"] = 15,
    objectives: Annotated[bool, "measure other objectives than cross-entropy too"] = False,
) -> None:
    """Measure each line and print it."""
    table = Table(
        "model",
        "ours",
        "plain loop",
        "ratio",
        "of the fastest",
        "target",
        "first round within",
        title="One core, batches of 10, samples per second",
    )
    for line in LINES + OBJECTIVES * objectives:
        if only in line[1].title + line[0]:
            measure(table, line, repeats=repeats)


if __name__ == "__main__":
    run(main)
