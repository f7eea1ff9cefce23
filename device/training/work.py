"""Training tasks of a device: from a task to a result with its costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.experiment.schema import Experiment
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
    return WorkResult(
        out, result.samples, result.loss, *costs, path=result.path, tests=result.tests, start_loss=result.start_loss
    )


def scored_by(experiment: Experiment, node: str) -> Callable[[Task], bool]:
    """Return whether a device scores the model of a task, as a function of the task."""

    def scores(task: Task) -> bool:
        key, last = task.key, not task.epochs
        return experiment.scores(node, global_round=key.global_round, local_round=key.local_round, last=last)

    return scores


class LocalWork:
    """A device's results; each overwrites the model of the previous one. `scores`: whether it scores a task's model."""

    def __init__(self, trainer: Trainer, memory: DeviceMemory, scores: Callable[[Task], bool]) -> None:
        self._trainer = trainer
        self._scores = scores
        self._memory = memory

    def __call__(self, task: Task, row: Row, *, progress: Progress, cancelled: threading.Event) -> WorkResult:
        """Train the model in `row`, uint8 [row_bytes], as the task requires. Raises what `Trainer.train` raises."""
        memory, trainer, scores = self._memory, self._trainer, self._scores(task)
        received = trainer.examine(row, scores=scores, trains=task.epochs > 0, progress=progress, cancelled=cancelled)
        if not task.epochs:
            return result_of(task, row, LocalResult(trainer.samples, 0.0, 0, 0.0, 0.0, tests=received.tests))
        result = trainer.train(
            memory.begin(task, row),
            memory.out,
            epochs=task.epochs,
            local_round=memory.number(task),
            progress=progress,
            cancelled=cancelled,
        )
        memory.end(task)
        return result_of(task, memory.result, received.of(result))
