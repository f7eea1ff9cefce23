"""Rounds without training: each device returns its model changed by noise, all tensors different.

    parent (FedAvg) --model--> mosquitto --model--> devices --changed models--> mosquitto -->
    parent, mean

The parent runs here, the devices in other processes, all through the code that the roles run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, Self

import numpy as np
import psutil

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.fedavg import FedAvg
from fedstrata.common.methods.rule import RuleContext
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Section
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.tls import Tls
from fedstrata.common.protocol.messages import NodeState, Task
from fedstrata.common.protocol.peers import ToChildren, ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.lifecycle import live
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.round import Dispatch, Report, WorkResult
from fedstrata.common.runtime.world import new_session
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.guard import OPEN, Guard

RUN = "bench-1"
PARENT = "parent"
SESSION = "5e55104e"  # the parent's; a node learns it when it finds the run


def layout_of(model_bytes: int) -> ModelLayout:
    """Return a layout of so many bytes, all float32."""
    return ModelLayout.build([("weight", (model_bytes // 4,), Section.PARAMETER)])


class Rounds:
    """A broker, a parent and its devices in processes of their own; `seconds` plays a round."""

    def __init__(
        self,
        model_bytes: int,
        devices: int,
        *,
        processes: int = 1,
        guard: Guard = OPEN,
        tls: Tls | None = None,
    ) -> None:
        self._model_bytes = model_bytes
        self._guard, self._tls = guard, tls
        self._names = [f"device-{i}" for i in range(devices)]
        self._processes = min(processes, devices)

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with ExitStack() as stack:
            home = stack.enter_context(tempfile.TemporaryDirectory())
            served = stack.enter_context(broker.start(directory=Path(home), guard=self._guard))
            address = BrokerAddress("127.0.0.1", served.port, tls=self._tls)
            parent = context.Process(
                target=_run_parent, args=(address, self._names, self._model_bytes, theirs, home)
            )
            parts = [self._names[i :: self._processes] for i in range(self._processes)]
            devices = [
                context.Process(target=_devices, args=(address, p, self._model_bytes))
                for p in parts
            ]
            for process in (parent, *devices):
                process.start()
                stack.callback(end, process)
            stack.callback(self._pipe.send, False)
            self._pids = {"broker": served.process.pid, "parent": parent.pid or 0}
            self._pids |= {f"devices-{i}": process.pid or 0 for i, process in enumerate(devices)}
            self._stack = stack.pop_all()
        self.seconds()  # to warm up
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def seconds(self) -> float:
        """Return how long one round takes, from the models at the parent to their mean."""
        self._pipe.send(True)
        seconds: float = self._pipe.recv()
        return seconds

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process since it began."""
        return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in self._pids.items()}

    def peak_bytes(self, role: Literal["broker", "parent"]) -> int:
        """Return the most memory that a process has had resident."""
        return peak_bytes(self._pids[role])


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
    )


def end(process: BaseProcess) -> None:
    """Let a process end by itself, but not for ever."""
    process.join(10)
    process.kill()


def _run_parent(
    address: BrokerAddress, names: list[str], model_bytes: int, pipe: Connection, home: str
) -> None:
    keep_large_buffers()
    asyncio.run(_parent(address, names, model_bytes, pipe, home))


async def _parent(
    address: BrokerAddress, names: list[str], model_bytes: int, pipe: Connection, home: str
) -> None:
    layout = layout_of(model_bytes)
    identity = Identity(RUN, PARENT, "institution", SESSION)
    endpoint = ParentEndpoint(
        address,
        identity,
        ToChildren(
            links=dict.fromkeys(names, LinkSettings()), transfer=TransferSettings(idle_s=30.0)
        ),
        spool=Spool.open(Path(home), run=RUN, node=PARENT),
    )
    endpoint.set_layouts(LinkLayouts.plain(layout))
    row = layout.empty()
    layout.floats(row)[:] = np.random.default_rng(1).standard_normal(layout.columns, np.float32)
    rule = aggregator.build(
        FedAvg(),
        RuleContext(
            layout=layout,
            node=PARENT,
            seed=1,
            measures=False,
            rows=lambda name, count: np.empty(0, np.uint8),
        ),
    )
    rule.begin(row)

    async def one(global_round: int) -> float:
        start = time.perf_counter()
        models, epochs = rule.dispatch(global_round, names), dict.fromkeys(names, 1)
        played = await endpoint.round(
            Dispatch(global_round, 0, models=models, epochs=epochs, closing=Closing())
        )
        await asyncio.to_thread(rule.aggregate, global_round, played.uploads)
        return time.perf_counter() - start

    async def rounds() -> None:
        endpoint.set_state(NodeState.READY)
        await endpoint.gather(Closing())
        global_round = 0
        while await asyncio.to_thread(pipe.recv):
            pipe.send(await one(global_round))
            global_round += 1

    async def goodbye() -> None:
        await endpoint.farewells(timeout_s=5)

    await live((endpoint,), rounds(), connect_timeout_s=10, goodbye=goodbye)


def _devices(address: BrokerAddress, names: list[str], model_bytes: int) -> None:
    keep_large_buffers()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(_device(address, name, model_bytes))

    asyncio.run(run())


async def _device(address: BrokerAddress, name: str, model_bytes: int) -> None:
    layout = layout_of(model_bytes)
    identity = Identity(RUN, name, "device", new_session())
    endpoint = ChildEndpoint(
        address,
        identity,
        ToParent(
            parent=PARENT,
            session=SESSION,
            transfer=TransferSettings(idle_s=30.0),
            link=LinkSettings(),
        ),
    )
    out = layout.empty()
    noise = 1e-3 * (1 + int(name.rpartition("-")[2]))

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        row = await model.whole()
        await asyncio.to_thread(
            np.add, layout.floats(row), np.float32(noise), out=layout.floats(out)
        )
        return WorkResult(out.data, Work(1, 0.0, 1, 1, 0.0, 0.0))

    async def goodbye() -> None:
        await endpoint.farewell((), timeout_s=2)

    endpoint.set_state(NodeState.READY, samples=1)
    await live(
        (endpoint,),
        endpoint.serve(LinkLayouts.plain(layout), work),
        connect_timeout_s=10,
        goodbye=goodbye,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("bytes", type=int)
    parser.add_argument("devices", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    with Rounds(options.bytes, options.devices, processes=options.processes) as played:
        median_s = statistics.median(played.seconds() for _ in range(options.repeats))
        peak = played.peak_bytes("parent") / 1e6
    goodput = 2 * options.devices * options.bytes / median_s
    print(f"{median_s * 1e3:.1f} ms a round, {goodput / 1e9:.3f} GB/s, parent peak {peak:.0f} MB")
