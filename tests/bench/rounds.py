"""Rounds without training: each device returns its model changed by noise, all tensors different.

    parent (FedAvg) --model--> mosquitto --model--> devices --changed models--> mosquitto --> parent, mean

The parent runs here, the devices in other processes, all through the code that the roles run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics as stats
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.aggregation import fedavg, mixing
from common.aggregation.statistics import Statistics
from common.layout import ModelLayout, Row, Section
from common.links import Link
from common.net.link import BrokerAddress
from common.node.child import Answer, ChildFace, Report
from common.node.identity import Identity, new_session
from common.node.life import live
from common.node.memory import keep_large_buffers
from common.node.parent import ParentFace
from common.spec import Closing, Transfer
from common.wire.messages import NodeState, Task
from deploy import broker

RUN = "bench"
PARENT = "parent"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one round, median over the rounds timed, and the parent's peak resident memory in bytes."""

    seconds: float
    parent_peak: int


def layout_of(model_bytes: int) -> ModelLayout:
    """Return a layout of so many bytes, all float32."""
    return ModelLayout.build([("weight", (model_bytes // 4,), Section.PARAMETER)])


def play(model_bytes: int, devices: int, *, repeats: int = 5, processes: int = 1) -> Timing:
    """Time rounds of `devices` x `model_bytes` through a broker of their own, after one warm-up round."""
    keep_large_buffers()
    context = multiprocessing.get_context("spawn")
    names = [f"device-{i}" for i in range(devices)]
    with tempfile.TemporaryDirectory() as home, broker.start(directory=Path(home)) as served:
        workers = [
            context.Process(target=_devices, args=(served.port, names[i::processes], model_bytes))
            for i in range(min(processes, devices))
        ]
        for worker in workers:
            worker.start()
        try:
            seconds = asyncio.run(_parent(served.port, names, model_bytes, repeats))
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
    return Timing(seconds, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


async def _parent(port: int, names: list[str], model_bytes: int, repeats: int) -> float:
    layout = layout_of(model_bytes)
    identity = Identity(RUN, PARENT, "institution", new_session())
    face = ParentFace(
        BrokerAddress("127.0.0.1", port), identity, links=dict.fromkeys(names, Link()), transfer=Transfer(idle_s=30.0)
    )
    face.set_layout(layout)
    row = layout.empty()
    layout.floats(row)[:] = np.random.default_rng(1).standard_normal(layout.columns, np.float32)

    async def one(iteration: int) -> float:
        start = time.perf_counter()
        played = await face.round(
            iteration=iteration, round_=0, models=dict.fromkeys(names, row), epochs=dict.fromkeys(names, 1),
            closing=Closing(),
        )  # fmt: skip
        mixture = fedavg.plan(Statistics.of(played.results), weights="data")
        await asyncio.to_thread(mixing.mix_rows, (mixture,), played.uploads, layout=layout, out=row[None])
        return time.perf_counter() - start

    async def rounds() -> float:
        face.endpoint.set_state(NodeState.READY)
        await face.gather(Closing())
        return stats.median([await one(i) for i in range(repeats + 1)][1:])

    async def goodbye() -> None:
        await face.farewells(timeout_s=5)

    return await live((face.endpoint,), rounds(), connect_timeout_s=10, goodbye=goodbye)


def _devices(port: int, names: list[str], model_bytes: int) -> None:
    keep_large_buffers()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(_device(port, name, model_bytes))

    asyncio.run(run())


async def _device(port: int, name: str, model_bytes: int) -> None:
    layout = layout_of(model_bytes)
    identity = Identity(RUN, name, "device", new_session())
    face = ChildFace(
        BrokerAddress("127.0.0.1", port), identity, parent=PARENT, transfer=Transfer(idle_s=30.0), link=Link()
    )
    out = layout.empty()
    noise = 1e-3 * (1 + int(name.rpartition("-")[2]))

    async def work(task: Task, row: Row, report: Report) -> Answer:
        await asyncio.to_thread(np.add, layout.floats(row), np.float32(noise), out=layout.floats(out))
        return Answer(out, 1, 0.0, 1, 1, 0.0, 0.0)

    async def goodbye() -> None:
        await face.farewell((), timeout_s=2)

    face.endpoint.set_state(NodeState.READY, samples=1)
    await live((face.endpoint,), face.serve(layout, work), connect_timeout_s=10, goodbye=goodbye)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("bytes", type=int)
    parser.add_argument("devices", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    timing = play(options.bytes, options.devices, repeats=options.repeats, processes=options.processes)
    goodput = 2 * options.devices * options.bytes / timing.seconds
    peak = timing.parent_peak / 1e6
    print(f"{timing.seconds * 1e3:.1f} ms a round, {goodput / 1e9:.3f} GB/s, parent peak {peak:.0f} MB")
