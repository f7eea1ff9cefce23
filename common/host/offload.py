"""Work outside the event loop, so that keep-alives are never late, and beside other work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar

from fedstrata.common.errors import as_known

SMALL_BYTES: Final = 500_000  # some 0.1 ms of digests, or of sums

_T = TypeVar("_T")


async def offload(
    function: Callable[[], _T],
    *,
    executor: Executor | None = None,
    cancel: Callable[[], None] = lambda: None,
) -> _T:
    """Run a function in a thread and return its result.

    If the caller is cancelled, `cancel` is called and the call still waits for the function's end,
    because the function reads and writes the caller's buffers.
    """
    running = asyncio.get_running_loop().run_in_executor(executor, function)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel()
        await asyncio.wait((running,))
        if not running.cancelled():
            running.exception()  # retrieve it: no caller waits for it any more
        raise


async def work_on(function: Callable[[], _T], *, nbytes: int) -> _T:
    """Run a function on a model, in a thread unless it is faster than starting one."""
    if nbytes <= SMALL_BYTES:
        return function()
    return await offload(function)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, _T], *, name: str) -> AsyncIterator[asyncio.Task[_T]]:
    """Run a coroutine as a task while the `with` block lasts, then cancel it; an unexpected error
    of it is logged.
    """
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended, Exception):
            as_known(ended, name)


@contextmanager
def repeated(look: Callable[[], None], *, every_s: float) -> Iterator[None]:
    """Call a function every so many seconds in a thread of its own while the `with` block lasts."""
    over = threading.Event()

    def look_again() -> None:
        while not over.wait(every_s):
            look()

    looking = threading.Thread(target=look_again, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
