"""`make bench NAME=slow`: what slow receivers cost the fast ones beside them, the sender, and the
broker.

    sender (ParentEndpoint) --model--> mosquitto --model--> fast receivers (one process), slow ones
    (a process each)

A slow receiver needs so many milliseconds for each message, in which it reads nothing: its link is
as fast as the others', and nobody declared it. The fast are timed alone and beside the slow, in
turn, in one lab. Then one slow receiver beside a fast one meets brokers that drop what they queue
for it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table
from rounds import end, layout_of, peak_bytes

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
from fedstrata.deploy.brokers import broker

RUN: Final = "slow-1"
SESSION: Final = "5e55104e"  # the sender's; a node learns it when it finds the run
SENDER: Final = "sender"
IDLE_S: Final = 120.0
DEFAULTS: Final = {"max_queued_messages": 1000, "max_inflight_messages": 20, "max_queued_bytes": 0}
BROKERS: Final[Sequence[tuple[str, Mapping[str, int], Sequence[str]]]] = (
    ("ours", {}, ["fast"]),
    ("mosquitto's defaults", DEFAULTS, ["fast"]),
    ("a queue of 50", {"max_queued_messages": 50}, ["fast"]),
    ("a queue of 50, the slow one alone", {"max_queued_messages": 50}, []),
)

Arrivals: TypeAlias = "SimpleQueue[tuple[str, float]]"
Broadcast: TypeAlias = Callable[[Sequence[str]], Awaitable[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What the rounds of a lab cost: chunks published and published again, and the broker's most
    memory in bytes.
    """

    published: int
    again: int
    broker_peak: int


def lab(
    fast: Sequence[str],
    slow: Sequence[str],
    play: Callable[[Broadcast], Awaitable[None]],
    *,
    model_bytes: int,
    transfer: TransferSettings,
    slow_s: float,
    settings: Mapping[str, int],
) -> Cost:
    """Start a broker and receivers, `play` with a function that broadcasts a new model and reports
    who had it when.

    Seconds are counted from the task; `slow_s` is what a slow receiver needs for a message.
    """
    keep_large_buffers()
    context = multiprocessing.get_context("spawn")
    arrivals: Arrivals = context.SimpleQueue()
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        served = stack.enter_context(
            broker.start(directory=Path(home), kind="mosquitto", settings=settings)
        )
        for names, pause_s in ((fast, 0.0), *(((name,), slow_s) for name in slow)):
            process = context.Process(
                target=_receivers,
                args=(served.port, names, model_bytes, transfer, pause_s, arrivals),
            )
            process.start()
            stack.callback(end, process)
        address = BrokerAddress("127.0.0.1", served.port)
        published, again = asyncio.run(
            _send(address, [*fast, *slow], play, model_bytes, transfer, arrivals)
        )
        return Cost(published, again, peak_bytes(served.process.pid))


async def _send(
    address: BrokerAddress,
    names: Sequence[str],
    play: Callable[[Broadcast], Awaitable[None]],
    model_bytes: int,
    transfer: TransferSettings,
    arrivals: Arrivals,
) -> tuple[int, int]:
    layout = layout_of(model_bytes)
    identity = Identity(RUN, SENDER, "institution", SESSION)
    endpoint = ParentEndpoint(
        address, identity, ToChildren(links=dict.fromkeys(names, LinkSettings()), transfer=transfer)
    )
    endpoint.set_layouts(LinkLayouts.plain(layout))
    row = layout.empty()
    draw = np.random.default_rng(1)
    global_round = 0

    async def broadcast(to: Sequence[str]) -> dict[str, float]:
        nonlocal global_round
        layout.floats(row)[:] = draw.standard_normal(layout.columns, np.float32)
        start = time.monotonic()
        played = await endpoint.round(
            Dispatch(
                global_round, 0, models=[(row, to)], epochs=dict.fromkeys(to, 1), closing=Closing()
            )
        )
        global_round += 1
        assert all(np.array_equal(upload, row) for upload in played.models.values()), (
            "another model came back"
        )
        return {name: moment - start for name, moment in (arrivals.get() for _ in to)}

    async def work() -> None:
        endpoint.set_state(NodeState.READY)
        await endpoint.gather(Closing())
        await play(broadcast)

    async def goodbye() -> None:
        await endpoint.farewells(timeout_s=5)

    await live((endpoint,), work(), connect_timeout_s=30, goodbye=goodbye)
    return (
        endpoint.session.link.sender.chunks_published,
        endpoint.session.link.sender.chunks_repeated,
    )


def _receivers(
    port: int,
    names: Sequence[str],
    model_bytes: int,
    transfer: TransferSettings,
    pause_s: float,
    arrivals: Arrivals,
) -> None:
    keep_large_buffers()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(_receiver(port, name, model_bytes, transfer, pause_s, arrivals))

    asyncio.run(run())


