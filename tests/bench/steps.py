"""`make bench NAME=steps`: CPU milliseconds of a step of SGD at batch 10 on one core, by each path.

plain      a loop of PyTorch's own: torch.optim.SGD, images in NCHW
one by one a device's steps by autograd, `training.recorded = false`
recorded   its recorded steps
together   the vmapped steps of 10 and of 40 devices, for each
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.learning import datasets, models
from fedstrata.device.jobs import LocalResult
from fedstrata.device.vmapped.vmapped_trainer import VmappedTrainer
from tests.bench.image_labs import first_order, first_orders, image_lab
from tests.bench.running import Table, medians, run
from tests.helpers.plain import trainer_of

TURNS: Final = 15
CASES: Final = (  # model, shape of an image, samples
    ("mlp_digits", (1, 8, 8), 600),
    ("cnn_digits", (1, 8, 8), 600),
    ("lenet5", (1, 28, 28), 300),
    ("cnn_fedavg_padded", (1, 28, 28), 100),
    ("resnet20", (3, 32, 32), 50),
)
SHARED: Final = (10, 40)


def lab_of(
    model: str, shape: tuple[int, ...], samples: int, *, devices: int = 1, recorded: bool = True
) -> Experiment:
    """Return an experiment whose devices have so many samples each."""
    training = {"batch_size": 10, "recorded": recorded}
    return image_lab(model, shape, samples * devices, devices=devices, training=training)


def plain(lab: Experiment) -> Callable[[], float]:
    """Return an epoch of a plain loop, which gives its CPU milliseconds a step."""
    data, training = datasets.load(lab.data), lab.training
    images, labels = data.normaliser()(data.train_images), data.train_labels
    module = models.build(lab.model.name, lab.seed, inputs=data.inputs).train()
    optimiser = torch.optim.SGD(module.parameters(), training.learning_rate, training.momentum)

    def train() -> float:
        order = torch.randperm(len(labels))
        begun = time.process_time()
        for some in order.split(training.batch_size):  # type: ignore[no-untyped-call]
            optimiser.zero_grad()
            torch.autograd.backward(functional.cross_entropy(module(images[some]), labels[some]))
            optimiser.step()
        return (time.process_time() - begun) / (len(labels) / training.batch_size) * 1e3

    return train


def alone(lab: Experiment) -> Callable[[], float]:
    """Return a device's local round of one epoch, which gives its CPU milliseconds a step."""
    trainer = trainer_of(lab)
    order = first_order(lab)

    def train() -> float:
        begun = time.process_time()
        steps = trainer.train(order).work.steps
        return (time.process_time() - begun) / steps * 1e3

    return train


def together(lab: Experiment) -> Callable[[], float]:
    """Return a local round of one epoch of all devices, which gives its CPU milliseconds for each
    one's step.
    """
    trainer = VmappedTrainer(torch.device("cpu"))
    work = first_orders(lab)

    def train() -> float:
        results: list[LocalResult] = []
        begun = time.process_time()
        left = trainer.train(work, lambda _, how: results.append(how))  # type: ignore[arg-type]
        assert not left, "not vmapped"
        return (time.process_time() - begun) / sum(how.work.steps for how in results) * 1e3

    return train


def main() -> None:
    """Measure all models."""
    keep_large_buffers()
    torch.set_num_threads(1)
    shared = [f"{count} together" for count in SHARED]
    table = Table("model", "plain, ms", "one by one", "recorded", *shared)
    for model, shape, samples in CASES:
        ways = [plain(lab_of(model, shape, samples))]
        for recorded in (False, True):
            ways.append(alone(lab_of(model, shape, samples, recorded=recorded)))
        for count in SHARED:
            ways.append(together(lab_of(model, shape, max(20, samples // 10), devices=count)))
        medians(1, *ways)  # to warm up
        first, *others = medians(TURNS, *ways)
        table.add(model, f"{first:.3f}", *(f"{first / each:.2f}" for each in others))


if __name__ == "__main__":
    run(main)
