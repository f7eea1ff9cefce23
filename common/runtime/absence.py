"""Devices that are away by their traces: each leaves its run, and returns by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any, TypeVar

from common.errors import FedstrataError, RunFailed
from common.experiment.availability import OnlineTimes
from common.protocol import serialization, topics
from common.protocol.messages import NodeState, Presence
from common.protocol.round_state import LIVING
from common.protocol.time_zero import TimeZero
from common.runtime.child_endpoint import ChildEndpoint
from common.runtime.discovery import activity
from common.runtime.lab_client import LabClient
from common.runtime.world import Host
from common.text import short

_T = TypeVar("_T")


class Away(FedstrataError):
    """The device is away by its trace, which `begun` in monotonic seconds."""

    def __init__(self, begun: float, *, for_s: float) -> None:
        super().__init__(f"away by its trace for {for_s:.0f} s" if for_s < inf else "away by its trace for good")
        self.begun = begun


async def through_absences(
    once: Callable[[], Awaitable[None]], host: Host, name: str, parent: str, *, run: str, times: OnlineTimes | None
) -> None:
    """Take part in a run to its end: once, and again after each absence, which `once` ends by raising Away."""
    while True:
        try:
            return await once()
        except Away as away:
            activity.info("%s: run %s: %s", name, run, away)
            begun = away.begun
        assert times is not None
        if not await until_return(host, name, parent, run=run, times=times, begun=begun):
            activity.info("%s: run %s has ended meanwhile", name, run)
            return None
        activity.info("%s: run %s: available again", name, run)


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


async def until_return(host: Host, name: str, parent: str, *, run: str, times: OnlineTimes, begun: float) -> bool:
    """Wait until a device is available again, or its parent is in another run; return False if its run ends before.

    Meanwhile only the parent's state is read: it ends the wait, and a resumed run has another time zero. Raises
    RunFailed if the parent gave up.
    """
    loop = asyncio.get_running_loop()
    watched = _ParentState(host, name, parent, run=run, begun=begun)
    async with watched.client.connected():
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


class _ParentState:
    """The state of a device's parent, read while the device is away; `moved`: it has joined another run."""

    def __init__(self, host: Host, name: str, parent: str, *, run: str, begun: float) -> None:
        self.begun = begun
        self.ended = self.moved = False
        self.failure: RunFailed | None = None
        self.changed = asyncio.Event()
        self._zero = TimeZero()
        self._run, self._parent = run, parent
        self._loop = asyncio.get_running_loop()
        state = topics.state(host.lab, "+", parent)
        self.client = LabClient(host.broker, f"{name}-away", reads=[state], received=self._received, world=host.world)

    def _received(self, topic: topics.Topic, body: bytes, retained: bool) -> None:
        session, message = serialization.decode(body) if body else ("", None)
        if not isinstance(topic, topics.StateTopic):
            return
        if topic.run != self._run:
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
