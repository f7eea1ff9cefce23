"""`make bench NAME=devices`: forty devices on one host: samples per second, memory of the process
tree.

    python tests/bench/devices.py [--workers N]

speed   LeNet-5, 600 made-up images of 28x28 each, batches of 10, two epochs: N workers against one
        `Trainer` alone on one core, in turns, by the clock and by CPU seconds (of all processes,
        which other work on the machine changes less); and how long the agents' event loop was ever
        held up meanwhile
memory  lenet_cifar on 50,000 made-up images of 3x32x32 in bytes: the proportional set size (PSS) of
        the process and its workers once every device has trained
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from statistics import median
from typing import Annotated, Any, Final

import numpy as np
import psutil

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.device.jobs import Order
from fedstrata.device.pool.pool import Member, Pool, cores
from tests.bench.image_labs import image_lab
from tests.bench.running import MB, folder, run
from tests.helpers.pss import pss

DEVICES: Final = 40
EPOCHS: Final = 2
TURNS: Final = 5
TICK_S: Final = 0.005
PARTS: Final = ("speed", "memory")


def experiment(model: str, samples: int, shape: list[int]) -> Experiment:
    training = {"batch_size": 10, "momentum": 0.9}
    return image_lab(model, shape, samples, devices=DEVICES, training=training, test_samples=1000)


async def members_of(pool: Pool, lab: Experiment) -> tuple[list[Member], Any]:
    members = [pool.member(name) for name in lab.tree.devices]
    prepared = await asyncio.gather(*(member.prepare(lab) for member in members))
    return members, prepared[0].layout


async def round_of(members: list[Member], rows: list[Any], *, epochs: int) -> int:
    """Train every device once and return the samples."""
    row, *outs = rows
    orders = [Order(row, out, epochs, 0, lambda *_: None) for out in outs]
    trained = await asyncio.gather(*map(Member.train, members, orders))
    return sum(result.work.samples * epochs for result in trained)


async def held_up(most: list[float]) -> None:
    """Note the longest time that the event loop was late."""
    while True:
        asked = time.monotonic()
        await asyncio.sleep(TICK_S)
        most[0] = max(most[0], time.monotonic() - asked - TICK_S)


async def speed(workers: int) -> None:
    from tests.helpers.plain import trainer_of

    lab = experiment("lenet5", 600 * DEVICES, [1, 28, 28])
    lone = trainer_of(lab)

    def alone(row: Any, out: Any) -> tuple[float, float]:
        start = time.monotonic()
        cpu_start = time.thread_time()
        for local_round in range(4):
            lone.train(Order(row, out, EPOCHS, local_round))
        samples = 4 * EPOCHS * lone.samples
        return samples / (time.monotonic() - start), samples / (time.thread_time() - cpu_start)

    late = [0.0]
    async with Pool(accelerator="cpu", slots=workers, devices=DEVICES) as pool:
        members, layout = await members_of(pool, lab)
        rows = [np.zeros(layout.row_bytes, np.uint8), *(layout.empty() for _ in members)]
        layout.floats(rows[0])[:] = np.random.default_rng(1).normal(0, 0.05, layout.columns)
        await round_of(members, rows, epochs=EPOCHS)
        ratios = []
        cpu_ratios = []
        for _ in range(TURNS):
            single, single_cpu = await asyncio.to_thread(alone, rows[0], rows[1])
            watch = asyncio.create_task(held_up(late))
            start = time.monotonic()
            cpu_start = cpu_s()
            samples = await round_of(members, rows, epochs=EPOCHS)
            rate = samples / (time.monotonic() - start)
            rate_cpu = samples / (cpu_s() - cpu_start)
            watch.cancel()
            ratios.append(rate / single / workers)
            cpu_ratios.append(rate_cpu / single_cpu)
            print(
                f"  alone {single:,.0f} samples/s   {workers} workers {rate:,.0f}   "
                f"{ratios[-1]:.3f} N;   "
                f"per CPU second {single_cpu:,.0f} and {rate_cpu:,.0f}   {cpu_ratios[-1]:.3f}",
                flush=True,
            )
    print(
        f"speed: median {median(ratios):.3f} N by the clock, {median(cpu_ratios):.3f} by CPU "
        f"seconds, N = {workers}; event loop late by {1e3 * late[0]:.0f} ms at most"
    )


def tree() -> list[psutil.Process]:
    """Return this process and its workers."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its workers so far."""
    return sum(sum(process.cpu_times()[:2]) for process in tree())


async def memory(slots: int) -> None:
    lab = experiment("lenet_cifar", 50_000, [3, 32, 32])
    async with Pool(accelerator="cpu", slots=slots, devices=DEVICES) as pool:
        members, layout = await members_of(pool, lab)
        await round_of(members, [layout.empty() * 0, *(layout.empty() for _ in members)], epochs=1)
        found = [pss(process.pid) for process in tree()]
    data = 51_000 * 3 * 32 * 32
    bound = 1.2 * data + DEVICES * 3 * layout.row_bytes + 400 * MB
    parts = " + ".join(f"{each / MB:.0f}" for each in found)
    print(
        f"memory, {slots} at once: {sum(found) / MB:.0f} MB = {parts}; one copy of the data is "
        f"{data / MB:.0f}; bound {bound / MB:.0f}"
    )


def main(*, workers: int = cores(), part: Annotated[str, PARTS] = "") -> None:
    keep_large_buffers()
    parts = {"memory": memory, "speed": speed}
    if part:
        asyncio.run(parts[part](workers))
        return
    with folder() as cache:
        env = {**os.environ, "XDG_CACHE_HOME": str(cache), "OPENBLAS_NUM_THREADS": "1"}
        for name, count in (("speed", workers), ("memory", 1), ("memory", 1), ("memory", workers)):
            words = [sys.executable, __file__, "--part", name, "--workers", str(count)]
            subprocess.run(words, env=env, check=True)


if __name__ == "__main__":
    run(main)
