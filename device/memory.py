"""A device's rows, and its state: what it keeps from task to task.

That is the vectors of its objective, the folder of its trainer, and what its codec has left out of its results.

A task names the one whose state it follows: the parent may repeat a task after a restart, or not use a result. So the
states of all devices and that of their parent belong together, whoever was killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.errors import StateLost
from common.host.files import writing
from common.model.layout import LinkLayouts, Row
from common.protocol.messages import Task
from common.storage.spool import Spool
from common.storage.states import TaskStates

FILE: Final = "vectors"
OWN: Final = "own"  # the trainer's folder, within a state


class DeviceMemory:
    """One device's rows in one run: `out` is written by its training, `result` is the part for its parent.

    `kept_bytes`: of the vectors that persist, behind the others in a row. `left_out`, float32 [left_out_columns], which
    encoding changes, persists, and so does `folder`, which a training changes, with `keeps_folder`. `rounds`: local
    rounds in each global round; `rounds_back`: global rounds that the cloud may return.
    """

    def __init__(
        self,
        layouts: LinkLayouts,
        *,
        kept_bytes: int,
        rounds: int,
        rounds_back: int,
        spool: Spool,
        keeps_folder: bool = False,
        left_out_columns: int = 0,
    ) -> None:
        written = layouts.up.row_bytes + kept_bytes
        whole = np.zeros(written + 4 * left_out_columns, np.uint8)
        self.out: Row = whole[:written]
        self.result: Row = self.out[: layouts.up.row_bytes]
        self.left_out = whole[written:].view(np.float32)
        self._kept = whole[layouts.up.row_bytes :]
        self._kept_bytes = kept_bytes
        self._row: Row = np.zeros(layouts.down.row_bytes + kept_bytes if kept_bytes else 0, np.uint8)
        keeps = self._kept.size > 0 or keeps_folder
        self._states = TaskStates(spool.states(), rounds_back=rounds_back) if keeps else None
        self.folder = spool.states() / OWN if keeps_folder else None
        self._rounds = rounds
        self._last = 0, self._kept.copy()

    def number(self, task: Task) -> int:
        """Return the number of a task's local round in the run, from 0."""
        return task.key.global_round * self._rounds + task.key.local_round

    def begin(self, task: Task, received: Row) -> Row:
        """Return the row of a task: what was received, and the vectors kept. Raises StateLost if the state is lost."""
        if self._states is None:
            return received
        if self.folder is not None:
            self._restore(self._states, task.follows, self.folder)
        if not self._kept.size:
            return received
        kept = self._after(self._states, task.follows)
        self.left_out[:] = kept[self._kept_bytes :].view(np.float32)
        if not self._kept_bytes:
            return received
        self._row[: received.size] = received
        self._row[received.size :] = kept[: self._kept_bytes]
        return self._row

    def end(self, task: Task) -> None:
        """Keep the state that the task's training has left. Raises StorageFailed."""
        if self._states is None:
            return
        number = self.number(task) + 1
        self._states.write(number, self._save, follows=task.follows, global_round=task.key.global_round)
        self._last = number, self._kept.copy()

    def _save(self, folder: Path) -> dict[str, object]:
        if self._kept.size:
            (folder / FILE).write_bytes(self._kept.data)
        if self.folder is not None:
            shutil.copytree(self.folder, folder / OWN)
        return {}

    def _restore(self, states: TaskStates, task: int, folder: Path) -> None:
        """Let the trainer's folder be as it was after a task, counted from 1; empty before the first one."""
        with writing(folder):
            shutil.rmtree(folder, ignore_errors=True)
            if task == 0:
                folder.mkdir(parents=True)
                return

            def read(state: Path, _: Mapping[str, Any]) -> None:
                shutil.copytree(state / OWN, folder)

            if not states.read(task, read):
                raise _lost(task)

    def _after(self, states: TaskStates, task: int) -> Row:
        """Return the vectors, and what was left out, after a task, counted from 1; zeros before the first one."""
        last, row = self._last
        if task == last:
            return row
        row = np.zeros_like(self._kept)

        def read(folder: Path, _: Mapping[str, Any]) -> None:
            row[:] = np.fromfile(folder / FILE, np.uint8)

        if task and not states.read(task, read):
            raise _lost(task)
        return row


def _lost(task: int) -> StateLost:
    return StateLost(
        f"what this device kept after its task {task} is lost. Start devices with the same --spool DIR "
        "after a restart, or start a new run."
    )
