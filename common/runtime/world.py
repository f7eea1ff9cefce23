"""The environment of an agent as one argument: real by default, simulated in `deploy/simulation`.

Monotonic time and threads are not included: both belong to the event loop.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from common.net.address import BrokerAddress
from common.net.attempts import Attempts
from common.net.bulk import Body
from common.net.connection import BrokerConnection
from common.net.limits import packet_limit
from common.net.packets import FindPlace, Place
from common.protocol.bounds import skip_large
from common.protocol.session_events import ByteMeter

Received = Callable[[str, bytes, bool], None]


class Connection(Protocol):
    """An MQTT connection that is restored when it breaks; see `common.net.connection.BrokerConnection`."""

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
        """Keep the connection until cancelled. Raises ConnectionFailed if it was not made in time."""

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
        """Subscribe without waiting; `refused` is called for each topic that the broker denies, then `acknowledged`."""

    def unsubscribe(self, topics: list[str]) -> None:
        """Unsubscribe without waiting."""

    async def flush(self) -> None:
        """Wait until the broker has acknowledged everything, or the connection broke."""


class World(Protocol):
    """The environment of one process."""

    def connection(
        self,
        address: BrokerAddress,
        *,
        client_id: str,
        keepalive_s: int,
        received: Received,
        connected: Callable[[], Awaitable[None]],
        lost: Callable[[], None],
        find_place: FindPlace = skip_large,
        landed: Callable[[str, Place], None] = lambda topic, place: None,
        will: tuple[str, bytes] | None = None,
    ) -> Connection:
        """Return a connection, which `run` opens; for the callbacks see `common.net.connection.BrokerConnection`."""

    async def packet_limit(self, address: BrokerAddress, *, topic: str, most: int) -> int | None:
        """Return the largest packet that a broker accepts at a single address, bytes; None if unlimited or unknown.

        A broker that reports none is tried with packets of up to `most` bytes to ourselves, on a topic of our own.
        """

    def token(self, nbytes: int) -> str:
        """Return random bytes as hexadecimal digits."""

    def wall(self) -> float:
        """Return this machine's wall-clock time in Unix seconds."""

    def noise(self, nbytes: int) -> bytes:
        """Return incompressible bytes."""


class RealWorld:
    """Sockets, the operating system's random numbers, and its clock."""

    connection = staticmethod(BrokerConnection)

    async def packet_limit(self, address: BrokerAddress, *, topic: str, most: int) -> int | None:
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


def nothing() -> None:
    """Do nothing."""
