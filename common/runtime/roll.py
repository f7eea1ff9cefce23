"""The roll of a lab, asked and not retained: what answers is there, whatever the broker stores.

Each node that stays answers who it is, what it does and on which machine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.host.examination import Finding
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.limits import STRANGER
from fedstrata.common.protocol.messages import About, Here, Question
from fedstrata.common.runtime.lab_client import LabCallbacks, LabClient, Reply
from fedstrata.common.runtime.world import REAL, Host, World
from fedstrata.common.text import short

CALL_EVERY_S: Final = 0.5
REST_S: Final = 0.4  # between two answers to one that asks
ASKERS_MOST: Final = 4  # that are answered within REST_S
SESSIONS_KEPT: Final = 4  # of each name: two nodes of one name are shown
HELD_MOST: Final = 64_000_000  # bytes of all answers

_PROTOCOL: Final = serialization.VERSION

log = logging.getLogger("fedstrata.roll")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a node's host has: a device's accelerators, the data sets in its folder; what was found
    there.

    `parent`: to which a device has moved, else empty.
    """

    hardware: str = ""
    data: str = ""
    findings: tuple[Finding, ...] = ()
    parent: str = ""


class RollEntry:
    """A node's own entry. `run` is the run in which it takes part, "" while it waits."""

    def __init__(
        self,
        host: Host,
        name: str,
        *,
        role: str,
        parent: str,
        resources: Callable[[], Resources] = Resources,
    ) -> None:
        self.run = ""
        self._host = host
        self._name = name
        self._role = role
        self._parent = parent
        self._resources = resources
        self._answered: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        calls = topics.ask(host.lab, topics.ALL, "+")
        on = LabCallbacks(received=self._received)
        self._client = LabClient(
            host.broker, f"{name}-roll", reads=[calls], on=on, world=host.world
        )

    def kept(self) -> AbstractAsyncContextManager[None]:
        """Answer roll calls meanwhile, also after the broker was away, which the node itself
        reports.
        """
        return self._client.connected()

    def _received(self, topic: topics.Topic, body: bytes, retained: bool) -> None:
        now = self._loop.time()
        self._answered = {asker: at for asker, at in self._answered.items() if now < at + REST_S}
        if not isinstance(topic, topics.AskTopic) or retained:
            return
        if topic.asker in self._answered or len(self._answered) >= ASKERS_MOST:
            return  # one that asks again and again takes no answer from another one
        *_, message = serialization.decode_shared(body, sender=STRANGER)
        if not isinstance(message, Question) or message.about is not About.ENTRY:
            return
        self._answered[topic.asker] = now
        has = self._resources()
        host = self._host
        answer = Here(
            message.nonce,
            self._role,
            has.parent or self._parent,
            self.run,
            version("fedstrata"),
            socket.gethostname(),
            short(has.hardware),
            short(has.data),
            host.kit,
            host.world.wall(),
            has.findings[: serialization.ITEMS],
        )
        self._client.publish(topics.answer(host.lab, topic.asker, self._name), answer)


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's answer; `ahead_s`: seconds by which its clock is ahead of this machine's, within
    CALL_EVERY_S.

    `protocol`: the version that it uses. Of another one than this release's only role, parent, run
    and release are known.
    """

    node: str
    here: Here
    ahead_s: float
    protocol: int = _PROTOCOL

    @property
    def other_release(self) -> str:
        """Both releases, if it uses another version of the protocol, so that it cannot take part;
        else empty.
        """
        if self.protocol == _PROTOCOL:
            return ""
        its = f"{self.here.release} (protocol {self.protocol})"
        this = f"{version('fedstrata')} (protocol {_PROTOCOL})"
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

    Each is asked for `wait_s`, or until those `expected` have answered. Two nodes of one name are
    two answers. Raises ConnectionFailed if no broker could be reached.
    """
    answers = _Answers(expected)
    calls = [
        _call_roll(
            address,
            answers,
            lab=lab,
            name=name,
            wait_s=wait_s,
            timeout_s=connect_timeout_s,
            world=world,
        )
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
    found: list[Answer] = []
    for _, known in sorted(answers.found.items()):
        found += [answer for _, answer in sorted(known.items())]
    return found


class _Answers:
    """The answers by name and session, within bounds; `complete` once those expected are there."""

    def __init__(self, expected: Collection[str]) -> None:
        self.found: dict[str, dict[str, Answer]] = {}
        self.complete = asyncio.Event()
        self._expects = bool(expected)
        self._lacking = set(expected)
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
    address: BrokerAddress,
    answers: _Answers,
    *,
    lab: str,
    name: str,
    wait_s: float,
    timeout_s: float,
    world: World,
) -> None:
    """Ask on one broker for `wait_s`, or until the answers are complete. Raises
    ConnectionFailed.
    """

    def answered(reply: Reply) -> None:
        if isinstance(here := reply.message, Here):
            answer = Answer(reply.node, here, here.clock_s - world.wall(), reply.protocol)
            answers.add(reply.session, answer, reply.nbytes)

    reads = [topics.answer(lab, name, "+")]
    on = LabCallbacks(answered=answered)
    client = LabClient(address, f"{name}-asks", lab=lab, node=name, reads=reads, on=on, world=world)
    times = max(1, round(wait_s / CALL_EVERY_S))
    async with client.connected(timeout_s=timeout_s):
        call = client.ask(
            topics.ALL, About.ENTRY, until=answers.complete, every_s=CALL_EVERY_S, times=times
        )
        await client.during(call)
