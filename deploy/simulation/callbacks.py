"""Callbacks, futures and tasks of the simulation: each belongs to a process, and their order is deterministic."""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar, copy_context
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


class OwnedHandle(asyncio.TimerHandle):
    """A callback, now or at a time, that runs only while its process runs.

    It is made and run as by asyncio, but without asking for the debug mode: every message needs some twenty of them.
    """

    __slots__ = ("owner",)
    owner: CallbackOwner | None

    def __init__(
        self, when: float | None, callback: Any, args: Any, loop: CountingLoop, context: Context | None
    ) -> None:
        self._when, self._scheduled = when, when is not None
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = self._source_traceback = None
        self.owner = self._context.get(OWNER)

    def _run(self) -> None:
        owner = self.owner
        if owner is not None and (owner.killed or owner.stopped):
            if not owner.killed:
                owner.kept.append(self)
            return
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio does
            message = f"Exception in callback {self._callback!r}"
            self._loop.call_exception_handler({"message": message, "exception": error, "handle": self})


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
