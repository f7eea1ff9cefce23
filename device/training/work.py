"""Training tasks of a device: from a task to a result with its costs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from common.model.layout import Row
from common.protocol.messages import Task
from common.runtime.round import WorkResult
from device.jobs import LocalResult, Progress
from device.memory import DeviceMemory

if TYPE_CHECKING:
    from device.training.trainer import Trainer


def result_of(task: Task, out: Row, result: LocalResult) -> WorkResult:
    """Return the result of a task: the trained model and its extras in `out`, uint8 [row_bytes], and its costs."""
    costs = (task.epochs, result.steps, result.train_s, result.wait_s)
    return WorkResult(out, result.samples, result.loss, *costs, path=result.path)


class LocalWork:
    """A device's results; each overwrites the model of the previous one."""

    def __init__(self, trainer: Trainer, memory: DeviceMemory) -> None:
        self._trainer = trainer
        self._memory = memory

    def __call__(self, task: Task, row: Row, *, progress: Progress, cancelled: threading.Event) -> WorkResult:
        """Train the model in `row`, uint8 [row_bytes], as the task requires. Raises what `Trainer.train` raises."""
        memory = self._memory
        result = self._trainer.train(
            memory.begin(task, row),
            memory.out,
            epochs=task.epochs,
            local_round=memory.number(task),
            progress=progress,
            cancelled=cancelled,
        )
        memory.end(task)
        return result_of(task, memory.result, result)
