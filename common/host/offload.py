"""Work off the event loop, so that a keep-alive never lapses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

_T = TypeVar("_T")


async def offload(
    function: Callable[[], _T], *, executor: Executor | None = None, cancel: Callable[[], None] = lambda: None
) -> _T:
    """Run a function in a thread and return what it made.

    A cancelled caller tells the function by `cancel` and still waits for its end: until then the buffers that it
    reads and writes are its own.
    """
    running = asyncio.get_running_loop().run_in_executor(executor, function)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel()
        await asyncio.wait((running,))
        if not running.cancelled():
            running.exception()  # seen; nobody waits for it any more
        raise
