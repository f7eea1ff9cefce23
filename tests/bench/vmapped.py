"""`make bench NAME=vmapped`: vmapped training of co-located devices on a CPU against one after
another.

Runs vmap on a GPU alone; this has whether a CPU should.
Each device has as many samples, one epoch, batches of 10; both ways are the ways of a run, from
rows to rows. Of one after another at most ten devices are trained and the time is scaled up. A
GPU's busy share is the time of its kernels, as torch's profiler has it of one training more, in the
time of a training without profiler.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fedstrata.common.experiment import reading
from fedstrata.common.learning import models
from fedstrata.common.learning.computing import resolve_accelerator
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.model.layout import Row
from fedstrata.device.jobs import DeviceOrder, Done, Ending, HostedDevice, LocalResult, Order
from fedstrata.device.pool.trainers_by_kind import Trainers
from fedstrata.device.vmapped.vmapped_trainer import VmappedTrainer

ALONE = 10


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the images that it is given."""

    title: str
    model: str
    shape: tuple[int, int, int]


CASES = (
    Case("MLP 784-200-10", "tests.bench.vmapped:mlp", (1, 28, 28)),
    Case("LeNet-5", "lenet5", (1, 28, 28)),
    Case("ResNet-20", "resnet20", (3, 32, 32)),
)


def mlp(*, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return the multilayer perceptron of FedAvg's paper, with one hidden layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(shape)), 200), nn.ReLU(), nn.Linear(200, classes)
    )


def work_of(case: Case, count: int, *, samples: int, precision: str) -> list[DeviceOrder]:
    """Return the orders of so many devices, each with a row of its own."""
    data = {
        "dataset": "synthetic", "partition": "iid", "classes": 10, "image_shape": list(case.shape),
        "samples": samples * count, "test_samples": 1,
    }  # fmt: skip
    tree: dict[str, Any] = {
        "data": data,
        "model": {"name": case.model},
        "topology": {"devices": count},
        # of those one after another
        "training": {"batch_size": 10, "precision": precision, "vmapped": False},
    }
    lab = reading.parse(tree)
    module = models.build(case.model, 1, inputs=Inputs(case.shape, 10))
    layout = models.layout_of(module)
    row: Row = layout.empty()
    models.write_row(module, layout, row)
    orders = [
        Order(row, layout.empty(), 1, 0, lambda *_: None, threading.Event()) for _ in range(count)
    ]
    return [(HostedDevice(lab, lab.digest, f"device-{k}"), order) for k, order in enumerate(orders)]


def seconds(
    train: Callable[[Sequence[DeviceOrder], Done], object], work: Sequence[DeviceOrder]
) -> float:
    """Train all, and return the seconds."""
    ended: dict[int, Ending] = {}
    started = time.perf_counter()
    train(work, ended.__setitem__)
    taken = time.perf_counter() - started
    if not all(isinstance(ended.get(number), LocalResult) for number in range(len(work))):
        raise RuntimeError(f"not trained: {ended}")
    return taken


def kernels_s(train: Callable[[], object]) -> float:
    """Return the seconds that the GPU's kernels take in a training."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def measured(
    case: Case, count: int, *, samples: int, accelerator: str, precision: str, repeats: int
) -> dict[str, float]:
    """Return samples per second of so many devices, one after another and vmapped, and the median
    of their ratios.

    Of a GPU also the share of the time in which its kernels ran, by either way, and the most
    memory.
    """
    work = work_of(case, count, samples=samples, precision=precision)
    some = work[:ALONE]
    trainers, group = Trainers(), VmappedTrainer(resolve_accelerator(accelerator))

    def one_by_one(orders: Sequence[DeviceOrder], done: Done) -> None:
        trainers.train(orders, accelerator, done)

    def alone() -> float:
        return seconds(one_by_one, some) * count / len(some)

    def together() -> float:
        return seconds(group.train if count > 1 else one_by_one, work)

    alone(), together()  # loads the data, and what the accelerator needs
    if accelerator != "cpu":
        torch.cuda.reset_peak_memory_stats()
    pairs = [(alone(), together()) for _ in range(repeats)]
    alone_s, together_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    total = samples * count
    ratio = statistics.median(one / other for one, other in pairs)
    found = {
        "one by one, samples/s": total / alone_s,
        "vmapped, samples/s": total / together_s,
        "factor": ratio,
    }
    if accelerator != "cpu":
        one_s = kernels_s(lambda: seconds(one_by_one, work[:1]))
        busy = one_s * count / alone_s, kernels_s(together) / together_s
        memory_mb = torch.cuda.max_memory_allocated() / 1e6
        found |= {"busy, one by one": busy[0], "busy, vmapped": busy[1], "memory_mb": memory_mb}
    return found


def main() -> None:
    """Measure on the CPU and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4, 10])
    parser.add_argument("--samples", type=int, default=60, help="of each device")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("model", "precision", "devices", "one by one, samples/s", "vmapped", "factor")
    for column in table.columns[2:]:
        column.justify = "right"
    how = {"samples": options.samples, "accelerator": "cpu", "repeats": options.repeats}
    for case in CASES:
        for precision in ("fp32", "bf16"):
            for count in options.devices:
                alone, together, factor = measured(case, count, precision=precision, **how).values()
                table.add_row(
                    case.title,
                    precision,
                    str(count),
                    f"{alone:,.0f}",
                    f"{together:,.0f}",
                    f"{factor:.2f}",
                )
                print(".", end="", file=sys.stderr, flush=True)
    console = Console(width=120)
    console.print(
        f"\n{platform.machine()}, torch {torch.__version__}, {options.samples} samples each, "
        "batches of 10"
    )
    console.print(table)


if __name__ == "__main__":
    main()
