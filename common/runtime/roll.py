"""The roll of a lab: each node that stays answers who it is, what it does and on which machine.

Asked, not retained: what is shown is there, whatever the broker stores.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

from common.errors import ConnectionFailed
from common.host.examination import Finding
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.bounds import STRANGER
from common.protocol.messages import Here, RollCall
from common.runtime.lab_client import LabClient
from common.runtime.world import REAL, Host, World
from common.text import short

ASK_S: Final = 0.5
REST_S: Final = 0.4  # between two answers to one that asks
ASKERS_MOST: Final = 4  # that are answered within REST_S
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
            message.nonce, self._role, self._parent, self.run, version("fedstrata"), socket.gethostname(),
            short(has.hardware), short(has.data), host.kit, host.world.wall(), has.findings[: serialization.ITEMS],
        )  # fmt: skip
        self._client.publish(topics.here(host.lab, topic.asker, self._name), answer)


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
        await client.ask(call, until=answers.complete, every_s=ASK_S, times=max(1, round(wait_s / ASK_S)))
