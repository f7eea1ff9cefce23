"""Callbacks, futures and tasks of the simulation: each belongs to a process, and their order is deterministic."""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar
from typing import Any, Protocol


class CallbackOwner(Protocol):
    """A simulated process, as the event loop sees it."""

    name: str
    tasks: set[asyncio.Task[Any]]
    killed: bool
    stopped: bool
    kept: list[asyncio.Handle]


OWNER: ContextVar[CallbackOwner | None] = ContextVar("owner", default=None)


class CountingLoop(asyncio.BaseEventLoop):
    """An event loop that numbers its objects."""

    def number(self) -> int:
        """Return the next number."""
        raise NotImplementedError


class OwnedHandle(asyncio.Handle):
    """A callback that runs only while its process runs."""

    __slots__ = ("owner",)
    owner: CallbackOwner | None
    _context: Context

    def _run(self) -> None:
        if _may_run(self.owner, self):
            super()._run()


class OwnedTimer(asyncio.TimerHandle):
    """A timer that fires only while its process runs."""

    __slots__ = ("owner",)
    owner: CallbackOwner | None
    _context: Context
    _scheduled: bool
    _when: float

    def _run(self) -> None:
        if _may_run(self.owner, self):
            super()._run()


class NumberedFuture(asyncio.Future[Any]):
    """A future that is hashed by a number: hashes of addresses would make the order in sets differ between runs."""

    def __init__(self, *, loop: CountingLoop) -> None:
        self._number = loop.number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class NumberedTask(asyncio.Task[Any]):
    """A task that is hashed by a number."""

    def __init__(self, coroutine: Any, *, loop: CountingLoop, **options: Any) -> None:
        self._number = loop.number()
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _may_run(owner: CallbackOwner | None, handle: asyncio.Handle) -> bool:
    """Return whether a callback may run; if its process is stopped, keep it for later."""
    if owner is None or not (owner.killed or owner.stopped):
        return True
    if not owner.killed:
        owner.kept.append(handle)
    return False
