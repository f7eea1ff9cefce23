"""A device's tasks: from the model received to an order for its trainer, and from there to a result with its costs."""

from __future__ import annotations

from collections.abc import Callable

from common.experiment.schema import Experiment
from common.methods.private import NoiseSource, PrivateUpdates, no_secret
from common.methods.rule import link_layouts
from common.model.layout import Row
from common.protocol.messages import Task
from common.runtime.round import NUMBERS, WorkResult
from common.storage.spool import Spool
from device.jobs import LocalResult, Order, Prepared, Progress
from device.memory import DeviceMemory


class LocalWork:
    """A device's part in one run; each result overwrites the model of the previous one. `states`: what it keeps.

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
        self._memory = DeviceMemory(
            self.layouts,
            kept_bytes=prepared.kept_bytes,
            rounds=experiment.device_rounds,
            rounds_back=experiment.cloud.rounds_back,
            spool=states,
            keeps_folder=prepared.folder,
        )
        privacy, model = experiment.tier_above(node).privacy, prepared.layout
        source = NoiseSource(privacy, seed=experiment.seed, node=node, secret=secret)
        self._updates = PrivateUpdates(privacy, model, source) if privacy.by_child else None
        self._steps = source if privacy.on_samples else None
        self._received: Row | None = None

    @property
    def protects(self) -> bool:
        """Whether results are clipped and get noise, which takes time."""
        return self._updates is not None

    def order(self, task: Task, row: Row, progress: Progress) -> Order | WorkResult:
        """Return the order of a task for the model in `row`, uint8 [row_bytes]: train it, or only score it.

        Without either return the result. Raises StateLost.
        """
        experiment, memory, key, trains = self._experiment, self._memory, task.key, task.epochs > 0
        place = {"global_round": key.global_round, "local_round": key.local_round}
        scores = experiment.scores(self._node, **place, last=not trains)
        if not trains and not scores:
            return WorkResult(row, self.prepared.samples, None, 0, 0, 0.0, 0.0)
        if self._updates is not None:
            self._received = row
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
        """Return the result of a task's order: the trained model and its extras, uint8, and the costs."""
        costs = (task.epochs, result.steps, result.train_s, result.wait_s)
        plans = {self._node: [{NUMBERS: result.numbers}]} if result.numbers else {}
        if self._updates is not None and self._received is not None and task.epochs:
            self._updates.protect(self._received, self._memory.result, number=self._memory.number(task))
        return WorkResult(
            self._memory.result,
            result.samples,
            result.loss,
            *costs,
            plans=plans,
            path=result.path,
            tests=result.tests,
            start_loss=result.start_loss,
        )

    def keep(self, task: Task) -> None:
        """Keep the state that a task's training has left, for the next one. Raises StorageFailed."""
        self._memory.end(task)
