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

from fedstrata.device.jobs import Order
from fedstrata.device.pool.executors import Worker
from fedstrata.device.pool.pool import Member, Pool
from tests.bench.image_labs import LENET, image_lab
from tests.bench.running import MB, Clock, Table, run
from tests.helpers.pss import pss

WORKERS: Final = 4
TRAININGS: Final = 20


async def measured(*, forked: bool) -> tuple[float, float, float]:
    """Return the MB of all, the seconds until all have trained, and those of trainings with a
    killed worker.
    """
    lab = image_lab(LENET.model, LENET.shape, 20 * WORKERS, devices=WORKERS)
    worker = None if forked else Worker
    began = time.monotonic()
    async with Pool(accelerator="cpu", slots=WORKERS, devices=WORKERS, worker=worker) as pool:
        members = [pool.member(name) for name in lab.tree.devices]
        prepared = await asyncio.gather(*(member.prepare(lab) for member in members))
        rows = [(each.layout.empty(), each.layout.empty()) for each in prepared]

        async def train(number: int) -> None:
            orders = [Order(row, out, 1, number) for row, out in rows]
            await asyncio.gather(*map(Member.train, members, orders))

        for number in range(TRAININGS):
            await train(number)
        ready_s = time.monotonic() - began
        children = psutil.Process().children(recursive=True)
        memory = sum(pss(child.pid) for child in children) / MB
        workers = (each.pid for each in pool._executors if isinstance(each, Worker) and each.pid)
        os.kill(next(workers), signal.SIGKILL)
        began = time.monotonic()
        await train(TRAININGS)
        return memory, ready_s, time.monotonic() - began


def main() -> None:
    """Print a table: a row for each way to start workers."""
    table = Table("workers", "MB", "s until all have trained", "CPU s", "s with a killed one")
    for name, forked in (("forked", True), ("each an interpreter", False)):
        with Clock() as clock:
            memory, ready_s, killed_s = asyncio.run(measured(forked=forked))
        seconds = (ready_s, clock.cpu_s, killed_s)
        table.add(name, f"{memory:.0f}", *(f"{each:.1f}" for each in seconds))


if __name__ == "__main__":
    run(main)
