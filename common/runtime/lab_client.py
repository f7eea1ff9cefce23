"""A client that asks a lab's nodes over a connection of its own, or answers them, beside the endpoints of a run.

    client = LabClient(broker, "someone", reads=[topics.here(lab, "someone", "+")], received=take)
    async with client.connected(timeout_s=30.0):
        await client.ask(question, until=answered, every_s=0.5)

A message may be lost: questions are repeated, and answered each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Any, Final, TypeVar

from fedstrata.common.errors import ConnectionFailed, WireError
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.offload import beside
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.connection import Handlers
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import Message
from fedstrata.common.runtime.world import REAL, Connection, World, new_session, nothing, within

RETRY_S: Final = 5.0
REPORTED_MOST: Final = 100  # refused subscriptions of a client

log = logging.getLogger("fedstrata.connection")

_T = TypeVar("_T")


async def keep(connection: Connection, *, timeout_s: float = inf) -> None:
    """Keep a connection until cancelled; `timeout_s` as in `LabClient.connected`. Raises ConnectionFailed."""
    while True:
        try:
            await connection.run(connect_timeout_s=timeout_s)
        except ConnectionFailed:
            if timeout_s < inf:
                raise
            await asyncio.sleep(RETRY_S)


class RefusedTopics:
    """The subscriptions that a broker refuses a client; each is reported once, though it is made at each connection."""

    def __init__(self, name: str, broker: BrokerAddress) -> None:
        self._name, self._broker = name, broker
        self._reported: set[str] = set()

    def add(self, topic: str) -> None:
        """Report a topic."""
        if topic in self._reported or len(self._reported) == REPORTED_MOST:
            return
        self._reported.add(topic)
        log.warning(
            "%s: broker %s refuses the subscription to %s: nothing from there arrives. Let this login read it.",
            self._name, self._broker, topic,
        )  # fmt: skip


class LabClient:
    """A client of one broker, where its id begins with `name`; the task that keeps its connection has that name, too.

    `reads`: the topics that it subscribes to. `received` gets each message: its topic, its bytes, and whether it was
    retained. Messages for which it raises WireError are ignored. `subscribed` is called after each connect, `lost` when
    the connection is lost, and `refused` with each topic that the broker does not let it read, by default to warn.
    """

    def __init__(
        self,
        address: BrokerAddress,
        name: str,
        *,
        reads: Sequence[str],
        received: Callable[[topics.Topic, bytes, bool], None],
        subscribed: Callable[[], None] = nothing,
        lost: Callable[[], None] = nothing,
        refused: Callable[[str], None] | None = None,
        world: World = REAL,
    ) -> None:
        self.address = address
        self.session = new_session(world)
        self._name = name
        self._reads = reads
        self._take = received
        self._subscribed = subscribed
        self._refused = refused or RefusedTopics(name, address).add
        self.once_connected = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._connection = world.connection(
            address,
            Handlers(self._received, self._connected, lost),
            client_id=f"{name}-{self.session}",
            keepalive_s=TransferSettings().keepalive_s,
        )

    @property
    def up(self) -> bool:
        """Whether the broker is connected."""
        return self._connection.up

    @asynccontextmanager
    async def connected(self, *, timeout_s: float = inf) -> AsyncIterator[None]:
        """Keep a connection meanwhile, in the background.

        `timeout_s`: of the first one, see `during`; inf: one that fails is tried again after a pause, without an error.
        """
        async with beside(keep(self._connection, timeout_s=timeout_s), name=self._name) as self._keeping:
            yield  # `during` raises what ends it

    async def during(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do work that needs the connection and return its result. Raises ConnectionFailed if there is none."""
        assert self._keeping is not None, "connect first"
        working = asyncio.create_task(work, name=f"{self._name} asks")
        try:
            await asyncio.wait((self._keeping, working), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await self._keeping
            return await working
        finally:
            working.cancel()
            await asyncio.wait((working,))

    async def ask(
        self, question: Callable[[], None], *, until: asyncio.Event, every_s: float, times: float = inf
    ) -> None:
        """Ask once connected, and again until the event is set or it was asked so many times.

        Raises ConnectionFailed if there is no connection.
        """
        await self.during(self._ask(question, until, every_s, times))

    def publish(self, topic: str, message: Message, *, session: str = "") -> None:
        """Publish a message, or drop it without a connection; `session` in place of this client's own."""
        self.publish_body(topic, serialization.encode(message, session or self.session))

    def publish_body(self, topic: str, body: bytes) -> None:
        """Publish bytes, or drop them without a connection."""
        self._connection.publish(topic, body, qos=0)

    def subscribe(self, topic: str) -> None:
        """Read another topic, until the connection is lost."""
        self._connection.subscribe([topic], qos=0, refused=self._refused)

    async def _ask(self, question: Callable[[], None], until: asyncio.Event, every_s: float, times: float) -> None:
        await self.once_connected.wait()
        while times > 0 and not until.is_set():
            question()
            times -= 1
            await within(until, every_s)

    async def _connected(self) -> None:
        self._connection.subscribe(list(self._reads), qos=0, refused=self._refused)
        self.once_connected.set()
        self._subscribed()

    def _received(self, topic: str, body: bytes, retained: bool) -> None:
        try:
            self._take(topics.parse(topic), body, retained)
        except WireError:
            pass
