"""Training tasks of a device: from a task to a result with its costs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.experiment.schema import Experiment
from common.model.layout import Row
from common.protocol.messages import Task
from common.runtime.round import NUMBERS, WorkResult
from device.jobs import LocalResult, Order, Progress
from device.memory import DeviceMemory


def result_of(node: str, task: Task, out: Row, result: LocalResult) -> WorkResult:
    """Return the result of a device's task: the trained model and its extras in `out`, uint8, and its costs."""
    costs = (task.epochs, result.steps, result.train_s, result.wait_s)
    plans = {node: [{NUMBERS: result.numbers}]} if result.numbers else {}
    return WorkResult(
        out,
        result.samples,
        result.loss,
        *costs,
        plans=plans,
        path=result.path,
        tests=result.tests,
        start_loss=result.start_loss,
    )


def scored_by(experiment: Experiment, node: str) -> Callable[[Task], tuple[bool, bool]]:
    """Return whether a device scores the model of a task, and what training makes of it, as a function of the task."""

    def scores(task: Task) -> tuple[bool, bool]:
        key, last = task.key, not task.epochs
        place = {"global_round": key.global_round, "local_round": key.local_round}
        return experiment.scores(node, **place, last=last), not last and experiment.scores_trained(node, **place)

    return scores


class LocalWork:
    """A device's results; each overwrites the model of the previous one.

    `train`: trains as ordered. `samples`: of the device. `scores`: see `scored_by`.
    """

    def __init__(
        self,
        node: str,
        train: Callable[[Order], LocalResult],
        memory: DeviceMemory,
        *,
        samples: int,
        scores: Callable[[Task], tuple[bool, bool]],
    ) -> None:
        self._node = node
        self._train = train
        self._memory = memory
        self._samples = samples
        self._scores = scores

    def __call__(self, task: Task, row: Row, *, progress: Progress, cancelled: threading.Event) -> WorkResult:
        """Train the model in `row`, uint8 [row_bytes], as the task requires. Raises what `train` raises."""
        memory, (scores, scores_trained) = self._memory, self._scores(task)
        if not task.epochs and not scores:
            return result_of(self._node, task, row, LocalResult(self._samples, None, 0, 0.0, 0.0))
        begun, number = memory.begin(task, row), memory.number(task)
        result = self._train(
            Order(
                begun, memory.out, task.epochs, number, progress, cancelled, scores, scores_trained, memory.folder
            )
        )  # fmt: skip
        if not task.epochs:
            return result_of(self._node, task, row, result)
        memory.end(task)
        return result_of(self._node, task, memory.result, result)
