"""Emulation of slower hardware: a delay of the result."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import Final

from common.experiment.devices import Pace
from common.protocol.messages import Phase
from common.runtime.round import Report, WorkResult

REPORT_S: Final = 1.0


async def emulate(pace: Pace, result: WorkResult, *, since: float, report: Report) -> WorkResult:
    """Return the result after the delay that emulates slower hardware; the model arrived at `since`, loop seconds.

    The delay occupies no slot. A count that grows every second reports to the parent that this device is alive.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    due = since + pace.emulated_s(result.train_s)
    if due <= begun:
        return result
    for reported in count(1):
        left_s = due - loop.time()
        if left_s <= 0:
            break
        report(Phase.WAITING, reported, 0)
        await asyncio.sleep(min(REPORT_S, left_s))
    return replace(result, pause_s=loop.time() - begun)
