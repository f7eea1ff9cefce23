"""What surrounds an agent: its host's settings as one record, with its world, real or that of
`deploy/simulation`.

A world does not include monotonic time and threads: both belong to the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.attempts import Attempts
from fedstrata.common.net.bulk import Body
from fedstrata.common.net.connection import BrokerConnection, Handlers
from fedstrata.common.net.packet_limit import PacketLimit, packet_limit
from fedstrata.common.protocol.peer_link import ByteMeter
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.topics import DEFAULT_LAB, check_lab
from fedstrata.common.settings.data import root_below

if TYPE_CHECKING:
    from fedstrata.common.experiment.schema import Experiment
    from fedstrata.common.metrics import Metrics


class Connection(Protocol):
    """An MQTT connection that is restored when it breaks; see
    `common.net.connection.BrokerConnection`.
    """

    address: BrokerAddress
    attempts: Attempts
    reconnects: int

    @property
    def meter(self) -> ByteMeter:
        """The bytes that this connection carried."""

    @property
    def up(self) -> bool:
        """Whether the broker is connected."""

    async def run(self, *, connect_timeout_s: float) -> None:
        """Keep the connection until cancelled. Raises ConnectionFailed if it was not made in
        time.
        """

    def publish(self, topic: str, body: bytes, *, qos: int, retain: bool = False) -> None:
        """Publish a message, or drop it without a connection."""

    def publish_body(self, topic: str, body: Body, *, done: Callable[[], None]) -> None:
        """Publish a large message at QoS 0; `done` is called when its memory may be overwritten."""

    def subscribe(
        self,
        topics: list[str],
        *,
        qos: int,
        refused: Callable[[str], None] = lambda topic: None,
        acknowledged: Callable[[], None] = lambda: None,
        optional: bool = False,
    ) -> None:
        """Subscribe without waiting; `refused` is called for each topic that the broker denies,
        then `acknowledged`.
        """

    def unsubscribe(self, topics: list[str]) -> None:
        """Unsubscribe without waiting."""

    async def flush(self) -> None:
        """Wait until the broker has acknowledged everything, or the connection broke."""


class World(Protocol):
    """The environment of one process."""

    def connection(
        self,
        address: BrokerAddress,
        handlers: Handlers,
        *,
        client_id: str,
        keepalive_s: int,
        will: tuple[str, bytes] | None = None,
    ) -> Connection:
        """Return a connection, which `run` opens."""

    async def packet_limit(self, address: BrokerAddress, *, topic: str, most: int) -> PacketLimit:
        """Return the largest packet that a broker accepts at a single address.

        A broker that reports none is tried with packets of up to `most` bytes to ourselves, on a
        topic of our own.
        """

    def token(self, nbytes: int) -> str:
        """Return random bytes as hexadecimal digits."""

    def wall(self) -> float:
        """Return this machine's wall-clock time in Unix seconds."""

    def noise(self, nbytes: int) -> bytes:
        """Return random bytes: incompressible, and a secret of this process."""


class RealWorld:
    """Sockets, the operating system's random numbers, and its clock."""

    connection = staticmethod(BrokerConnection)

    async def packet_limit(self, address: BrokerAddress, *, topic: str, most: int) -> PacketLimit:
        """Ask the broker over a separate connection."""
        return await packet_limit(address, topic=topic, most=most)

    def token(self, nbytes: int) -> str:
        """Return random bytes as hexadecimal digits."""
        return secrets.token_hex(nbytes)

    def wall(self) -> float:
        """Return Unix seconds."""
        return time.time()

    def noise(self, nbytes: int) -> bytes:
        """Return random bytes."""
        return secrets.token_bytes(nbytes)


REAL: Final = RealWorld()


def new_session(world: World = REAL) -> str:
    """Return an id for this process."""
    return world.token(8)


@dataclass(frozen=True, slots=True)
class Host:
    """A node's surroundings, whatever its role. Raises ValueError if the lab's name has another
    form.
    """

    broker: BrokerAddress  # between the node and its parent; the cloud's is that of its children
    connect_timeout_s: float
    metrics: Metrics
    metrics_address: str = ""  # where others reach its metrics, "" if they cannot
    lab: str = DEFAULT_LAB
    spool: Path | None = None  # folder of partly transferred models, None: in memory
    allow: Sequence[str] = ()  # the packages whose code an experiment may name
    # folder of data sets, in place of the experiment's, which must be below `data_root` otherwise
    data: str | None = None
    data_root: Path = Path()
    stay: bool = False  # wait for the next run after each one
    kit: str = ""  # digest of the kit that installed it
    world: World = REAL

    def __post_init__(self) -> None:
        check_lab(self.lab)

    def identity(self, run: str, name: str, role: str, *, ledger: str = "") -> Identity:
        """Return the identity of a node of this process in a run, with a new session."""
        return Identity(
            run,
            name,
            role,
            new_session(self.world),
            self.metrics_address,
            ledger=ledger,
            lab=self.lab,
        )

    def keeps_files_of(self, run: str) -> str:
        """Return the run whose files this node keeps until its end, "" if they serve later runs."""
        return "" if self.stay else run

    @property
    def folders(self) -> Mapping[str, Path]:
        """The folders on this host that its examination looks at, by what they are for."""
        if self.spool is None:
            return {}
        return {"spool": self.spool}

    def placed(self, experiment: Experiment, node: str) -> Experiment:
        """Return the experiment with the folder of data sets on this host. Raises
        InvalidExperiment.
        """
        return experiment.with_data_root(
            self.data or root_below(experiment.data, node, allowed=self.data_root)
        )


def nothing() -> None:
    """Do nothing."""


async def within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until an event is set, at most `timeout_s`, inf: for ever; return whether it is."""
    limit_s = timeout_s if timeout_s < inf else None
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return False
