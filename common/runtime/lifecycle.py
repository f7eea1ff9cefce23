"""A node's lifecycle in a run: connected during its work, then a final state that reports how it
ended.

A device that is away by its trace leaves its run, and returns by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Final, TypeVar

from fedstrata.common.errors import (
    DuplicateName,
    FedstrataError,
    InvalidBelow,
    InvalidExperiment,
    NoProgress,
    ParentGaveUp,
    StateLost,
    as_known,
    first_error,
)
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import LIVING, About, Alive, Failure, NodeState, Presence
from fedstrata.common.protocol.presence import TimeZero
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.discovery import Moved, activity
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.lab_client import LabCallbacks, LabClient, Reply
from fedstrata.common.runtime.world import Host, within
from fedstrata.common.settings.devices import Move, Moves, OnlineTimes
from fedstrata.common.text import short

LAST_STATE_S: Final = 2.0
STAYS: Final = Moves(())
# within which the owner of a name answers a second process, over a slow link too
NAMESAKE_S: Final = 5.0
ASK_S: Final = 0.5  # between two questions to a parent whose end was seen

log = logging.getLogger("fedstrata.lifecycle")

_T = TypeVar("_T")


async def live(
    endpoints: Sequence[Endpoint],
    work: Coroutine[Any, Any, _T],
    *,
    connect_timeout_s: float,
    goodbye: Callable[[], Awaitable[None]],
    last_scrape: Callable[[], Awaitable[None]] | None = None,
) -> _T:
    """Keep the endpoints connected while `work` runs and return its result.

    At the end the state becomes FINISHED, `goodbye` runs, `last_scrape` waits for one more scrape
    of this process's metrics, and the node's retained messages are cleared. After an error the
    state is FAILED with the reason, after an interruption DISCONNECTED. If the name is already
    taken the state is LOST; only this process is affected. So a process without its node's state
    waits for another one of this name before it fails. Raises what `work` or an endpoint raised; of
    several errors the first FedstrataError, or RunFailed if there is none.
    """
    serving = [
        asyncio.create_task(endpoint.run(connect_timeout_s=connect_timeout_s))
        for endpoint in endpoints
    ]
    working = asyncio.create_task(work)
    try:
        await asyncio.wait((working, *serving), return_when=asyncio.FIRST_COMPLETED)
        for end in serving:
            if end.done():
                end.result()
        result = await working
        for endpoint in endpoints:
            endpoint.set_state(NodeState.FINISHED)
        await goodbye()
        if last_scrape is not None:
            await last_scrape()
        await _leave(endpoints)
        return result
    except asyncio.CancelledError:
        await _report(endpoints, NodeState.DISCONNECTED, "interrupted")
        raise
    except BaseException as error:
        known = as_known(error, endpoints[0].identity.name)
        if isinstance(known, StateLost):
            known = await _name_taken(serving) or known
        for endpoint, end in zip(endpoints, serving, strict=True):
            if not end.done():  # work may fail before the connection is made
                await endpoint.introduced(timeout_s=LAST_STATE_S)
        await _report(endpoints, _state(known), str(known or repr(error)), failure=_failure(known))
        if known is None:
            raise
        raise known from known.__cause__
    finally:
        await _end((working, *serving))


async def _name_taken(serving: Sequence[asyncio.Task[None]]) -> DuplicateName | None:
    """Return the error of an endpoint that learns within `NAMESAKE_S` that another process has the
    name.
    """
    done, _ = await asyncio.wait(serving, timeout=NAMESAKE_S, return_when=asyncio.FIRST_COMPLETED)
    ends = (first_error(error) for end in done if (error := end.exception()) is not None)
    return next((error for error in ends if isinstance(error, DuplicateName)), None)


async def _leave(endpoints: Sequence[Endpoint]) -> None:
    for endpoint in endpoints:
        await endpoint.flush(timeout_s=max(LAST_STATE_S, endpoint.patience_s()))
    # all of them first: an endpoint must not defend the name against another's clearing
    for endpoint in endpoints:
        endpoint.release_name()
    # they may share the broker and the topic
    keep_state = any(endpoint.someone_is_away() for endpoint in endpoints)
    for endpoint in endpoints:
        await endpoint.leave(keep_state=keep_state, timeout_s=LAST_STATE_S)


def _state(error: FedstrataError | None) -> NodeState:
    if isinstance(error, DuplicateName):
        return NodeState.LOST
    if isinstance(error, Moved | MovesAway | Away):
        return NodeState.DISCONNECTED
    return NodeState.FAILED


def _failure(error: FedstrataError | None) -> Failure:
    if isinstance(error, InvalidExperiment | InvalidBelow):
        return Failure.INVALID
    if isinstance(error, MovesAway):
        return Failure.MOVED
    if isinstance(error, NoProgress):
        return Failure.STALLED
    return Failure.NONE


async def _report(
    endpoints: Sequence[Endpoint], state: NodeState, reason: str, *, failure: Failure = Failure.NONE
) -> None:
    for endpoint in endpoints:
        endpoint.set_state(state, reason=reason, failure=failure)
    for endpoint in endpoints:
        await endpoint.flush(timeout_s=LAST_STATE_S)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # only the first was raised; keeps asyncio from logging the others


class MovesAway(FedstrataError):
    """The device moves to another parent, by its trace."""

    def __init__(self, move: Move) -> None:
        super().__init__(f"it moves to {move.parent}")
        self.move = move


class Away(FedstrataError):
    """The device is away by its trace, which `begun` in monotonic seconds."""

    def __init__(self, begun: float, *, for_s: float) -> None:
        length = f"{for_s:.0f} s" if for_s < inf else "good"
        super().__init__(f"away by its trace for {length}")
        self.begun = begun


async def through_absences(
    once: Callable[[], Awaitable[None]],
    host: Host,
    name: str,
    parent: Callable[[], str],
    *,
    run: str,
    times: OnlineTimes | None,
) -> None:
    """Take part in a run to its end: once, and again after each absence, which `once` ends by
    raising Away.
    """
    while True:
        try:
            return await once()
        except Away as away:
            activity.info("%s: run %s: %s", name, run, away)
            begun = away.begun
        assert times is not None
        if not await until_return(host, name, parent(), run=run, times=times, begun=begun):
            activity.info("%s: run %s has ended meanwhile", name, run)
            return None
        activity.info("%s: run %s: available again", name, run)


async def while_online(
    up: ChildEndpoint,
    times: OnlineTimes | None,
    work: Coroutine[Any, Any, _T],
    *,
    moves: Moves = STAYS,
    failed: Collection[Move] = (),
) -> _T:
    """Do a device's work and return its result. Raises Away or MovesAway once its traces take it
    away.

    `times` None: it is always there. `failed`: the moves to parents that did not take it.
    """
    working = asyncio.create_task(work, name="work while online")
    leaving = asyncio.create_task(_departure(up, times, moves, failed), name="departure")
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise leaving.result()
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _departure(
    up: ChildEndpoint, times: OnlineTimes | None, moves: Moves, failed: Collection[Move]
) -> Away | MovesAway:
    begun = await up.began()
    while True:
        t = up.now() - begun
        if times is not None and not times.online(t):
            return Away(begun, for_s=times.returns(t) - t)
        move = moves.due(t)
        if not (move is None or move.parent == up.session.parent or move in failed):
            return MovesAway(move)
        change = moves.next_change(t)
        if times is not None:
            change = min(change, times.next_change(t))
        left_s = change - t if change < inf else None
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                begun = await up.began()  # of a run that was resumed


async def until_return(
    host: Host, name: str, parent: str, *, run: str, times: OnlineTimes, begun: float
) -> bool:
    """Wait until a device is available again, or its parent is in another run; return False if its
    run ends before.

    Meanwhile only the parent's state is read: it ends the wait, and a resumed run has another time
    zero. Raises ParentGaveUp.
    """
    loop = asyncio.get_running_loop()
    watched = _ParentState(host, name, parent, run=run, begun=begun)
    async with watched.client.connected():
        while not await watched.over():
            t = loop.time() - watched.begun
            left_s = times.returns(t) - t
            if left_s <= 0 or watched.moved:
                return True
            watched.changed.clear()
            await within(watched.changed, left_s)
    if watched.failure is not None:
        raise watched.failure
    return False


class _ParentState:
    """The state of a device's parent, read while the device is away; `moved`: it has joined another
    run.
    """

    def __init__(self, host: Host, name: str, parent: str, *, run: str, begun: float) -> None:
        self.begun = begun
        self.ended = self.moved = False
        self.failure: ParentGaveUp | None = None
        self.changed = asyncio.Event()
        self._living = asyncio.Event()  # since the last end that was seen
        self._zero = TimeZero()
        self._run = run
        self._parent = parent
        self._loop = asyncio.get_running_loop()
        lab = host.lab
        reads = [topics.state(lab, "+", parent), topics.inbox(lab, run, name, parent)]
        on = LabCallbacks(received=self._received, answered=self._answered)
        self.client = LabClient(
            host.broker, f"{name}-away", lab=lab, node=name, reads=reads, on=on, world=host.world
        )

    async def over(self) -> bool:
        """Return whether the run has ended: if another has sent this state, a living parent
        answers.
        """
        if self.ended:
            asking = self.client.ask(
                self._parent, About.PRESENCE, run=self._run, until=self._living, every_s=ASK_S
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(NAMESAKE_S):
                    await asking
        return self.ended

    def _answered(self, reply: Reply) -> None:
        if reply.run == self._run and isinstance(reply.message, Alive):
            self._note(reply.message.presence, living=True)
            self.changed.set()

    def _note(self, presence: Presence, *, living: bool) -> None:
        """Note the parent's state; `living`: a process of it has just sent this, not the broker."""
        if presence.state in LIVING and living:
            self.ended = False
            self.failure = None
            self._living.set()
        elif presence.state in (NodeState.FINISHED, NodeState.FAILED):
            self._end()
        if presence.state is NodeState.FAILED:
            self.failure = ParentGaveUp(f"{self._parent} gave up: {short(presence.reason)}")

    def _end(self) -> None:
        self.ended = True
        self._living.clear()

    def _received(self, topic: topics.Topic, body: bytes, retained: bool) -> None:
        session, message = serialization.decode(body) if body else ("", None)
        if not isinstance(topic, topics.StateTopic):
            return
        if topic.run != self._run:
            living = isinstance(message, Presence) and message.state in LIVING
            self.moved = self.moved or (living and not retained)
        elif message is None:
            self._end()
        elif isinstance(message, Presence):
            self._note(message, living=not retained)
            if not retained:
                now = self._loop.time()
                self._zero.note(message.elapsed_s, session, now, published=True)
                if self._zero.begun is not None:
                    self.begun = self._zero.begun
        self.changed.set()
