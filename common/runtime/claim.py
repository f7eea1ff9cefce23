"""A name that one process has: a node its own while it waits for a run, a cloud the lab, which has
one run at a time.

A process asks under the name that it wants. Whoever has the name replies: a run's cloud, or a
process that got no reply before. Of several that ask at the same time the one that began first gets
it, by their machines' clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Final

from fedstrata.common.errors import LabInUse, WireError
from fedstrata.common.host.offload import beside
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import SEEKER_S, SEEKERS_MOST, Budget
from fedstrata.common.protocol.messages import About, Alive, NodeState, Presence, Question
from fedstrata.common.runtime.lab_client import LabCallbacks, LabClient, Reply
from fedstrata.common.runtime.world import REAL, World
from fedstrata.common.settings.topology import CLOUD

QUESTIONS: Final = 4  # in the time after which a name is free
FREE_S: Final = 1.0  # without a reply the lab is free
FREE_AFTER_A_RUN_S: Final = 3.0  # a queued cloud leaves the others time to be noticed
SEEKING: Final = "another cloud, which asks for it too"
BEGINNING: Final = "another cloud, which begins a run"


class NameClaim:
    """A process's claim to its client's name, its own after `free_s` without a reply.

    `reason`: what it replies to the others. `by`: who has replied to its last question, the run of
    a cloud, or that one's reason. `held`: the name is this process's own.
    """

    def __init__(self, client: LabClient, *, free_s: float, reason: str) -> None:
        self.reason = reason
        self.by = ""
        self.held = False
        self.run_replied = asyncio.Event()
        self._client = client
        self._free_s = free_s
        self.every_s = free_s / QUESTIONS
        self._since = inf
        self._replies = Budget(SEEKERS_MOST, SEEKER_S)
        self._now = asyncio.get_running_loop().time

    @staticmethod
    def reads(lab: str, name: str) -> list[str]:
        """Return what the client of a claim reads."""
        return [topics.ask(lab, name, name), topics.answer(lab, name, name)]

    def connected(self) -> None:
        """Begin again on a new connection: replies may have been lost."""
        self._since = self._now()

    async def ask(self) -> None:
        """Ask once, and wait for replies. Without any for long enough the name is this process's
        own.
        """
        self.by = ""
        self._client.question(self._client.node, About.PRESENCE)
        await asyncio.sleep(self.every_s)
        self.held = self._client.up and self._now() >= self._since + self._free_s

    def asked(self, body: bytes, retained: bool) -> None:
        """Handle a question for the name. Raises WireError."""
        _, question = serialization.decode(body)
        if not isinstance(question, Question):
            raise WireError("not a question")
        client = self._client
        if retained or question.nonce == client.nonce or self.run_replied.is_set():
            return
        if not self.held and question.nonce < client.nonce:
            self._since = self._now()  # it replies to the next question, or leaves
        elif self._replies.take("", self._now()):
            state = NodeState.READY if self.held else NodeState.INIT
            here = Alive(question.nonce, Presence(state, "", reason=self.reason))
            client.publish(topics.answer(client.lab, client.node, client.node), here)

    def answered(self, reply: Reply) -> None:
        """Handle a reply to this process's question."""
        if (
            not isinstance(reply.message, Alive)
            or (presence := reply.message.presence).state is NodeState.FINISHED
        ):
            return
        if self.held:
            if reply.run:
                self.run_replied.set()
            return
        self._since = self._now()
        self._free_s = FREE_AFTER_A_RUN_S
        # others may ask for it, too
        if not self.by or reply.run or presence.state is NodeState.READY:
            self.by = f"run {reply.run}" if reply.run else presence.reason


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
    """Begin when no other cloud has the lab, and keep others from it until a run replies, or until
    the end.

    Raises LabInUse, with `queue` only ConnectionFailed. With `queue` wait for the end of the
    others' runs; `waiting` is called with each run for which it waits.
    """

    async def ask() -> None:
        reported = {found.by}
        await client.once_connected.wait()
        while not found.held:
            await found.ask()
            if found.by and not queue:
                where = f"lab {lab} on broker {address}"
                raise LabInUse(
                    f"{where} is used by {found.by}. Wait for its end with --queue, or use "
                    "another --lab"
                )
            if found.by not in reported:
                reported.add(found.by)
                waiting(found.by)

    def answered(reply: Reply) -> None:
        found.answered(reply)

    def connected() -> None:
        found.connected()

    on = LabCallbacks(
        received=lambda topic, body, retained: found.asked(body, retained),
        answered=answered,
        subscribed=connected,
    )
    client = LabClient(
        address,
        "claim",
        lab=lab,
        node=CLOUD,
        reads=[topics.inbox(lab, "+", CLOUD, CLOUD), *NameClaim.reads(lab, CLOUD)],
        on=on,
        world=world,
    )
    found = NameClaim(client, free_s=FREE_S, reason=SEEKING)
    async with client.connected(timeout_s=connect_timeout_s):
        await client.during(ask())
        found.reason = BEGINNING
        holding = client.ask(CLOUD, About.PRESENCE, until=found.run_replied, every_s=found.every_s)
        async with beside(holding, name="hold the lab"):
            yield  # what ends this connection is reported by the run's own
