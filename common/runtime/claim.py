"""A lab has one run at a time: a cloud asks whether another one is there before it begins.

A cloud in a run replies at once. Of several clouds that ask at the same time the one that began first gets the lab, by
their machines' clocks; the others receive its questions. One that has got the lab goes on asking, with a nonce before
all others, until a run replies: its own, which may need a while to begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from common.errors import LabInUse
from common.experiment.topology import CLOUD
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.messages import Alive, NodeState, WhoIsThere
from common.runtime.lab_client import LabClient
from common.runtime.world import REAL, World

ASK_S: Final = 0.25
FREE_S: Final = 1.0  # without a reply the lab is free
FREE_AFTER_A_RUN_S: Final = 3.0  # a queued cloud leaves the others time to be noticed
TIME_DIGITS: Final = 12  # of a nonce
HELD: Final = "0" * TIME_DIGITS  # in place of the time: of the cloud that has the lab
SEEKING: Final = "another cloud, which asks for it too"
BEGINNING: Final = "another cloud, which begins a run"


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
        holding = asyncio.create_task(claimant.hold(), name="hold the lab")
        try:
            yield
        finally:  # what ends this connection is reported by the run's own
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)


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
            await asyncio.sleep(ASK_S)
            if self._by and not self._queue:
                where = f"lab {self._lab} on broker {self.client.address}"
                raise LabInUse(f"{where} is used by {self._by}. Wait for its end with --queue, or use another --lab")
            if self._by:
                free_s = FREE_AFTER_A_RUN_S

    async def hold(self) -> None:
        """Ask before all others until a run replies. Raises ConnectionFailed."""
        self._nonce = HELD + self.client.session
        self._replied.clear()
        await self.client.ask(self._question, until=self._replied, every_s=ASK_S)

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