async def _receiver(
    port: int,
    name: str,
    model_bytes: int,
    transfer: TransferSettings,
    pause_s: float,
    arrivals: Arrivals,
) -> None:
    layout = layout_of(model_bytes)
    identity = Identity(RUN, name, "device", new_session())
    address = BrokerAddress("127.0.0.1", port)
    endpoint = ChildEndpoint(
        address,
        identity,
        ToParent(parent=SENDER, session=SESSION, transfer=transfer, link=LinkSettings()),
    )
    out = layout.empty()
    receive = endpoint.session.link.receiver.receive_chunk

    def slowly(*what: Any, **more: Any) -> bool:
        time.sleep(pause_s)
        return receive(*what, **more)

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        row = await model.whole()
        arrivals.put((name, time.monotonic()))
        await asyncio.to_thread(np.copyto, out, row)
        return WorkResult(out.data, Work(1, 0.0, 1, 1, 0.0, 0.0))

    async def goodbye() -> None:
        await endpoint.farewell((), timeout_s=2)

    if pause_s:
        endpoint.session.link.receiver.receive_chunk = slowly  # type: ignore[method-assign]
    endpoint.set_state(NodeState.READY, samples=1)
    await live(
        (endpoint,),
        endpoint.serve(LinkLayouts.plain(layout), work),
        connect_timeout_s=30,
        goodbye=goodbye,
    )


def beside(fast: int, slow: int, *, model_bytes: int, slow_s: float, repeats: int) -> Table:
    """Time the fast alone and beside the slow, in turn, after one broadcast of each to warm up."""
    quick, lame = [f"fast-{i}" for i in range(fast)], [f"slow-{i}" for i in range(slow)]
    times: dict[str, list[float]] = {"alone": [], "beside": [], "slow": []}

    async def play(broadcast: Broadcast) -> None:
        for _ in range(repeats + 1):
            alone, both = await broadcast(quick), await broadcast([*quick, *lame])
            times["alone"].append(max(alone.values()))
            times["beside"].append(max(both[name] for name in quick))
            times["slow"].append(max(both[name] for name in lame))

    transfer = TransferSettings(idle_s=IDLE_S)
    cost = lab(
        quick, lame, play, model_bytes=model_bytes, transfer=transfer, slow_s=slow_s, settings={}
    )
    alone_s, beside_s, slow_took_s = (
        statistics.median(times[key][1:]) for key in ("alone", "beside", "slow")
    )
    table = Table(
        "fast alone",
        "beside slow",
        "ratio",
        "the slow",
        "again",
        "broker's peak",
        "100 MB + a blob for each slow",
    )
    table.add_row(
        f"{alone_s * 1e3:.0f} ms",
        f"{beside_s * 1e3:.0f} ms",
        f"{beside_s / alone_s:.2f}",
        f"{slow_took_s:.2f} s",
        f"{cost.again} of {cost.published}",
        f"{cost.broker_peak / 1e6:.0f} MB",
        f"{100 + slow * model_bytes / 1e6:.0f} MB",
    )
    return table


def dropped(*, model_bytes: int, slow_s: float) -> Table:
    """Let brokers drop what they queue for a slow receiver, and tell what share is published again."""
    table = Table("broker", "fast", "slow", "chunks", "again", "share", "broker's peak")
    transfer = TransferSettings(idle_s=IDLE_S, chunk_bytes=32_768)
    chunks = -(-model_bytes // transfer.chunk_bytes)
    for name, settings, fast in BROKERS:
        times: dict[str, float] = {}

        async def play(
            broadcast: Broadcast, names: Sequence[str] = (*fast, "slow"), times: Any = times
        ) -> None:
            times |= await broadcast(names)

        cost = lab(
            fast, ["slow"], play,
            model_bytes=model_bytes, transfer=transfer, slow_s=slow_s, settings=settings,
        )  # fmt: skip
        table.add_row(
            name,
            *(f"{times[who]:.2f} s" if who in times else "" for who in ("fast", "slow")),
            str(chunks),
            str(cost.again),
            f"{100 * cost.again / chunks:.0f} %",
            f"{cost.broker_peak / 1e6:.0f} MB",
        )
        print(".", end="", file=sys.stderr, flush=True)
    return table


def main() -> None:
    """Measure both and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=45_000_000)
    parser.add_argument("--fast", type=int, default=6)
    parser.add_argument("--slow", type=int, default=4)
    parser.add_argument(
        "--slow-ms", type=float, default=50.0, help="what a slow receiver needs for a chunk of 1 MB"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    console = Console(width=140)
    console.print(
        f"{options.fast} fast, {options.slow} slow ({options.slow_ms:g} ms for 1 MB), "
        f"{options.bytes / 1e6:g} MB each"
    )
    console.print(
        beside(
            options.fast, options.slow,
            model_bytes=options.bytes, slow_s=options.slow_ms / 1e3, repeats=options.repeats,
        )
    )  # fmt: skip
    for model_bytes in (40_000_000, 100_000_000):
        console.print(f"1 fast, 1 slow (1 ms for 32 KB), {model_bytes / 1e6:g} MB each")
        console.print(dropped(model_bytes=model_bytes, slow_s=0.001))


if __name__ == "__main__":
    main()
