"""Who is in a lab, asked and not retained: what answers is there, whatever the broker stores.

The roll: each node that stays answers who it is, what it does and on which machine.

The claim: a lab has one run at a time, so a cloud asks whether another one is there before it begins. A cloud in a run
replies at once. Of several clouds that ask at the same time the one that began first gets the lab, by their machines'
clocks; the others receive its questions. One that has got the lab goes on asking, with a nonce before all others, until
a run replies: its own, which may need a while to begin.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

from fedstrata.common.errors import ConnectionFailed, LabInUse
from fedstrata.common.host.examination import Finding
from fedstrata.common.host.offload import beside
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.limits import STRANGER
from fedstrata.common.protocol.messages import Alive, Here, NodeState, RollCall, WhoIsThere
from fedstrata.common.runtime.lab_client import LabClient
from fedstrata.common.runtime.world import REAL, Host, World
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import short

CALL_EVERY_S: Final = 0.5
REST_S: Final = 0.4  # between two answers to one that asks
ASKERS_MOST: Final = 4  # that are answered within REST_S
SESSIONS_KEPT: Final = 4  # of each name: two nodes of one name are shown
HELD_MOST: Final = 64_000_000  # bytes of all answers
CLAIM_S: Final = 0.25  # between two questions of a cloud
FREE_S: Final = 1.0  # without a reply the lab is free
FREE_AFTER_A_RUN_S: Final = 3.0  # a queued cloud leaves the others time to be noticed
TIME_DIGITS: Final = 12  # of a nonce
HELD: Final = "0" * TIME_DIGITS  # in place of the time: of the cloud that has the lab
SEEKING: Final = "another cloud, which asks for it too"
BEGINNING: Final = "another cloud, which begins a run"

_PROTOCOL: Final = serialization.VERSION

log = logging.getLogger("fedstrata.roll")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a node's host has: a device's accelerators, the data sets in its folder; what was found there.

    `parent`: to which a device has moved, else empty.
    """

    hardware: str = ""
    data: str = ""
    findings: tuple[Finding, ...] = ()
    parent: str = ""


class RollEntry:
    """A node's own entry. `run` is the run in which it takes part, "" while it waits."""

    def __init__(
        self, host: Host, name: str, *, role: str, parent: str, resources: Callable[[], Resources] = Resources
    ) -> None:
        self.run = ""
        self._host, self._name, self._role, self._parent = host, name, role, parent
        self._resources = resources
        self._answered: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        calls = topics.roll(host.lab, "+")
        self._client = LabClient(host.broker, f"{name}-roll", reads=[calls], received=self._received, world=host.world)

    def kept(self) -> AbstractAsyncContextManager[None]:
        """Answer roll calls meanwhile, also after the broker was away, which the node itself reports."""
        return self._client.connected()

    def _received(self, topic: topics.Topic, body: bytes, retained: bool) -> None:
        now = self._loop.time()
        self._answered = {asker: at for asker, at in self._answered.items() if now < at + REST_S}
        if not isinstance(topic, topics.RollTopic) or retained:
            return
        if topic.asker in self._answered or len(self._answered) >= ASKERS_MOST:
            return  # one that asks again and again takes no answer from another one
        *_, message = serialization.decode_shared(body, sender=STRANGER)
        if not isinstance(message, RollCall):
            return
        self._answered[topic.asker] = now
        has, host = self._resources(), self._host
        answer = Here(
            message.nonce, self._role, has.parent or self._parent, self.run, version("fedstrata"), socket.gethostname(),
            short(has.hardware), short(has.data), host.kit, host.world.wall(), has.findings[: serialization.ITEMS],
        )  # fmt: skip
        self._client.publish(topics.here(host.lab, topic.asker, self._name), answer)


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's answer; `ahead_s`: seconds by which its clock is ahead of this machine's, within CALL_EVERY_S.

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
    """Return the nodes on all brokers of a lab; a broker that is away is reported.

    Each is asked for `wait_s`, or until those `expected` have answered. Two nodes of one name are two answers. Raises
    ConnectionFailed if no broker could be reached.
    """
    answers = _Answers(expected)
    calls = [
        _call_roll(address, answers, lab=lab, name=name, wait_s=wait_s, timeout_s=connect_timeout_s, world=world)
        for address in addresses
    ]
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
    return [answer for _, known in sorted(answers.found.items()) for _, answer in sorted(known.items())]


class _Answers:
    """The answers by name and session, within bounds; `complete` once those expected are there."""

    def __init__(self, expected: Collection[str]) -> None:
        self.found: dict[str, dict[str, Answer]] = {}
        self.complete = asyncio.Event()
        self._expects, self._lacking = bool(expected), set(expected)
        self._held = 0

    def add(self, session: str, answer: Answer, size: int) -> None:
        """Keep a session's last answer, of `size` bytes."""
        known = self.found.get(answer.node, {})
        if session not in known:
            self._held += size
            if len(known) == SESSIONS_KEPT or self._held > HELD_MOST:
                return
        self.found.setdefault(answer.node, known)[session] = answer
        self._lacking.discard(answer.node)
        if self._expects and not self._lacking:
            self.complete.set()


