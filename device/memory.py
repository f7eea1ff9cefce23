"""A device's rows, and the vectors that it keeps from task to task.

A task names the one whose vectors it follows: the parent may repeat a task after a restart, or not use a result. So the
vectors of all devices and those of their parent belong together, whoever was killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.errors import StateLost
from common.model.layout import LinkLayouts, Row
from common.protocol.messages import Task
from common.storage.spool import Spool
from common.storage.task_states import TaskStates

FILE: Final = "vectors"


class DeviceMemory:
    """One device's rows in one run: `out` is written by its training, `result` is the part for its parent.

    `kept_bytes`: of the vectors that persist, behind the others in a row. `rounds`: local rounds in each global round;
    `rounds_back`: global rounds that the cloud may return.
    """

    def __init__(self, layouts: LinkLayouts, *, kept_bytes: int, rounds: int, rounds_back: int, spool: Spool) -> None:
        self.out: Row = np.zeros(layouts.up.row_bytes + kept_bytes, np.uint8)
        self.result: Row = self.out[: layouts.up.row_bytes]
        self._kept = self.out[layouts.up.row_bytes :]
        self._row: Row = np.zeros(layouts.down.row_bytes + kept_bytes if kept_bytes else 0, np.uint8)
        self._states = TaskStates(spool.states(), rounds_back=rounds_back) if kept_bytes else None
        self._rounds = rounds
        self._last = 0, self._kept.copy()

    def number(self, task: Task) -> int:
        """Return the number of a task's local round in the run, from 0."""
        return task.key.global_round * self._rounds + task.key.local_round

    def begin(self, task: Task, received: Row) -> Row:
        """Return the row of a task: what was received, and the vectors kept. Raises StateLost if they are lost."""
        if self._states is None:
            return received
        self._row[: received.size] = received
        self._row[received.size :] = self._after(self._states, task.follows)
        return self._row

    def end(self, task: Task) -> None:
        """Keep the vectors that the task's training has written. Raises StorageFailed."""
        if self._states is None:
            return
        number = self.number(task) + 1
        self._states.write(number, self._save, follows=task.follows, global_round=task.key.global_round)
        self._last = number, self._kept.copy()

    def _save(self, folder: Path) -> dict[str, object]:
        (folder / FILE).write_bytes(self._kept.data)
        return {}

    def _after(self, states: TaskStates, task: int) -> Row:
        """Return the vectors after a task, counted from 1; zeros before the first one."""
        last, row = self._last
        if task == last:
            return row
        row = np.zeros_like(self._kept)

        def read(folder: Path, _: Mapping[str, Any]) -> None:
            row[:] = np.fromfile(folder / FILE, np.uint8)

        if task and not states.read(task, read):
            raise StateLost(
                f"the vectors that this device kept after its task {task} are lost. Start devices with the same "
                "--spool DIR after a restart, or start a new run."
            )
        return row
