"""A client that asks a lab's nodes over a connection of its own, or answers them, beside the
endpoints of a run.

    on = LabCallbacks(answered=take)
    client = LabClient(broker, "me", lab=lab, node="me", reads=[answer(lab, "me", "+")], on=on)
    async with client.connected(timeout_s=30.0):
        await client.during(client.ask(ALL, About.ENTRY, until=complete, every_s=0.5))

A message may be lost: a question is repeated until it is answered. An answer counts only with its
nonce, and never if the broker had retained it: whoever sent it may be gone for years.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Final, TypeVar

from fedstrata.common.errors import ConnectionFailed, WireError
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.offload import beside
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.connection import Handlers
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import About, Alive, Here, Message, Question
from fedstrata.common.protocol.topics import DEFAULT_LAB
from fedstrata.common.runtime.world import REAL, Connection, World, new_session, nothing, within

RETRY_S: Final = 5.0
REPORTED_MOST: Final = 100  # refused subscriptions of a client
TIME_DIGITS: Final = 12  # of a nonce: Unix milliseconds, in hexadecimal

log = logging.getLogger("fedstrata.connection")

_T = TypeVar("_T")


async def keep(connection: Connection, *, timeout_s: float = inf) -> None:
    """Keep a connection until cancelled; `timeout_s` as in `LabClient.connected`. Raises
    ConnectionFailed.
    """
    while True:
        try:
            await connection.run(connect_timeout_s=timeout_s)
        except ConnectionFailed:
            if timeout_s < inf:
                raise
            await asyncio.sleep(RETRY_S)


class RefusedTopics:
    """The subscriptions that a broker refuses a client; each is reported once, though it is made at
    each connection.
    """

    def __init__(self, name: str, broker: BrokerAddress) -> None:
        self._name = name
        self._broker = broker
        self._reported: set[str] = set()

    def add(self, topic: str) -> None:
        """Report a topic."""
        if topic in self._reported or len(self._reported) == REPORTED_MOST:
            return
        self._reported.add(topic)
        log.warning(
            "%s: broker %s refuses the subscription to %s: nothing from there arrives. Let this "
            "login read it.",
            self._name,
            self._broker,
            topic,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of `node`; `run`: the one in which it answers, else empty. `protocol`: the version
    that it uses.
    """

    node: str
    run: str
    session: str
    message: Alive | Here
    nbytes: int
    protocol: int


def _ignore(*received: object) -> None:
    """Ignore what has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabCallbacks:
    """What a client calls. Messages for which `received` or `answered` raise WireError are
    ignored.
    """

    # with each message on a topic that is no inbox and not for answers: its topic, its bytes, and
    # whether it was retained
    received: Callable[[topics.Topic, bytes, bool], None] = _ignore
    answered: Callable[[Reply], None] = _ignore  # with each answer to its questions
    subscribed: Callable[[], None] = nothing  # after each connect
    lost: Callable[[], None] = nothing  # when the connection is lost
    # with each topic that the broker does not let it read, None: warn
    refused: Callable[[str], None] | None = None


class LabClient:
    """A client of one broker, where its id begins with `name`; the task that keeps its connection
    has that name, too. It subscribes to the topics that it `reads`, and asks as `node`.
    """

    def __init__(
        self,
        address: BrokerAddress,
        name: str,
        *,
        lab: str = DEFAULT_LAB,
        node: str = "",
        reads: Sequence[str],
        on: LabCallbacks,
        world: World = REAL,
    ) -> None:
        self.address = address
        self.session = new_session(world)
        # those of one name are compared
        self.nonce = f"{int(1e3 * world.wall()):0{TIME_DIGITS}x}{self.session}"
        self.lab = lab
        self.node = node
        self._name = name
        self._reads = reads
        self._on = on
        self._refused = on.refused or RefusedTopics(name, address).add
        self.once_connected = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._connection = world.connection(
            address,
            Handlers(self._received, self._connected, on.lost),
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

        `timeout_s`: of the first one, see `during`; inf: one that fails is tried again after a
        pause, without an error.
        """
        async with beside(
            keep(self._connection, timeout_s=timeout_s), name=self._name
        ) as self._keeping:
            yield  # `during` raises what ends it

    async def during(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do work that needs the connection and return its result. Raises ConnectionFailed if there
        is none.
        """
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
        self,
        node: str,
        about: About,
        *,
        run: str = "",
        until: asyncio.Event,
        every_s: float,
        most_s: float = 0.0,
        times: float = inf,
    ) -> None:
        """Ask a node, or `ALL`, once connected, and again until the event is set or it was asked so
        many times.

        The pauses are `every_s`, or grow from that to `most_s`.
        """
        pause_s = every_s
        await self.once_connected.wait()
        while times > 0 and not until.is_set():
            self.question(node, about, run)
            times -= 1
            await within(until, pause_s)
            pause_s = min(2 * pause_s, max(every_s, most_s))

    def question(self, node: str, about: About, run: str = "") -> None:
        """Ask a node, or `ALL`, once; without a connection nobody is asked."""
        self.publish(topics.ask(self.lab, node, self.node), Question(self.nonce, about, run))

    def publish(self, topic: str, message: Message) -> None:
        """Publish a message, or drop it without a connection."""
        self._connection.publish(topic, serialization.encode(message, self.session), qos=0)

    def subscribe(self, topic: str) -> None:
        """Read another topic, until the connection is lost."""
        self._connection.subscribe([topic], qos=0, refused=self._refused)

    async def _connected(self) -> None:
        self._connection.subscribe(list(self._reads), qos=0, refused=self._refused)
        self.once_connected.set()
        self._on.subscribed()

    def _received(self, topic: str, body: bytes, retained: bool) -> None:
        try:
            place = topics.parse(topic)
            if isinstance(place, topics.InboxTopic | topics.AnswerTopic):
                self._take_answer(place, body, retained)
            else:
                self._on.received(place, body, retained)
        except WireError:
            pass

    def _take_answer(
        self, place: topics.InboxTopic | topics.AnswerTopic, body: bytes, retained: bool
    ) -> None:
        protocol, session, message = serialization.decode_shared(body)
        if retained or not isinstance(message, Alive | Here) or message.nonce != self.nonce:
            return
        run = place.run if isinstance(place, topics.InboxTopic) else ""
        self._on.answered(
            Reply(topics.sender_of(place), run, session, message, len(body), protocol)
        )
