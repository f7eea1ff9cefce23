"""The roll of a lab: each node that stays answers who it is, what it does and on which machine.

Asked, not retained: what is shown is there, whatever the broker stores.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from math import inf
from typing import Final

from common.errors import ConnectionFailed, WireError
from common.experiment.schema import TransferSettings
from common.host.examination import Finding
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.bounds import STRANGER
from common.protocol.messages import Here, RollCall
from common.runtime.asking import work_over
from common.runtime.world import REAL, World, new_session, nothing
from common.text import short

ASK_S: Final = 0.5
REST_S: Final = 0.4  # between two answers to one that asks
ASKERS_MOST: Final = 4  # that are answered within REST_S
RETRY_S: Final = 5.0
SESSIONS_KEPT: Final = 4  # of each name: two nodes of one name are shown
HELD_MOST: Final = 64_000_000  # bytes of all answers

_PROTOCOL: Final = serialization.VERSION

log = logging.getLogger("fedstrata.roll")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a node's host has: a device's accelerators, the data sets in its folder; what was found there."""

    hardware: str = ""
    data: str = ""
    findings: tuple[Finding, ...] = ()


class RollEntry:
    """A node's own entry. `run` is the run in which it takes part, "" while it waits."""

    def __init__(
        self,
        address: BrokerAddress,
        name: str,
        *,
        role: str,
        parent: str,
        lab: str,
        kit: str = "",
        resources: Callable[[], Resources] = Resources,
        world: World = REAL,
    ) -> None:
        self.run = ""
        self._name, self._role, self._parent, self._lab, self._kit = name, role, parent, lab, kit
        self._resources = resources
        self._session = new_session(world)
        self._wall = world.wall
        self._answered: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self._connection = world.connection(
            address,
            client_id=f"{name}-roll-{world.token(4)}",
            keepalive_s=TransferSettings().keepalive_s,
            received=self._received,
            connected=self._connected,
            lost=nothing,
        )

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Answer roll calls meanwhile, also after the broker was away."""
        keeping = asyncio.create_task(self._keep(), name=f"roll {self._name}")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))

    async def _keep(self) -> None:
        while True:
            try:
                await self._connection.run(connect_timeout_s=inf)
            except ConnectionFailed:  # the node itself reports it
                await asyncio.sleep(RETRY_S)

    async def _connected(self) -> None:
        self._connection.subscribe([topics.roll(self._lab, "+")], qos=0)

    def _received(self, topic_text: str, body: bytes, retained: bool) -> None:
        now = self._loop.time()
        self._answered = {asker: at for asker, at in self._answered.items() if now < at + REST_S}
        try:
            topic = topics.parse(topic_text)
            if not isinstance(topic, topics.RollTopic) or retained:
                return
            if topic.asker in self._answered or len(self._answered) >= ASKERS_MOST:
                return  # one that asks again and again takes no answer from another one
            *_, message = serialization.decode_shared(body, sender=STRANGER)
        except WireError:
            return
        if not isinstance(message, RollCall):
            return
        self._answered[topic.asker] = now
        has = self._resources()
        answer = Here(
            message.nonce, self._role, self._parent, self.run, version("fedstrata"), socket.gethostname(),
            short(has.hardware), short(has.data), self._kit, self._wall(), has.findings[: serialization.ITEMS],
        )  # fmt: skip
        where = topics.here(self._lab, topic.asker, self._name)
        self._connection.publish(where, serialization.encode(answer, self._session), qos=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's answer; `ahead_s`: seconds by which its clock is ahead of this machine's, within ASK_S.

    `protocol`: the version that it uses. Of another one than this release's only role, parent, run and release are
    known.
    """

    node: str
    here: Here
    ahead_s: float
    protocol: int = _PROTOCOL

    @property
    def other_release(self) -> str:
        """Both releases, if it uses another version of the protocol, so that it cannot take part; else empty."""
        if self.protocol == _PROTOCOL:
            return ""
        its, this = f"{self.here.release} (protocol {self.protocol})", f"{version('fedstrata')} (protocol {_PROTOCOL})"
        return f"it is of release {its}, this is {this}: install one release everywhere"


async def call_rolls(
    addresses: Sequence[BrokerAddress],
    *,
    lab: str,
    name: str,
    wait_s: float,
    connect_timeout_s: float,
    expected: Collection[str] = (),
    world: World = REAL,
) -> list[Answer]:
    """Return the nodes on all brokers of a lab, see `call_the_roll`; a broker that is away is reported.

    With `expected`, return as soon as these have answered. Raises ConnectionFailed if no broker could be reached.
    """
    found: dict[str, dict[str, Answer]] = {}
    lacking, complete = set(expected), asyncio.Event()
    held = 0

    def answered(session: str, answer: Answer, size: int) -> None:
        nonlocal held
        known = found.get(answer.node, {})
        if session not in known:
            held += size
            if len(known) == SESSIONS_KEPT or held > HELD_MOST:
                return
        found.setdefault(answer.node, known)[session] = answer
        lacking.discard(answer.node)
        if expected and not lacking:
            complete.set()

    calls = [
        call_the_roll(
            address, lab=lab, name=name, wait_s=wait_s, connect_timeout_s=connect_timeout_s, answered=answered,
            complete=complete, world=world,
        )
        for address in addresses
    ]  # fmt: skip
    failures: list[ConnectionFailed] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, ConnectionFailed):
            failures.append(result)
        elif isinstance(result, BaseException):
            raise result
    if len(failures) == len(calls):
        raise failures[0]
    for failure in failures:
        log.warning("%s", failure)
    return [answer for _, known in sorted(found.items()) for _, answer in sorted(known.items())]


async def call_the_roll(
    address: BrokerAddress,
    *,
    lab: str,
    name: str,
    wait_s: float,
    connect_timeout_s: float,
    answered: Callable[[str, Answer, int], None],
    complete: asyncio.Event,
    world: World = REAL,
) -> None:
    """Ask on one broker for `wait_s`, or until it is complete; `answered` is called with each session's answers, and
    their bytes.

    Two nodes of one name are two sessions. Raises ConnectionFailed.
    """
    nonce = new_session(world)
    connected = asyncio.Event()

    def received(topic_text: str, body: bytes, retained: bool) -> None:
        try:
            topic = topics.parse(topic_text)
            protocol, session, message = serialization.decode_shared(body)
        except WireError:
            return
        if not isinstance(topic, topics.HereTopic) or not isinstance(message, Here) or message.nonce != nonce:
            return
        answered(session, Answer(topic.node, message, message.clock_s - world.wall(), protocol), len(body))

    async def subscribe() -> None:
        connection.subscribe([topics.here(lab, name, "+")], qos=0)
        connected.set()

    async def ask() -> None:
        await connected.wait()
        for _ in range(max(1, round(wait_s / ASK_S))):
            connection.publish(topics.roll(lab, name), serialization.encode(RollCall(nonce), nonce), qos=0)
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await complete.wait()
                    return

    connection = world.connection(
        address,
        client_id=f"{name}-asks-{nonce}",
        keepalive_s=TransferSettings().keepalive_s,
        received=received,
        connected=subscribe,
        lost=nothing,
    )
    await work_over(connection, ask(), connect_timeout_s=connect_timeout_s)
