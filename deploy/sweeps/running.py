"""Running what a sweep lacks: one run after another in each of its slots."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from common.errors import StorageFailed
from deploy.sweeps.folder import MissingRun
from deploy.sweeps.progress import SweepProgress
from deploy.sweeps.slots import CellFailed, Slot, of_the_place

REMIND_S: Final = 20.0  # between looks at what labs wait for


async def run_jobs(
    jobs: Sequence[MissingRun],
    slots: Sequence[Slot],
    progress: SweepProgress,
    *,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Run all jobs. One that fails is reported, and the others go on. `keep` is called after each that finished.

    Raises CellFailed for an error that each other run would have, too. Cancelled, it ends the runs, which can be
    resumed.
    """
    left = deque(jobs)
    common: list[CellFailed] = []

    async def fill(slot: Slot) -> None:
        while left:
            job = left.popleft()
            progress.begin(job)
            try:
                await slot.run(job, lambda event, facts, job=job: progress.take(job, event, facts))  # type: ignore[misc]
                _kept(keep)
            except CellFailed as error:
                progress.fail(job, error)
                if of_the_place(error):
                    left.clear()
                    common.append(error)
            else:
                progress.finish(job)

    async def remind() -> None:
        while True:
            await asyncio.sleep(REMIND_S)
            progress.remind()

    reminder = asyncio.create_task(remind())
    try:
        async with asyncio.TaskGroup() as group:
            for slot in slots:
                group.create_task(fill(slot))
    finally:
        reminder.cancel()
        for slot in slots:
            slot.close()
    if common:
        raise common[0]


def _kept(keep: Callable[[], None]) -> None:
    """Keep what is finished. Raises CellFailed."""
    try:
        keep()
    except StorageFailed as error:
        raise CellFailed(str(error), error.exit_code) from None
