"""The pause that makes an answer as late as that of the machine which the device plays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import Final

from common.experiment.hardware import Pace
from common.protocol.messages import Phase
from common.runtime.work import Report, WorkResult

REPORT_S: Final = 1.0


async def keep(pace: Pace, answer: WorkResult, *, since: float, report: Report) -> WorkResult:
    """Return the answer, no sooner than a machine of this pace has it that got its model at `since`, loop seconds.

    No slot is held meanwhile, and a count that grows with the seconds tells the parent that this device is alive.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    due = since + pace.emulated_s(answer.train_s)
    if due <= begun:
        return answer
    for reported in count(1):
        left_s = due - loop.time()
        if left_s <= 0:
            break
        report(Phase.WAITING, reported, 0)
        await asyncio.sleep(min(REPORT_S, left_s))
    return replace(answer, pause_s=loop.time() - begun)
