"""A device's tasks: from the model received to an order for its trainer, and from there to a result with its costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.experiment.schema import Experiment
from common.methods.private import NoiseSource, PrivateUpdates, no_secret
from common.methods.rule import link_layouts
from common.model.layout import Row
from common.protocol.messages import Task
from common.runtime.round import NUMBERS, WorkResult
from common.runtime.uploads import UploadEncoder
from common.storage.spool import Spool
from device.jobs import LocalResult, Order, Prepared, Progress
from device.memory import DeviceMemory


class LocalWork:
    """A device's part in one run; each result overwrites the model of the previous one. `states`: what it keeps.

    A task is done by `order`, training, `result`, `encoded` and `keep`.

    `secret`: the device's own, for noise.
    """

    def __init__(
        self,
        experiment: Experiment,
        node: str,
        prepared: Prepared,
        *,
        states: Spool,
        secret: Callable[[], bytes] = no_secret,
    ) -> None:
        self._experiment = experiment
        self._node = node
        self.prepared = prepared
        self.layouts = link_layouts(experiment.tier_above(node).aggregation, prepared.layout)
        self._encoder = UploadEncoder.of(experiment, node, self.layouts.up)
        self._memory = DeviceMemory(
            self.layouts,
            kept_bytes=prepared.kept_bytes,
            rounds=experiment.device_rounds,
            rounds_back=experiment.cloud.rounds_back,
            spool=states,
            keeps_folder=prepared.folder,
            left_out_columns=self._encoder.kept_columns,
        )
        privacy, model = experiment.tier_above(node).privacy, prepared.layout
        source = NoiseSource(privacy, seed=experiment.seed, node=node, secret=secret)
        self._updates = PrivateUpdates(privacy, model, source) if privacy.by_child else None
        self._steps = source if privacy.on_samples else None

    @property
    def keeps(self) -> bool:
        """Whether the device has state that persists between its tasks."""
        return self.prepared.keeps or self._encoder.kept_columns > 0

    def order(self, task: Task, row: Row, progress: Progress) -> Order | WorkResult:
        """Return the order of a task for the model in `row`, uint8 [row_bytes]: train it, or only score it.

        Without either return the result. Raises StateLost.
        """
        experiment, memory, key, trains = self._experiment, self._memory, task.key, task.epochs > 0
        place = {"global_round": key.global_round, "local_round": key.local_round}
        scores = experiment.scores(self._node, **place, last=not trains)
        if not trains and not scores:
            return WorkResult(memoryview(b""), self.prepared.samples, None, 0, 0, 0.0, 0.0)
        number = memory.number(task)
        noise = b"" if self._steps is None or not trains else self._steps.key(number, [row])
        return Order(
            memory.begin(task, row),
            memory.out,
            task.epochs,
            number,
            progress,
            scores=scores,
            scores_trained=trains and experiment.scores_trained(self._node, **place),
            folder=memory.folder,
            noise=noise,
        )

    def result(self, task: Task, result: LocalResult) -> WorkResult:
        """Return the result of a task's order: the costs, and no blob yet."""
        did = (task.epochs, result.steps, result.train_s, result.wait_s)
        plans = {self._node: [{NUMBERS: result.numbers}]} if result.numbers else {}
        return WorkResult(
            memoryview(b""),
            result.samples,
            result.loss,
            *did,
            plans=plans,
            path=result.path,
            tests=result.tests,
            start_loss=result.start_loss,
            costs=result.costs,
        )

    def encoded(self, task: Task, result: WorkResult, received: Row) -> WorkResult:
        """Return a task's result with the blob of the trained model and its extras; `received`: the task's model.

        Once for each training: it changes what the codec has left out.
        """
        memory = self._memory
        number, left_out = memory.number(task), memory.left_out
        if self._updates is not None:
            self._updates.protect(received, memory.result, number=number)
        blob = self._encoder.encode(memory.result, received=received, task=number, left_out=left_out)
        return replace(result, blob=blob)

    def keep(self, task: Task) -> None:
        """Keep the state that a task's training has left, for the next one. Raises StorageFailed."""
        self._memory.end(task)
