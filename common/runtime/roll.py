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
from common.protocol.messages import Here, RollCall
from common.runtime.asking import work_over
from common.runtime.world import REAL, World, new_session, nothing

ASK_S: Final = 0.5
REST_S: Final = 0.4  # between two answers to one that asks
ASKERS_MOST: Final = 4  # that are answered within REST_S
RETRY_S: Final = 5.0
NODES_KEPT: Final = 100_000

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
        try:
            topic = topics.parse(topic_text)
            _, message = serialization.decode(body)
        except WireError:
            return
        now = self._loop.time()
        if not isinstance(topic, topics.RollTopic) or not isinstance(message, RollCall) or retained:
            return
        self._answered = {asker: at for asker, at in self._answered.items() if now < at + REST_S}
        if topic.asker in self._answered or len(self._answered) >= ASKERS_MOST:
            return  # one that asks again and again takes no answer from another one
        self._answered[topic.asker] = now
        has = self._resources()
        answer = Here(
            message.nonce, self._role, self._parent, self.run, version("fedstrata"), socket.gethostname(),
            has.hardware, has.data, self._kit, self._wall(), has.findings,
        )  # fmt: skip
        where = topics.here(self._lab, topic.asker, self._name)
        self._connection.publish(where, serialization.encode(answer, self._session), qos=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's answer; `ahead_s`: seconds by which its clock is ahead of this machine's, within ASK_S."""

    node: str
    here: Here
    ahead_s: float


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
    found: dict[tuple[str, str], Answer] = {}
    complete = asyncio.Event()

    def answered(session: str, answer: Answer) -> None:
        if len(found) < NODES_KEPT:
            found[answer.node, session] = answer
        if expected and set(expected) <= {node for node, _ in found}:
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
    return [answer for _, answer in sorted(found.items(), key=lambda item: item[0])]


async def call_the_roll(
    address: BrokerAddress,
    *,
    lab: str,
    name: str,
    wait_s: float,
    connect_timeout_s: float,
    answered: Callable[[str, Answer], None],
    complete: asyncio.Event,
    world: World = REAL,
) -> None:
    """Ask on one broker for `wait_s`, or until it is complete; `answered` is called with each session's answers.

    Two nodes of one name are two sessions. Raises ConnectionFailed.
    """
    nonce = new_session(world)
    connected = asyncio.Event()

    def received(topic_text: str, body: bytes, retained: bool) -> None:
        try:
            topic = topics.parse(topic_text)
            session, message = serialization.decode(body)
        except WireError:
            return
        if not isinstance(topic, topics.HereTopic) or not isinstance(message, Here) or message.nonce != nonce:
            return
        answered(session, Answer(topic.node, message, message.clock_s - world.wall()))

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
