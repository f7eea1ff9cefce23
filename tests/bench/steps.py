"""`make bench NAME=steps`: CPU milliseconds of a step of SGD at batch 10 on one core, by each path.

    plain      a loop of PyTorch's own: torch.optim.SGD, images in NCHW
    one by one a device's steps by autograd, `training.recorded = false`
    recorded   its recorded steps
    together   the vmapped steps of 10 and of 40 devices, for each

python tests/bench/steps.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from fedstrata.common.experiment import reading
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.learning import datasets, models
from fedstrata.device.jobs import HostedDevice, LocalResult, Order
from fedstrata.device.training.trainer import Trainer
from fedstrata.device.vmapped.vmapped_trainer import VmappedTrainer

TURNS = 15
CASES = (  # model, shape of an image, samples
    ("mlp_digits", [1, 8, 8], 600),
    ("cnn_digits", [1, 8, 8], 600),
    ("lenet5", [1, 28, 28], 300),
    ("cnn_fedavg_padded", [1, 28, 28], 100),
    ("resnet20", [3, 32, 32], 50),
)
SHARED = (10, 40)


def lab_of(
    model: str, shape: list[int], samples: int, *, devices: int = 1, recorded: bool = True
) -> Experiment:
    """Return an experiment whose devices have so many samples each."""
    data = {
        "dataset": "synthetic",
        "image_shape": shape,
        "classes": 10,
        "samples": samples * devices,
    }
    training = {"batch_size": 10, "recorded": recorded}
    return reading.parse(
        {
            "data": data,
            "model": {"name": model},
            "topology": {"devices": devices},
            "training": training,
        }
    )


def plain(lab: Experiment) -> Callable[[], float]:
    """Return an epoch of a plain loop, which gives its CPU milliseconds a step."""
    data, training = datasets.load(lab.data), lab.training
    images, labels = data.normaliser()(data.train_images), data.train_labels
    module = models.build(lab.model.name, lab.seed, inputs=data.inputs).train()
    optimiser = torch.optim.SGD(module.parameters(), training.learning_rate, training.momentum)

    def train() -> float:
        order = torch.randperm(len(labels))
        begun = time.process_time()
        for some in order.split(training.batch_size):
            optimiser.zero_grad()
            torch.autograd.backward(functional.cross_entropy(module(images[some]), labels[some]))
            optimiser.step()
        return (time.process_time() - begun) / (len(labels) / training.batch_size) * 1e3

    return train


def alone(lab: Experiment) -> Callable[[], float]:
    """Return a device's local round of one epoch, which gives its CPU milliseconds a step."""
    trainer = Trainer(lab, node="device-0", accelerator="cpu")
    trainer.prepare()
    row, out = trainer.layout.empty(), trainer.layout.empty()
    models.write_row(
        models.build(lab.model.name, lab.seed, inputs=datasets.load(lab.data).inputs),
        trainer.layout,
        row,
    )

    def train() -> float:
        begun = time.process_time()
        steps = trainer.train(Order(row, out, 1, 0)).work.steps
        return (time.process_time() - begun) / steps * 1e3

    return train


def together(lab: Experiment) -> Callable[[], float]:
    """Return a local round of one epoch of all devices, which gives its CPU milliseconds for each
    one's step.
    """
    module = models.build(lab.model.name, lab.seed, inputs=datasets.load(lab.data).inputs)
    layout, names = models.layout_of(module), lab.tree.devices
    row = layout.empty()
    models.write_row(module, layout, row)
    trainer, work = (
        VmappedTrainer(torch.device("cpu")),
        [HostedDevice(lab, lab.digest, name) for name in names],
    )
    orders = [Order(row, layout.empty(), 1, 0, lambda *_: None) for _ in names]

    def train() -> float:
        results: list[LocalResult] = []
        begun = time.process_time()
        left = trainer.train(
            list(zip(work, orders, strict=True)), lambda _, how: results.append(how)
        )  # type: ignore[arg-type]
        assert not left, "not vmapped"
        return (time.process_time() - begun) / sum(how.work.steps for how in results) * 1e3

    return train


def main() -> None:
    """Measure all models."""
    keep_large_buffers()
    torch.set_num_threads(1)
    print(
        f"{'model':18} {'plain, ms':>9} {'one by one':>10} {'recorded':>10} {'10 together':>12} "
        f"{'40 together':>12}"
    )
    for model, shape, samples in CASES:
        ways = [plain(lab_of(model, shape, samples))]
        ways += [
            alone(lab_of(model, shape, samples, recorded=recorded)) for recorded in (False, True)
        ]
        ways += [
            together(lab_of(model, shape, max(20, samples // 10), devices=count))
            for count in SHARED
        ]
        for train in ways:
            train()
        medians = [
            statistics.median(each)
            for each in zip(*([way() for way in ways] for _ in range(TURNS)), strict=True)
        ]
        factors = [medians[0] / each for each in medians[1:]]
        print(
            f"{model:18} {medians[0]:9.3f} {factors[0]:10.2f} {factors[1]:10.2f} "
            f"{factors[2]:12.2f} {factors[3]:12.2f}"
        )


if __name__ == "__main__":
    main()
