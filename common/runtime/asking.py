"""Work over a connection of its own, which lasts as long as the work: to look who has the lab, or who is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from common.runtime.world import Connection


async def work_over(connection: Connection, work: Coroutine[Any, Any, None], *, connect_timeout_s: float) -> None:
    """Keep a connection until the work is done. Raises what ends either of them first."""
    keeping = asyncio.create_task(connection.run(connect_timeout_s=connect_timeout_s), name="keep the connection")
    working = asyncio.create_task(work, name="work over a connection")
    try:
        await asyncio.wait((keeping, working), return_when=asyncio.FIRST_COMPLETED)
        await (working if working.done() else keeping)
    finally:
        for task in (keeping, working):
            task.cancel()
        await asyncio.wait((keeping, working))
