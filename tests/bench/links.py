"""`make bench NAME=links`: models over links that the kernel keeps, against bytes / rate, as root.

    parent, broker ==== shaped wire ====> child        each in a network namespace of its own

Each round moves a model down and, changed, up. The ideal is (bytes + 66 for each TCP segment of
1448) * 8 / rate: the headers of Ethernet, IP and TCP with timestamps, for tc counts frames.
Everything else, MQTT's packets and our messages included, counts against us. Needs root, or
`unshare --map-root-user --net`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import numpy as np

from fedstrata.common.accounting.counters import Account, Direction
from fedstrata.common.accounting.traffic import TcpStats
from fedstrata.common.errors import ConnectionFailed, InvalidExperiment, RunFailed
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.model.layout import Row
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.settings.links import LinkSettings
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.links.kernel import FRAME_BYTES
from tests.bench.endpoints import child_of, dispatch, follow, lead, local, parent_of
from tests.bench.running import MB, SPAWN, Table, folder, run, spawned
from tests.helpers.namespaces import Namespace, VethPair, joined
from tests.helpers.nodes import drawn, layout_of

PARENT, CHILD = "parent", "child"
PORT: Final = 1883
SEGMENT_BYTES: Final = 1448
HEADER_BYTES: Final = FRAME_BYTES - SEGMENT_BYTES
FAREWELL_S: Final = 20.0


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
    wire = VethPair(0, CHILD, PARENT, CHILD, up_mbit=setting.mbit, down_mbit=setting.mbit)
    ours, theirs = SPAWN.Pipe(duplex=False)
    with folder() as home, joined((PARENT, CHILD), (wire,)) as spaces:
        with spaces[PARENT].entered():
            served = broker.start(directory=home, host="0.0.0.0", port=PORT)
        with served, ExitStack() as stack:
            with spaces[CHILD].entered():
                given = (wire.parent_address, setting, theirs)
                stack.enter_context(spawned(run_child, *given))
            theirs.close()
            with spaces[PARENT].entered():
                parent, down_s, up_s = asyncio.run(run_parent(setting))
            child = ours.recv()
            down_bytes, up_bytes = payload_bytes(spaces[CHILD])
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
    endpoint = parent_of(
        local(PORT), PARENT, {CHILD: setting.link}, layout, setting.transfer, shaped=False
    )
    row = drawn(layout, 1)
    down_s: list[float] = []
    up_s: list[float] = []

    async def rounds() -> None:
        for global_round in range(setting.rounds):
            layout.floats(row)[:] += 1
            played = await endpoint.round(dispatch(global_round, [(row, [CHILD])]))
            phases = played.timeline.phases()
            down_s.append(phases["dispatch"])
            up_s.append(phases["train"] + phases["wait"] + phases["collect"])

    await lead(endpoint, rounds, farewell_s=FAREWELL_S)
    return Reported.of(endpoint), down_s, up_s


def run_child(host: str, setting: Setting, reported: Connection) -> None:
    """Answer each model with its negative, to the end of the run; then report the counts."""
    layout = layout_of(setting.model_bytes)

    def negative(out: Row, row: Row) -> None:
        # plus one would be the next model: it has it
        np.negative(layout.floats(row), out=layout.floats(out))

    async def run() -> None:
        endpoint = child_of(
            BrokerAddress(host, PORT),
            CHILD,
            parent=PARENT,
            transfer=setting.transfer,
            link=setting.link,
            shaped=False,
        )
        await follow(endpoint, layout, answer=negative, farewell_s=FAREWELL_S)
        reported.send(Reported.of(endpoint))

    asyncio.run(run())


def measure(table: Table, setting: Setting) -> None:
    """Measure a setting and print a row for it."""
    head = (
        f"{setting.mbit:g} Mbit/s",
        f"{setting.model_bytes / MB:g} MB",
        f"{setting.keepalive_s} s",
    )
    try:
        seen = play(setting)
    except (ConnectionFailed, RunFailed) as error:
        table.add(*head, error)
        return
    parent = seen.parent
    child = seen.child
    seconds = (ideal_s(setting), median(seen.down_s), median(seen.up_s))
    share = (parent.repeated + child.repeated) / max(1, parent.chunks + child.chunks)
    table.add(
        *head,
        *(f"{each:.3f} s" for each in seconds),
        *(f"{each / seconds[0]:.3f}" for each in seconds[1:]),
        f"{parent.chunks}, {child.chunks}",
        f"{100 * share:.1f} %",
        f"{parent.reconnects}, {child.reconnects}",
        f"{seen.down_bytes / child.message_bytes:.4f}, {seen.up_bytes / parent.message_bytes:.4f}",
        f"{seen.down_bytes / child.wire.received:.5f}, {seen.up_bytes / child.wire.sent:.5f}",
    )


def main(
    *,
    link: Annotated[
        Sequence[tuple[float, float, float, float]],
        "Mbit/s, bytes, keep-alive in seconds and rounds, in place of all",
    ] = (),
) -> str | None:
    """Measure each setting and print a row for it as it comes."""
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
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
        title=f"TCP {congestion}",
    )
    given = [Setting(mbit, *map(int, more)) for mbit, *more in link]
    try:
        for setting in given or SETTINGS:
            measure(table, setting)
    except InvalidExperiment as error:
        return str(error)
    return None


if __name__ == "__main__":
    run(main)