async def _call_roll(
    address: BrokerAddress, answers: _Answers, *, lab: str, name: str, wait_s: float, timeout_s: float, world: World
) -> None:
    """Ask on one broker for `wait_s`, or until the answers are complete. Raises ConnectionFailed."""

    def received(topic: topics.Topic, body: bytes, retained: bool) -> None:
        protocol, session, message = serialization.decode_shared(body)
        if isinstance(topic, topics.HereTopic) and isinstance(message, Here) and message.nonce == client.session:
            answers.add(session, Answer(topic.node, message, message.clock_s - world.wall(), protocol), len(body))

    client = LabClient(address, f"{name}-asks", reads=[topics.here(lab, name, "+")], received=received, world=world)
    call = partial(client.publish, topics.roll(lab, name), RollCall(client.session))
    async with client.connected(timeout_s=timeout_s):
        await client.ask(call, until=answers.complete, every_s=CALL_EVERY_S, times=max(1, round(wait_s / CALL_EVERY_S)))


@asynccontextmanager
async def claim(
    address: BrokerAddress,
    *,
    lab: str,
    connect_timeout_s: float,
    queue: bool,
    waiting: Callable[[str], None] = lambda run: None,
    world: World = REAL,
) -> AsyncIterator[None]:
    """Begin when no other cloud has the lab, and keep others from it until a run replies, or until the end.

    Raises LabInUse, with `queue` only ConnectionFailed. With `queue` wait for the end of the others' runs; `waiting` is
    called with each run for which it waits.
    """
    claimant = _Claimant(address, lab=lab, queue=queue, waiting=waiting, world=world)
    async with claimant.client.connected(timeout_s=connect_timeout_s):
        await claimant.client.during(claimant.ask())
        async with beside(claimant.hold(), name="hold the lab"):
            yield  # what ends this connection is reported by the run's own


class _Claimant:
    """One cloud that wants the lab."""

    def __init__(
        self, address: BrokerAddress, *, lab: str, queue: bool, waiting: Callable[[str], None], world: World
    ) -> None:
        self._lab, self._queue, self._waiting = lab, queue, waiting
        self._by = ""
        self._reported: set[str] = set()
        self._since = 0.0
        self._loop = asyncio.get_running_loop()
        self._replied = asyncio.Event()
        reads = [topics.inbox(lab, "+", CLOUD, CLOUD), topics.seek(lab, CLOUD, CLOUD)]
        self.client = LabClient(
            address, "claim", reads=reads, received=self._received, subscribed=self._subscribed, world=world
        )
        self._nonce = f"{int(1e3 * world.wall()):0{TIME_DIGITS}x}{self.client.session}"  # they are compared

    async def ask(self) -> None:
        """Ask until nobody replies. Raises LabInUse."""
        await self.client.once_connected.wait()
        free_s = FREE_S
        self._since = self._loop.time()
        while self._loop.time() < self._since + free_s:
            self._question()
            await asyncio.sleep(CLAIM_S)
            if self._by and not self._queue:
                where = f"lab {self._lab} on broker {self.client.address}"
                raise LabInUse(f"{where} is used by {self._by}. Wait for its end with --queue, or use another --lab")
            if self._by:
                free_s = FREE_AFTER_A_RUN_S

    async def hold(self) -> None:
        """Ask before all others until a run replies. Raises ConnectionFailed."""
        self._nonce = HELD + self.client.session
        self._replied.clear()
        await self.client.ask(self._question, until=self._replied, every_s=CLAIM_S)

    def _question(self) -> None:
        self.client.publish(topics.seek(self._lab, CLOUD, CLOUD), WhoIsThere(self._nonce), session=self._nonce)

    def _subscribed(self) -> None:
        self._since = self._loop.time()

    def _received(self, topic: topics.Topic, body: bytes, retained: bool) -> None:
        if retained:
            return  # whoever sent it may be gone for years
        _, message = serialization.decode(body)
        if isinstance(topic, topics.InboxTopic) and isinstance(message, Alive) and message.nonce == self._nonce:
            if message.presence.state is not NodeState.FINISHED:
                self._taken(f"run {topic.run}")
        elif isinstance(topic, topics.SeekTopic) and isinstance(message, WhoIsThere) and message.nonce < self._nonce:
            self._taken(BEGINNING if message.nonce.startswith(HELD) else SEEKING)

    def _taken(self, by: str) -> None:
        self._by = by
        self._since = self._loop.time()
        self._replied.set()
        if self._queue and not self._nonce.startswith(HELD) and by not in self._reported:
            self._reported.add(by)
            self._waiting(by)
