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

from common.errors import LabInUse, WireError
from common.experiment.schema import TransferSettings
from common.experiment.topology import CLOUD
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.messages import Alive, NodeState, WhoIsThere
from common.runtime.world import REAL, World, nothing

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
    running = claimant.connection.run(connect_timeout_s=connect_timeout_s)
    keeping = asyncio.create_task(running, name="keep the connection")
    asking = asyncio.create_task(claimant.ask(), name="ask for the lab")
    tasks = [keeping, asking]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await (asking if asking.done() else keeping)
        tasks.append(asyncio.create_task(claimant.hold(), name="hold the lab"))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the run's own connection reports what ended this one


class _Claimant:
    """One cloud that wants the lab."""

    def __init__(
        self, address: BrokerAddress, *, lab: str, queue: bool, waiting: Callable[[str], None], world: World
    ) -> None:
        self._lab, self._queue, self._waiting = lab, queue, waiting
        self._session = world.token(4)
        self._nonce = f"{int(1e3 * world.wall()):0{TIME_DIGITS}x}{self._session}"  # they are compared
        self._by = ""
        self._reported: set[str] = set()
        self._since = 0.0
        self._loop = asyncio.get_running_loop()
        self._connected_once = asyncio.Event()
        self._replied = asyncio.Event()
        self.connection = world.connection(
            address,
            client_id=f"claim-{world.token(8)}",
            keepalive_s=TransferSettings().keepalive_s,
            received=self._received,
            connected=self._connected,
            lost=nothing,
        )

    async def ask(self) -> None:
        """Ask until nobody replies. Raises LabInUse."""
        await self._connected_once.wait()
        free_s = FREE_S
        self._since = self._loop.time()
        while self._loop.time() < self._since + free_s:
            self._question()
            await asyncio.sleep(ASK_S)
            if self._by and not self._queue:
                where = f"lab {self._lab} on broker {self.connection.address}"
                raise LabInUse(f"{where} is used by {self._by}. Wait for its end with --queue, or use another --lab")
            if self._by:
                free_s = FREE_AFTER_A_RUN_S

    async def hold(self) -> None:
        """Ask before all others until a run replies."""
        self._nonce = HELD + self._session
        self._replied.clear()
        while not self._replied.is_set():
            self._question()
            await asyncio.sleep(ASK_S)

    def _question(self) -> None:
        question = serialization.encode(WhoIsThere(self._nonce), self._nonce)
        self.connection.publish(topics.seek(self._lab, CLOUD, CLOUD), question, qos=0)

    async def _connected(self) -> None:
        inbox = topics.inbox(self._lab, "+", CLOUD, CLOUD)
        self.connection.subscribe([inbox, topics.seek(self._lab, CLOUD, CLOUD)], qos=0)
        self._since = self._loop.time()
        self._connected_once.set()

    def _received(self, topic_text: str, body: bytes, retained: bool) -> None:
        if retained:
            return  # whoever sent it may be gone for years
        try:
            topic = topics.parse(topic_text)
            _, message = serialization.decode(body)
        except WireError:
            return
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
