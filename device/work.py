"""What a device makes of a wish: a trained model and what it cost."""

from __future__ import annotations

import threading

from common.layout import Row
from common.node.child import Answer
from common.wire.messages import Task
from device.trainer import Progress, Trainer


class LocalWork:
    """A device's answers; the row of each is written again by the next. `rounds`: local rounds of an iteration."""

    def __init__(self, trainer: Trainer, *, rounds: int) -> None:
        self._trainer = trainer
        self._rounds = rounds
        self._out = trainer.layout.empty()

    def __call__(self, task: Task, row: Row, *, progress: Progress, cancelled: threading.Event) -> Answer:
        """Train the model in `row`, uint8 [row_bytes], as the task says. Raises what `Trainer.train` raises."""
        r = task.key.iteration * self._rounds + task.key.round
        result = self._trainer.train(
            row, self._out, epochs=task.epochs, round_=r, progress=progress, cancelled=cancelled
        )
        costs = (task.epochs, result.steps, result.train_s, result.wait_s)
        return Answer(self._out, result.samples, result.loss, *costs)
