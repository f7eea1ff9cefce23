"""What a device makes of a wish: a trained model and what it cost."""

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
    """Return the number of a task's local round in the whole run, with `rounds` of them in each global round."""
    return task.key.global_round * rounds + task.key.local_round


def result_of(task: Task, out: Row, result: LocalResult) -> WorkResult:
    """Return the answer to a task: the trained model in `out`, uint8 [row_bytes]."""
    costs = (task.epochs, result.steps, result.train_s, result.wait_s)
    return WorkResult(out, result.samples, result.loss, *costs, path=result.path)


class LocalWork:
    """A device's answers; the row of each is written again by the next. `rounds`: local rounds of a global round."""

    def __init__(self, trainer: Trainer, *, rounds: int) -> None:
        self._trainer = trainer
        self._rounds = rounds
        self._out = trainer.layout.empty()

    def __call__(self, task: Task, row: Row, *, progress: Progress, cancelled: threading.Event) -> WorkResult:
        """Train the model in `row`, uint8 [row_bytes], as the task says. Raises what `Trainer.train` raises."""
        local_round = round_of(task, rounds=self._rounds)
        result = self._trainer.train(
            row, self._out, epochs=task.epochs, local_round=local_round, progress=progress, cancelled=cancelled
        )
        return result_of(task, self._out, result)
