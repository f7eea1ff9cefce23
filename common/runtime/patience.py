"""Writes that wait for room on the disk: the run waits with them, instead of losing what it has computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from common.errors import StorageFailed

RETRY_S: Final = 1.0


async def until_written(
    write: Callable[[], Awaitable[None]], *, patience_s: float, warn: Callable[[str], None]
) -> None:
    """Call `write` until it succeeds, with one warning. Raises its last StorageFailed after `patience_s`."""
    now = asyncio.get_running_loop().time
    deadline: float | None = None
    while True:
        try:
            await write()
            return
        except StorageFailed as error:
            if deadline is None:
                deadline = now() + patience_s
                warn(f"{error} The run waits for it, for {patience_s:g} s.")
            elif now() >= deadline:
                raise
        await asyncio.sleep(RETRY_S)
