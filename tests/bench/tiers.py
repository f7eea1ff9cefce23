"""`make bench NAME=tiers`: dispatch over two tiers, passed on as it comes against stored and
forwarded.

    cloud --WAN--> institution --LAN--> 10 devices        links kept by the token bucket

Once with the upper link the slower one, once with the lower: the cloud cuts chunks for the slowest
link on their way. Timed from the cloud's task until the last device has the whole model; all
processes share one machine's clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any, Final

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.model.layout import LinkLayouts, ModelLayout
from fedstrata.common.protocol.messages import NodeState, Task
from fedstrata.common.runtime.lifecycle import live
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.round import Report, WorkResult
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.brokers import broker
from tests.bench.endpoints import (
    CONNECT_S,
    SESSION,
    Arrivals,
    child_of,
    dispatch,
    lead,
    local,
    parent_of,
    result,
    return_models,
)
from tests.bench.running import SPAWN, folder, run, spawned
from tests.helpers.nodes import drawn, layout_of

INSTITUTION: Final = "institution"
RATES: Final = ((200.0, 400.0), (400.0, 150.0))  # Mbit/s of WAN and LAN
TRANSFER: Final = TransferSettings(idle_s=60.0)


def play(
    model_bytes: int, devices: int, *, wan_mbit: float, lan_mbit: float, repeats: int
) -> dict[str, float]:
    """Return the median dispatch seconds, both ways taken in turn, after one warm-up each."""
    keep_large_buffers()
    layout = layout_of(model_bytes)
    names = [f"device-{i}" for i in range(devices)]
    arrivals: Arrivals = SPAWN.SimpleQueue()
    to_parent = {"parent": INSTITUTION, "transfer": TRANSFER}
    with (
        folder() as home,
        broker.start(directory=home) as served,
        spawned(_institution, served.port, names, layout, lan_mbit),
        spawned(return_models, served.port, names, layout, arrivals, **to_parent),
    ):
        rates = wan_mbit, lan_mbit
        seconds = asyncio.run(_cloud(served.port, devices, layout, rates, repeats, arrivals))
    return {
        "passed on": median(seconds[2::2]),
        "stored and forwarded": median(seconds[3::2]),
        "the slower link": model_bytes * 8 / (min(wan_mbit, lan_mbit) * 1e6),
    }


async def _cloud(
    port: int,
    devices: int,
    layout: ModelLayout,
    rates: tuple[float, float],
    repeats: int,
    arrivals: Arrivals,
) -> list[float]:
    wan_mbit, lan_mbit = rates
    links = {INSTITUTION: LinkSettings(down_mbit=wan_mbit)}
    onward = {INSTITUTION: lan_mbit * 1e6 / 8}
    endpoint = parent_of(local(port), CLOUD, links, layout, TRANSFER, role="cloud", onward=onward)

    async def rounds() -> list[float]:
        found = []
        for global_round in range(2 * (repeats + 1)):
            row = drawn(layout, global_round)
            start = time.monotonic()
            await endpoint.round(dispatch(global_round, [(row, [INSTITUTION])]))
            moments = [arrivals.get()[1] for _ in range(devices)]
            found.append(max(moments) - start)
        return found

    return await lead(endpoint, rounds)


def _institution(port: int, names: list[str], layout: ModelLayout, lan_mbit: float) -> None:
    keep_large_buffers()

    async def run() -> None:
        identity: dict[str, Any] = {"role": "institution", "own": SESSION}
        up = child_of(local(port), INSTITUTION, parent=CLOUD, transfer=TRANSFER, **identity)
        links = dict.fromkeys(names, LinkSettings(down_mbit=lan_mbit))
        down = parent_of(local(port), INSTITUTION, links, layout, TRANSFER, **identity)

        async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
            start = model if task.key.global_round % 2 == 0 else await model.whole()
            played = await down.round(dispatch(task.key.global_round, [(start, names)]))
            return result(played.uploads.rows_K[0])

        async def goodbye() -> None:
            await down.farewells(timeout_s=5)
            await up.farewell((), timeout_s=2)

        async def serve() -> None:
            down.set_state(NodeState.READY)
            await down.gather(Closing())
            up.set_state(NodeState.READY, samples=1)
            await up.serve(LinkLayouts.plain(layout), work)

        await live((up, down), serve(), connect_timeout_s=CONNECT_S, goodbye=goodbye)

    asyncio.run(run())


def main(
    *,
    bytes_: int = 45_000_000,
    devices: int = 10,
    rates: Annotated[Sequence[tuple[float, float]], "WAN and LAN, Mbit/s"] = RATES,
    repeats: int = 5,
) -> None:
    """Print the seconds of each way over each pair of links."""
    for wan, lan in rates:
        print(f"WAN {wan:g} Mbit/s, LAN {lan:g} Mbit/s")
        found = play(bytes_, devices, wan_mbit=wan, lan_mbit=lan, repeats=repeats)
        for way, seconds in found.items():
            of_link = seconds / found["the slower link"]
            print(f"  {way:22} {seconds:.3f} s  {of_link:.3f} of the slower link's time")


if __name__ == "__main__":
    run(main)
