"""Running what a sweep lacks: one run after another in each of its slots."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from deploy.sweeps.folder import MissingRun
from deploy.sweeps.progress import SweepProgress
from deploy.sweeps.slots import CellFailed, Slot, of_the_place


async def run_jobs(jobs: Sequence[MissingRun], slots: Sequence[Slot], progress: SweepProgress) -> None:
    """Run all jobs. One that fails is reported, and the others go on.

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
            except CellFailed as error:
                progress.fail(job, str(error))
                if of_the_place(error):
                    left.clear()
                    common.append(error)
            else:
                progress.finish(job)

    try:
        async with asyncio.TaskGroup() as group:
            for slot in slots:
                group.create_task(fill(slot))
    finally:
        for slot in slots:
            slot.close()
    if common:
        raise common[0]
