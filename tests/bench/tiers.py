"""`make bench NAME=tiers`: dispatch over two tiers, passed on as it comes against stored and
forwarded.

    cloud --WAN--> institution --LAN--> 10 devices        links kept by the token bucket

Once with the upper link the slower one, once with the lower: the cloud cuts chunks for the slowest
link on their way. Timed from the cloud's task until the last device has the whole model; all
processes share one machine's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics as stats
import tempfile
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
from rounds import layout_of

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.model.layout import LinkLayouts
from fedstrata.common.net.address import BrokerAddress
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
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.brokers import broker

RUN = "tiers-1"
SESSION = "5e55104e"  # each parent's; a node learns it when it finds the run
INSTITUTION = "institution"
RATES = ((200.0, 400.0), (400.0, 150.0))  # Mbit/s of WAN and LAN
TRANSFER = TransferSettings(idle_s=60.0)


def play(
    model_bytes: int, devices: int, *, wan_mbit: float, lan_mbit: float, repeats: int
) -> dict[str, float]:
    """Return the median dispatch seconds, both ways taken in turn, after one warm-up each."""
    keep_large_buffers()
    context = multiprocessing.get_context("spawn")
    names = [f"device-{i}" for i in range(devices)]
    arrivals: SimpleQueue[float] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as home, broker.start(directory=Path(home)) as served:
        workers = [
            context.Process(
                target=_institution, args=(served.port, names, model_bytes, wan_mbit, lan_mbit)
            ),
            context.Process(target=_devices, args=(served.port, names, model_bytes, arrivals)),
        ]
        for worker in workers:
            worker.start()
        try:
            mbit = wan_mbit, lan_mbit
            seconds = asyncio.run(
                _cloud(served.port, devices, model_bytes, mbit, repeats, arrivals)
            )
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
    return {
        "passed on": stats.median(seconds[2::2]),
        "stored and forwarded": stats.median(seconds[3::2]),
        "the slower link": model_bytes * 8 / (min(wan_mbit, lan_mbit) * 1e6),
    }


async def _cloud(
    port: int,
    devices: int,
    model_bytes: int,
    mbit: tuple[float, float],
    repeats: int,
    arrivals: SimpleQueue[float],
) -> list[float]:
    wan_mbit, lan_mbit = mbit
    layout = layout_of(model_bytes)
    endpoint = ParentEndpoint(
        BrokerAddress("127.0.0.1", port),
        Identity(RUN, CLOUD, "cloud", SESSION),
        ToChildren(
            links={INSTITUTION: LinkSettings(down_mbit=wan_mbit)},
            transfer=TRANSFER,
            onward={INSTITUTION: lan_mbit * 1e6 / 8},
        ),
    )
    endpoint.set_layouts(LinkLayouts.plain(layout))
    row = layout.empty()

    async def one(global_round: int) -> float:
        layout.floats(row)[:] = np.random.default_rng(global_round).standard_normal(
            layout.columns, np.float32
        )
        start = time.monotonic()
        models = [(row, [INSTITUTION])]
        await endpoint.round(
            Dispatch(global_round, 0, models=models, epochs={INSTITUTION: 1}, closing=Closing())
        )
        return max(arrivals.get() for _ in range(devices)) - start

    async def rounds() -> list[float]:
        endpoint.set_state(NodeState.READY)
        await endpoint.gather(Closing())
        return [await one(i) for i in range(2 * (repeats + 1))]

    async def goodbye() -> None:
        await endpoint.farewells(timeout_s=5)

    return await live((endpoint,), rounds(), connect_timeout_s=10, goodbye=goodbye)


def _institution(
    port: int, names: list[str], model_bytes: int, wan_mbit: float, lan_mbit: float
) -> None:
    keep_large_buffers()

    async def run() -> None:
        layout = layout_of(model_bytes)
        identity = Identity(RUN, INSTITUTION, "institution", SESSION)
        address = BrokerAddress("127.0.0.1", port)
        up = ChildEndpoint(
            address,
            identity,
            ToParent(parent=CLOUD, session=SESSION, transfer=TRANSFER, link=LinkSettings()),
        )
        down = ParentEndpoint(
            address,
            identity,
            ToChildren(
                links=dict.fromkeys(names, LinkSettings(down_mbit=lan_mbit)), transfer=TRANSFER
            ),
        )
        down.set_layouts(LinkLayouts.plain(layout))

        async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
            start = model if task.key.global_round % 2 == 0 else await model.whole()
            models, epochs = [(start, names)], dict.fromkeys(names, 1)
            played = await down.round(
                Dispatch(task.key.global_round, 0, models=models, epochs=epochs, closing=Closing())
            )
            return WorkResult(played.uploads.rows_K[0].data, Work(1, 0.0, 1, 1, 0.0, 0.0))

        async def goodbye() -> None:
            await down.farewells(timeout_s=5)
            await up.farewell((), timeout_s=2)

        async def serve() -> None:
            down.set_state(NodeState.READY)
            await down.gather(Closing())
            up.set_state(NodeState.READY, samples=1)
            await up.serve(LinkLayouts.plain(layout), work)

        await live((up, down), serve(), connect_timeout_s=10, goodbye=goodbye)

    asyncio.run(run())


def _devices(port: int, names: list[str], model_bytes: int, arrivals: SimpleQueue[float]) -> None:
    keep_large_buffers()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(_device(port, name, model_bytes, arrivals))

    asyncio.run(run())


async def _device(port: int, name: str, model_bytes: int, arrivals: SimpleQueue[float]) -> None:
    layout = layout_of(model_bytes)
    endpoint = ChildEndpoint(
        BrokerAddress("127.0.0.1", port),
        Identity(RUN, name, "device", new_session()),
        ToParent(parent=INSTITUTION, session=SESSION, transfer=TRANSFER, link=LinkSettings()),
    )
    out = layout.empty()

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        row = await model.whole()
        arrivals.put(time.monotonic())
        await asyncio.to_thread(np.copyto, out, row)
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
    parser.add_argument("--bytes", type=int, default=45_000_000)
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument(
        "--rates", type=float, nargs=2, action="append", metavar=("WAN", "LAN"), help="Mbit/s"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for wan, lan in options.rates or RATES:
        print(f"WAN {wan:g} Mbit/s, LAN {lan:g} Mbit/s")
        found = play(
            options.bytes, options.devices, wan_mbit=wan, lan_mbit=lan, repeats=options.repeats
        )
        for way, seconds in found.items():
            print(
                f"  {way:22} {seconds:.3f} s  {seconds / found['the slower link']:.3f} of the "
                "slower link's time"
            )
