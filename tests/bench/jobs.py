"""`make bench NAME=jobs`: what a training of 20 samples costs a device beside its steps, CPU ms.

Trainings of one epoch and of nine by turns: an eighth of their difference are an epoch's steps, and
what one epoch takes beyond that is fixed. In this process, and by a worker: its process, and what
the agent does for it. Figures are the least quarter's median.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Final

from fedstrata.common.experiment.schema import Experiment
from fedstrata.device.jobs import HostedDevice, Job, Order
from fedstrata.device.pool.executors import Worker
from fedstrata.device.pool.trainers_by_kind import Trainers
from tests.bench.image_labs import first_order, image_lab
from tests.bench.running import Table, run

CASES: Final = {
    "MLP 64-32-10": ("mlp_digits", (1, 8, 8)),
    "LeNet-5": ("lenet5", (1, 28, 28)),
    "own MLP 784-200-10": ("tests.bench.image_labs:mlp", (1, 28, 28)),
}
SAMPLES: Final = 20
EPOCHS: Final = 9
WARM: Final = 20  # trainings before the first that counts


def least(found: list[float]) -> float:
    """Return the median of the least quarter."""
    return median(sorted(found)[: max(1, len(found) // 4)])


def fixed(single: list[float], several: list[float]) -> float:
    """Return what trainings of one epoch take beyond their steps."""
    steps = (least(several) - least(single)) / (EPOCHS - 1)
    return least(single) - steps


def used_ms(pid: int) -> float:
    """Return the CPU milliseconds of a process's threads so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def ordered(order: Order, number: int, epochs: int) -> Order:
    """Return an order to train the same row again."""
    return Order(order.row, order.out, epochs, number)


def in_process(lab: Experiment, repeats: int) -> float:
    """Return the fixed CPU ms of a training in this process."""
    device = HostedDevice(lab, lab.digest, "device-0")
    trainers = Trainers()
    trainers.prepare(device, "cpu")
    order = first_order(lab)
    found: dict[int, list[float]] = {1: [], EPOCHS: []}
    for number in range(WARM + repeats):
        for epochs, times in found.items():
            begun = time.thread_time()
            work = [(device, ordered(order, number, epochs))]
            trainers.train(work, "cpu", lambda number, how: None)
            times.append(1e3 * (time.thread_time() - begun))
    return fixed(found[1][WARM:], found[EPOCHS][WARM:])


async def by_worker(lab: Experiment, repeats: int) -> tuple[float, float]:
    """Return the fixed CPU ms of a training in a worker's process, and in its agent's."""
    device = HostedDevice(lab, lab.digest, "device-0")
    worker = Worker()
    await worker.start()
    await worker.prepare(device)
    order = first_order(lab)

    async def train(number: int, epochs: int) -> None:
        job = Job(device=device, place=0, order=ordered(order, number, epochs))
        await worker.train([job])
        await job.outcome

    for number in range(WARM):
        await train(number, 1)
    assert worker.pid is not None
    worked = await measured(train, repeats, lambda: used_ms(worker.pid or 0))
    served = await measured(train, repeats, lambda: 1e3 * time.process_time())
    await worker.close()
    return worked, served


async def measured(
    train: Callable[[int, int], Awaitable[None]], repeats: int, clock: Callable[[], float]
) -> float:
    """Return what a clock shows of a training beyond its steps."""
    found: dict[int, list[float]] = {1: [], EPOCHS: []}
    for number in range(repeats):
        for epochs, times in found.items():
            begun = clock()
            await train(number, epochs)
            times.append(clock() - begun)
    return fixed(found[1], found[EPOCHS])


def main(*, repeats: int = 200) -> None:
    """Print a table: a row for each model."""
    table = Table("model", "in process", "worker", "its agent", "worker and agent")
    for title, (model, shape) in CASES.items():
        lab = image_lab(model, shape, SAMPLES, training={"batch_size": 10})
        alone = in_process(lab, repeats)
        worked, served = asyncio.run(by_worker(lab, repeats))
        cells = (alone, worked, served, worked + served)
        table.add(title, *(f"{each:.2f}" for each in cells))


if __name__ == "__main__":
    run(main)
