"""Devices that are away by their traces: each leaves its run, and returns by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from math import inf
from typing import Any, Final, TypeVar

from common.errors import ConnectionFailed, FedstrataError, RunFailed, WireError
from common.experiment.devices import OnlineTimes
from common.experiment.schema import TransferSettings
from common.net.address import BrokerAddress
from common.protocol import serialization, topics
from common.protocol.identity import Identity
from common.protocol.messages import NodeState, Presence
from common.protocol.round_state import LIVING
from common.protocol.time_zero import TimeZero
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.world import World, nothing
from common.text import short

RETRY_S: Final = 5.0

_T = TypeVar("_T")


class Away(FedstrataError):
    """The device is away by its trace, which `begun` in monotonic seconds."""

    def __init__(self, begun: float, *, for_s: float) -> None:
        super().__init__(f"away by its trace for {for_s:.0f} s" if for_s < inf else "away by its trace for good")
        self.begun = begun


async def while_online(up: ChildEndpoint, times: OnlineTimes | None, work: Coroutine[Any, Any, _T]) -> _T:
    """Do a device's work and return its result. Raises Away once its trace takes it away, `times` None: never."""
    working = asyncio.create_task(work, name="work while online")
    leaving = asyncio.create_task(_departure(up, times), name="departure")
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise leaving.result()
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _departure(up: ChildEndpoint, times: OnlineTimes | None) -> Away:
    begun = await up.began()
    while True:
        t = up.now() - begun
        if times is not None and not times.online(t):
            return Away(begun, for_s=times.returns(t) - t)
        left_s = inf if times is None else times.next_change(t) - t
        try:
            async with asyncio.timeout(left_s if left_s < inf else None):
                begun = await up.began()  # of a run that was resumed
        except TimeoutError:
            pass


async def until_return(
    address: BrokerAddress, identity: Identity, parent: str, *, times: OnlineTimes, begun: float, world: World
) -> bool:
    """Wait until a device is available again, or its parent is in another run; return False if its run ends before.

    Meanwhile only the parent's state is read: it ends the wait, and a resumed run has another time zero. Raises
    RunFailed if the parent gave up.
    """
    loop = asyncio.get_running_loop()
    watched = _ParentState(address, identity, parent, begun=begun, world=world)
    keeping = asyncio.create_task(watched.keep(), name=f"{identity.name} is away")
    try:
        while not watched.ended:
            t = loop.time() - watched.begun
            left_s = times.returns(t) - t
            if left_s <= 0 or watched.moved:
                return True
            watched.changed.clear()
            try:
                async with asyncio.timeout(left_s if left_s < inf else None):
                    await watched.changed.wait()
            except TimeoutError:
                pass
        if watched.failure is not None:
            raise watched.failure
        return False
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))


class _ParentState:
    """The state of a device's parent, read while the device is away; `moved`: it has joined another run."""

    def __init__(self, address: BrokerAddress, identity: Identity, parent: str, *, begun: float, world: World) -> None:
        self.begun = begun
        self.ended = self.moved = False
        self.failure: RunFailed | None = None
        self.changed = asyncio.Event()
        self._zero = TimeZero()
        self._identity, self._parent = identity, parent
        self._loop = asyncio.get_running_loop()
        self._connection = world.connection(
            address,
            client_id=f"{identity.name}-away-{world.token(4)}",
            keepalive_s=TransferSettings().keepalive_s,
            received=self._received,
            connected=self._connected,
            lost=nothing,
        )

    async def keep(self) -> None:
        """Keep the connection."""
        while True:
            try:
                await self._connection.run(connect_timeout_s=inf)
            except ConnectionFailed:  # it is reported once the device returns
                await asyncio.sleep(RETRY_S)

    async def _connected(self) -> None:
        self._connection.subscribe([topics.state(self._identity.lab, "+", self._parent)], qos=0)

    def _received(self, topic_text: str, body: bytes, retained: bool) -> None:
        try:
            topic = topics.parse(topic_text)
            session, message = serialization.decode(body) if body else ("", None)
        except WireError:
            return
        if not isinstance(topic, topics.StateTopic):
            return
        if topic.run != self._identity.run:
            living = isinstance(message, Presence) and message.state in LIVING
            self.moved = self.moved or (living and not retained)
        elif message is None:
            self.ended = True
        elif isinstance(message, Presence):
            self.ended = self.ended or message.state in (NodeState.FINISHED, NodeState.FAILED)
            if message.state is NodeState.FAILED:
                self.failure = RunFailed(f"{self._parent} gave up: {short(message.reason)}")
            now = self._loop.time()
            if not retained and (begun := self._zero.note(message.elapsed_s, session, now, published=True)) is not None:
                self.begun = begun
        self.changed.set()
