"""`make bench NAME=links`: models over links that the kernel keeps, against bytes / rate, as root.

    parent, broker ==== shaped wire ====> child        each in a network namespace of its own

Each round moves a model down and, changed, up. The ideal is (bytes + 66 for each TCP segment of
1448) * 8 / rate: the headers of Ethernet, IP and TCP with timestamps, for tc counts frames.
Everything else, MQTT's packets and our messages included, counts against us. Needs root, or
`unshare --map-root-user --net`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from rounds import layout_of

from fedstrata.common.accounting.counters import Account, Direction
from fedstrata.common.accounting.traffic import TcpStats
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import ConnectionFailed, InvalidExperiment, RunFailed
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.model.layout import LinkLayouts
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.messages import NodeState, Task
from fedstrata.common.protocol.peers import ToChildren, ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.lifecycle import live
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.round import Dispatch, Report, WorkResult
from fedstrata.common.runtime.world import new_session
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.links.kernel import FRAME_BYTES
from tests.helpers import namespaces
from tests.helpers.namespaces import Namespace, joined

RUN, PARENT, CHILD = "bench-1", "parent", "child"
SESSION = "5e55104e"  # the parent's; a node learns it when it finds the run
PORT = 1883
SEGMENT_BYTES = 1448
HEADER_BYTES = FRAME_BYTES - SEGMENT_BYTES


@dataclass(frozen=True, slots=True)
class Setting:
    """A link of `mbit` Mbit/s both ways, a model, a keep-alive in seconds, and how many rounds to
    play.
    """

    mbit: float
    model_bytes: int
    keepalive_s: int
    rounds: int = 1

    @property
    def link(self) -> LinkSettings:
        """Return the link as both ends know it."""
        return LinkSettings(up_mbit=self.mbit, down_mbit=self.mbit)

    @property
    def transfer(self) -> TransferSettings:
        """Return how models travel."""
        return TransferSettings(keepalive_s=self.keepalive_s, idle_s=60.0)


SETTINGS = (
    Setting(100, 45_000_000, 30, rounds=3),
    Setting(10, 5_000_000, 30, rounds=3),
    Setting(1, 1_000_000, 30),
    Setting(1, 3_000_000, 5),
    Setting(0.256, 1_000_000, 10),
    Setting(0.256, 250_000, 10),
)


@dataclass(frozen=True, slots=True)
class Reported:
    """What one end counted: chunks published, and those again; connections lost; bytes of MQTT
    packets that came in.

    `wire` is the kernel's count on its connection to the broker.
    """

    chunks: int
    repeated: int
    reconnects: int
    message_bytes: int
    wire: TcpStats

    @classmethod
    def of(cls, endpoint: Endpoint) -> Reported:
        """Read an endpoint's counts."""
        out = endpoint.session.link.sender
        received = message_bytes(endpoint.session.link.counters, "received")
        meter, reconnects = endpoint.connection.meter, endpoint.connection.reconnects
        return cls(out.chunks_published, out.chunks_repeated, reconnects, received, meter.sample())


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each round's way down and way up, what both ends reported, and the bytes that
    crossed the wire.

    `down_bytes`, `up_bytes`: as the interfaces counted, without 66 bytes of headers for each frame.
    """

    down_s: Sequence[float]
    up_s: Sequence[float]
    parent: Reported
    child: Reported
    down_bytes: int
    up_bytes: int


def message_bytes(account: Account, direction: Direction) -> int:
    """Return the bytes of MQTT packets that an account has in one direction."""
    return sum(tally.message for (_, way, _), tally in account.cells.items() if way == direction)


def ideal_s(setting: Setting) -> float:
    """Return (bytes + headers) * 8 / rate for one way of a setting's model, seconds."""
    frames = -(-setting.model_bytes // SEGMENT_BYTES)
    return (setting.model_bytes + frames * HEADER_BYTES) * 8 / (setting.mbit * 1e6)


def play(setting: Setting) -> Measured:
    """Play a setting's rounds. Raises InvalidExperiment where there are no namespaces, RunFailed,
    ConnectionFailed.
    """
    wire = namespaces.VethPair(
        0, CHILD, PARENT, CHILD, up_mbit=setting.mbit, down_mbit=setting.mbit
    )
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as home, joined((PARENT, CHILD), (wire,)) as spaces:
        with spaces[PARENT].entered():
            served = broker.start(directory=Path(home), host="0.0.0.0", port=PORT)
        worker = multiprocessing.get_context("spawn").Process(
            target=run_child, args=(wire.parent_address, setting, theirs)
        )
        with served:
            with spaces[CHILD].entered():
                worker.start()
            theirs.close()
            try:
                with spaces[PARENT].entered():
                    parent, down_s, up_s = asyncio.run(run_parent(setting))
                child = ours.recv()
                down_bytes, up_bytes = payload_bytes(spaces[CHILD])
            finally:
                worker.join(10)
                worker.kill()
    return Measured(down_s, up_s, parent, child, down_bytes, up_bytes)


def payload_bytes(space: Namespace) -> tuple[int, int]:
    """Return the bytes that came in and went out by the only wire of a namespace, without the
    frames' headers.
    """
    with space.entered():
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    counts = next(line.partition(":")[2] for line in lines if line.lstrip().startswith("up0:"))
    received, frames_in, *_, sent, frames_out = [int(count) for count in counts.split()[:10]]
    return received - HEADER_BYTES * frames_in, sent - HEADER_BYTES * frames_out


async def run_parent(setting: Setting) -> tuple[Reported, list[float], list[float]]:
    """Play the rounds as their parent; return its counts, and the seconds of each round's two ways."""
    layout = layout_of(setting.model_bytes)
    identity = Identity(RUN, PARENT, "institution", SESSION)
    endpoint = ParentEndpoint(
        BrokerAddress("127.0.0.1", PORT),
        identity,
        ToChildren(links={CHILD: setting.link}, transfer=setting.transfer, shaped=False),
    )
    endpoint.set_layouts(LinkLayouts.plain(layout))
    row = layout.empty()
    layout.floats(row)[:] = np.random.default_rng(1).standard_normal(layout.columns, np.float32)
    down_s, up_s = [], []

    async def rounds() -> None:
        endpoint.set_state(NodeState.READY)
        await endpoint.gather(Closing())
        for global_round in range(setting.rounds):
            layout.floats(row)[:] += 1
            played = await endpoint.round(
                Dispatch(
                    global_round, 0, models=[(row, [CHILD])], epochs={CHILD: 1}, closing=Closing()
                )
            )
            phases = played.timeline.phases()
            down_s.append(phases["dispatch"])
            up_s.append(phases["train"] + phases["wait"] + phases["collect"])

    async def goodbye() -> None:
        await endpoint.farewells(timeout_s=20)

    await live((endpoint,), rounds(), connect_timeout_s=10, goodbye=goodbye)
    return Reported.of(endpoint), down_s, up_s


def run_child(host: str, setting: Setting, reported: Connection) -> None:
    """Answer each model with its negative, to the end of the run; then tell the counts."""

    async def run() -> Endpoint:
        layout = layout_of(setting.model_bytes)
        identity = Identity(RUN, CHILD, "device", new_session())
        endpoint = ChildEndpoint(
            BrokerAddress(host, PORT),
            identity,
            ToParent(
                parent=PARENT,
                session=SESSION,
                transfer=setting.transfer,
                link=setting.link,
                shaped=False,
            ),
        )
        out = layout.empty()

        async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
            row = await model.whole()
            # plus one would be the next model: it has it
            np.negative(layout.floats(row), out=layout.floats(out))
            return WorkResult(out.data, Work(1, 0.0, 1, 1, 0.0, 0.0))

        async def goodbye() -> None:
            await endpoint.farewell((), timeout_s=20)

        endpoint.set_state(NodeState.READY, samples=1)
        await live(
            (endpoint,),
            endpoint.serve(LinkLayouts.plain(layout), work),
            connect_timeout_s=10,
            goodbye=goodbye,
        )
        return endpoint

    reported.send(Reported.of(asyncio.run(run())))


def main(settings: Sequence[Setting]) -> None:
    """Measure each setting and print a row for it as it comes."""
    table = Table(
        "link",
        "model",
        "keep-alive",
        "ideal",
        "down",
        "up",
        "down / ideal",
        "up / ideal",
        "chunks down, up",
        "published twice",
        "reconnects",
        "wire / MQTT, down, up",
        "wire / TCP_INFO, down, up",
    )
    for column in table.columns:
        column.justify = "right"
    for setting in settings:
        head = [
            f"{setting.mbit:g} Mbit/s",
            f"{setting.model_bytes / 1e6:g} MB",
            f"{setting.keepalive_s} s",
        ]
        try:
            seen = play(setting)
        except (ConnectionFailed, RunFailed) as error:
            table.add_row(*head, f"[red]{error}")
            continue
        ideal, down, up = (
            ideal_s(setting),
            float(np.median(seen.down_s)),
            float(np.median(seen.up_s)),
        )
        chunks, again = (
            seen.parent.chunks + seen.child.chunks,
            seen.parent.repeated + seen.child.repeated,
        )
        table.add_row(
            *head,
            f"{ideal:.3f} s",
            f"{down:.3f} s",
            f"{up:.3f} s",
            f"{down / ideal:.3f}",
            f"{up / ideal:.3f}",
            f"{seen.parent.chunks}, {seen.child.chunks}",
            f"{100 * again / max(1, chunks):.1f} %",
            f"{seen.parent.reconnects}, {seen.child.reconnects}",
            (
                f"{seen.down_bytes / seen.child.message_bytes:.4f}, "
                f"{seen.up_bytes / seen.parent.message_bytes:.4f}"
            ),
            (
                f"{seen.down_bytes / seen.child.wire.received:.5f}, "
                f"{seen.up_bytes / seen.child.wire.sent:.5f}"
            ),
        )
        print(".", end="", file=sys.stderr, flush=True)
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    console = Console(width=200)
    console.print(
        f"\n{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"TCP {congestion}"
    )
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure models over links that the kernel keeps.")
    parser.add_argument(
        "--link",
        nargs=4,
        action="append",
        metavar=("MBIT", "BYTES", "KEEPALIVE_S", "ROUNDS"),
        help="instead of all",
    )
    given = parser.parse_args().link
    try:
        main(
            [Setting(float(m), int(b), int(k), int(r)) for m, b, k, r in given]
            if given
            else SETTINGS
        )
    except InvalidExperiment as error:
        sys.exit(str(error))
