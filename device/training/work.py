"""Training tasks of a device: from a task to a result with its costs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from common.model.layout import Row
from common.protocol.messages import Task
from common.runtime.work import WorkResult
from device.jobs import LocalResult, Progress

if TYPE_CHECKING:
    from device.training.trainer import Trainer


def round_of(task: Task, *, rounds: int) -> int:
    """Return the number of a task's local round in the whole run; a global round has `rounds` local rounds."""
    return task.key.global_round * rounds + task.key.local_round


def result_of(task: Task, out: Row, result: LocalResult) -> WorkResult:
    """Return the result of a task: the trained model in `out`, uint8 [row_bytes], and its costs."""
    costs = (task.epochs, result.steps, result.train_s, result.wait_s)
    return WorkResult(out, result.samples, result.loss, *costs, path=result.path)


class LocalWork:
    """A device's results; each overwrites the model of the previous one. `rounds`: local rounds per global round."""

    def __init__(self, trainer: Trainer, *, rounds: int) -> None:
        self._trainer = trainer
        self._rounds = rounds
        self._out = trainer.layout.empty()

    def __call__(self, task: Task, row: Row, *, progress: Progress, cancelled: threading.Event) -> WorkResult:
        """Train the model in `row`, uint8 [row_bytes], as the task requires. Raises what `Trainer.train` raises."""
        local_round = round_of(task, rounds=self._rounds)
        result = self._trainer.train(
            row, self._out, epochs=task.epochs, local_round=local_round, progress=progress, cancelled=cancelled
        )
        return result_of(task, self._out, result)
