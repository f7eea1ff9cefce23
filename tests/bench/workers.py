"""`make bench NAME=workers`: four workers of a device's process: memory, CPU seconds, and a killed
one.

As they are, forked from a process that has imported PyTorch, and each as an interpreter of its own.
They train LeNet-5 on 20 samples a device. Memory is Pss: what processes share counts once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Final

import psutil

from fedstrata.common.experiment.reading import parse
from fedstrata.device.jobs import Order
from fedstrata.device.pool.executors import Worker
from fedstrata.device.pool.pool import Pool
from tests.helpers.pss import pss

WORKERS: Final = 4
TRAININGS: Final = 20
DATA: Final = {
    "dataset": "synthetic",
    "image_shape": [1, 28, 28],
    "classes": 10,
    "samples": 20 * WORKERS,
}
MB: Final = 1e6
LAB: Final = {"topology": {"devices": WORKERS}, "data": DATA, "model": {"name": "lenet5"}}


async def measured(*, forked: bool) -> list[float]:
    """Return the MB of all, the seconds until all have trained, and those of trainings with a
    killed worker.
    """
    experiment = parse(LAB)
    began = time.monotonic()
    worker = None if forked else Worker
    async with Pool(accelerator="cpu", slots=WORKERS, devices=WORKERS, worker=worker) as pool:
        members = [pool.member(f"device-{place}") for place in range(WORKERS)]
        prepared = await asyncio.gather(*(member.prepare(experiment) for member in members))
        rows = [(each.layout.empty(), each.layout.empty()) for each in prepared]

        async def train(number: int) -> None:
            orders = [Order(row, out, 1, number) for row, out in rows]
            await asyncio.gather(
                *(member.train(order) for member, order in zip(members, orders, strict=True))
            )

        for number in range(TRAININGS):
            await train(number)
        ready_s = time.monotonic() - began
        memory = sum(pss(child.pid) for child in psutil.Process().children(recursive=True)) / MB
        killed = next(
            each.pid
            for each in pool._executors
            if isinstance(each, Worker) and each.pid is not None
        )
        os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        await train(TRAININGS)
        return [memory, ready_s, time.monotonic() - began]


def main() -> None:
    """Print a table: a row for each way to start workers."""
    print(
        "| workers | MB | s until all have trained | CPU s | s with a killed one "
        "|\n|---|---|---|---|---|"
    )
    for name, forked in (("forked", True), ("each an interpreter", False)):
        before = os.times()
        memory, ready_s, killed_s = asyncio.run(measured(forked=forked))
        after = os.times()
        cpu_s = sum(after[:4]) - sum(before[:4])
        print(
            f"| {name} | {memory:.0f} | {ready_s:.1f} | {cpu_s:.1f} | {killed_s:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
