"""Rounds without training: each device returns its model changed by noise, all tensors different.

    parent (FedAvg) --model--> mosquitto --model--> devices --changed models--> mosquitto -->
    parent, mean

The parent and the devices are in other processes, all through the code that the roles run.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal, Self

import numpy as np
import psutil

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.fedavg import FedAvg
from fedstrata.common.methods.rule import RuleContext
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.tls import Tls
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.guard import OPEN, Guard
from tests.bench.endpoints import RUN, child_of, dispatch, follow, lead, parent_of, run_all
from tests.bench.running import MB, SPAWN, folder, medians, peak_bytes, run, spawned
from tests.helpers.nodes import drawn, layout_of

PARENT: Final = "parent"
TRANSFER: Final = TransferSettings(idle_s=30.0)


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
        names = [f"device-{i}" for i in range(devices)]
        layout = layout_of(model_bytes)
        self._pipe, theirs = SPAWN.Pipe()
        with ExitStack() as stack:
            home = stack.enter_context(folder())
            served = stack.enter_context(broker.start(directory=home, guard=guard))
            address = BrokerAddress("127.0.0.1", served.port, tls=tls)
            parent = stack.enter_context(spawned(_lead, address, names, layout, theirs, home))
            self._pids = {"broker": served.process.pid, "parent": parent.pid or 0}
            for i in range(min(processes, devices)):
                some = names[i::processes]
                process = stack.enter_context(spawned(_serve, address, some, layout))
                self._pids[f"devices-{i}"] = process.pid or 0
            stack.callback(self._pipe.send, False)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
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


def _lead(
    address: BrokerAddress, names: list[str], layout: ModelLayout, pipe: Connection, home: Path
) -> None:
    keep_large_buffers()
    spool = Spool.open(home, run=RUN, node=PARENT)
    nothing = np.empty(0, np.uint8)
    context = RuleContext(layout, PARENT, 1, measures=False, rows=lambda name, count: nothing)
    rule = aggregator.build(FedAvg(), context)
    rule.begin(drawn(layout, 1))

    async def run() -> None:
        endpoint = parent_of(address, PARENT, names, layout, TRANSFER, spool=spool)

        async def rounds() -> None:
            global_round = 0
            while await asyncio.to_thread(pipe.recv):
                start = time.perf_counter()
                models = rule.dispatch(global_round, names)
                played = await endpoint.round(dispatch(global_round, models))
                await asyncio.to_thread(rule.aggregate, global_round, played.uploads)
                pipe.send(time.perf_counter() - start)
                global_round += 1

        await lead(endpoint, rounds)

    asyncio.run(run())


def _serve(address: BrokerAddress, names: list[str], layout: ModelLayout) -> None:
    async def one(name: str) -> None:
        noise = np.float32(1e-3 * (1 + int(name.rpartition("-")[2])))

        def changed(out: Row, row: Row) -> None:
            np.add(layout.floats(row), noise, out=layout.floats(out))

        endpoint = child_of(address, name, parent=PARENT, transfer=TRANSFER)
        await follow(endpoint, layout, answer=changed)

    run_all(map(one, names))


def main(bytes_: int, devices: int, /, *, repeats: int = 5, processes: int = 1) -> None:
    """Print the median of some rounds."""
    with Rounds(bytes_, devices, processes=processes) as played:
        (median_s,) = medians(repeats, played.seconds)
        peak = played.peak_bytes("parent") / MB
    goodput = 2 * devices * bytes_ / median_s
    print(f"{median_s * 1e3:.1f} ms a round, {goodput / 1e9:.3f} GB/s, parent peak {peak:.0f} MB")


if __name__ == "__main__":
    run(main)
