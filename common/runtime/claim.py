"""A lab has one run at a time: a cloud asks whether another one is there before it begins.

A cloud in a run replies at once. Of several clouds that ask at the same time the one that began first gets the lab, by
their machines' clocks; the others receive its questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from common.errors import LabInUse, WireError
from common.experiment.schema import TransferSettings
from common.experiment.topology import CLOUD
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.messages import Alive, NodeState, WhoIsThere
from common.runtime.asking import work_over
from common.runtime.world import REAL, World, nothing

ASK_S: Final = 0.25
FREE_S: Final = 1.0  # without a reply the lab is free
FREE_AFTER_A_RUN_S: Final = 3.0  # a queued cloud leaves the others time to be noticed
SEEKING: Final = "another cloud, which asks for it too"


async def claim(
    address: BrokerAddress,
    *,
    lab: str,
    connect_timeout_s: float,
    queue: bool,
    waiting: Callable[[str], None] = lambda run: None,
    world: World = REAL,
) -> None:
    """Return when no other cloud has the lab. Raises LabInUse, with `queue` only ConnectionFailed.

    With `queue` wait for the end of the others' runs; `waiting` is called with each run for which it waits.
    """
    claimant = _Claimant(address, lab=lab, queue=queue, waiting=waiting, world=world)
    await claimant.claim(connect_timeout_s=connect_timeout_s)


class _Claimant:
    """One cloud that wants the lab."""

    def __init__(
        self, address: BrokerAddress, *, lab: str, queue: bool, waiting: Callable[[str], None], world: World
    ) -> None:
        self._lab, self._queue, self._waiting = lab, queue, waiting
        self._nonce = f"{int(1e3 * world.wall()):012x}{world.token(4)}"  # they are compared
        self._by = ""
        self._since = 0.0
        self._loop = asyncio.get_running_loop()
        self._connected_once = asyncio.Event()
        self._connection = world.connection(
            address,
            client_id=f"claim-{world.token(8)}",
            keepalive_s=TransferSettings().keepalive_s,
            received=self._received,
            connected=self._connected,
            lost=nothing,
        )

    async def claim(self, *, connect_timeout_s: float) -> None:
        """Ask until nobody replies."""
        await work_over(self._connection, self._ask(), connect_timeout_s=connect_timeout_s)

    async def _ask(self) -> None:
        await self._connected_once.wait()
        question = serialization.encode(WhoIsThere(self._nonce), self._nonce)
        free_s, reported = FREE_S, ""
        self._since = self._loop.time()
        while self._loop.time() < self._since + free_s:
            self._connection.publish(topics.seek(self._lab, CLOUD, CLOUD), question, qos=0)
            await asyncio.sleep(ASK_S)
            if self._by and not self._queue:
                where = f"lab {self._lab} on broker {self._connection.address}"
                raise LabInUse(f"{where} is used by {self._by}. Wait for its end with --queue, or use another --lab")
            if self._by:
                free_s = FREE_AFTER_A_RUN_S
                if reported != self._by:
                    reported = self._by
                    self._waiting(reported)

    async def _connected(self) -> None:
        inbox = topics.inbox(self._lab, "+", CLOUD, CLOUD)
        self._connection.subscribe([inbox, topics.seek(self._lab, CLOUD, CLOUD)], qos=0)
        self._since = self._loop.time()
        self._connected_once.set()

    def _received(self, topic_text: str, body: bytes, retained: bool) -> None:
        try:
            topic = topics.parse(topic_text)
            _, message = serialization.decode(body)
        except WireError:
            return
        if isinstance(topic, topics.InboxTopic) and isinstance(message, Alive) and message.nonce == self._nonce:
            if message.presence.state is not NodeState.FINISHED:
                self._taken(f"run {topic.run}")
        elif isinstance(topic, topics.SeekTopic) and isinstance(message, WhoIsThere) and message.nonce < self._nonce:
            self._taken(SEEKING)

    def _taken(self, by: str) -> None:
        self._by = by
        self._since = self._loop.time()
