"""Real training and evaluation in virtual time: the device's own pool and the cloud's own
evaluator, beside the clock.

Both run on an event loop of a thread, with worker processes as in a lab. A computation begins there
at its virtual start and is awaited at its virtual end, so all cores work, and the order of events
is that of virtual time, however many workers there are. Its virtual seconds are known before it
begins. Where devices may be trained vmapped, the trainings that have begun go to the pool together
at the first virtual end among them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

from fedstrata.cloud.evaluator import Beginning, EvaluationResult, Evaluator
from fedstrata.common.accounting.costs import UNKNOWN_COSTS
from fedstrata.common.accounting.work import TrainingPath
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.model.layout import Row
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.hardware import FORWARD, SimulatedHardware, SimulatedMember
from fedstrata.device.jobs import LocalResult, Order, PoolMember, Prepared
from fedstrata.device.pool.pool import Pool

BOOT_S: Final = 0.01  # virtual seconds of a start: no result depends on them

_T = TypeVar("_T")


class Computation(Generic[_T]):
    """A computation on another thread's event loop; await its result in this thread by `result`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, _T],
        live: set[Computation[Any]],
        group: list[Computation[Any]],
    ) -> None:
        """Join a group that has not begun; `live` has the computation until it ends."""
        self._loop = loop
        self._work = work
        self._group = group
        self._task: asyncio.Task[_T] | None = None
        self._ended: Future[_T] = Future()
        live.add(self)
        self._ended.add_done_callback(lambda _: live.discard(self))
        group.append(self)

    def begin(self) -> None:
        """Begin with all of the group, unless it has begun."""
        if self in self._group:
            self._loop.call_soon_threadsafe(_begin_all, tuple(self._group))
            self._group.clear()

    def result(self) -> _T:
        """Begin, and wait for the result, or raise the error."""
        self.begin()
        return self._ended.result()

    def abandon(self) -> None:
        """Cancel the computation and wait until it uses none of its rows any more."""
        self._loop.call_soon_threadsafe(self._cancel)
        self._ended.exception()

    def _begin(self) -> None:
        if not self._ended.done():
            self._task = self._loop.create_task(self._work)
            self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._ended.done():
            self._work.close()
            self._ended.set_exception(asyncio.CancelledError())

    def _end(self, task: asyncio.Task[_T]) -> None:
        if task.cancelled():
            self._ended.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(task.result())


def _begin_all(group: Sequence[Computation[Any]]) -> None:
    for computation in group:
        computation._begin()


@dataclass(frozen=True, slots=True)
class MachineSeconds:
    """Virtual seconds of a device's training and of an evaluation, each of one core.

    training_s, step_s: of a training without its steps, and of a step, on a device that states no
    `step_s` of its own
    """

    experiment: Experiment
    training_s: float
    step_s: float
    evaluation_s: float

    def training(self, node: str, *, samples: int, epochs: int) -> float:
        """Return the seconds of a training of a device with so many samples."""
        own = self.experiment.machine(node).step_s
        steps = epochs * self.experiment.steps_in_epoch(samples)
        if own is None:
            return self.training_s + steps * self.step_s
        return steps * own

    def scoring(self, node: str, *, samples: int) -> float:
        """Return the seconds of scoring a model on so many samples: those of as many steps, forward
        alone.
        """
        own = self.experiment.machine(node).step_s
        steps = -(-samples // self.experiment.training.batch_size)
        return FORWARD * steps * (self.step_s if own is None else own)


class RealComputing:
    """The pool and the evaluator of a simulated lab's nodes, which compute what those of a lab of
    processes do.

    A context. `timed`: the machines, on which computations take virtual seconds. `workers`
    trainings run at once, by default as many as `device.pool.pool.Pool` has.
    """

    def __init__(
        self,
        experiment: Experiment,
        timed: SimulatedHardware,
        seconds: MachineSeconds,
        *,
        accelerator: str,
        workers: int | None,
    ) -> None:
        self._experiment = experiment
        self._timed = timed
        self._seconds = seconds
        self._options = {
            "accelerator": accelerator,
            "slots": workers,
            "devices": len(experiment.tree.devices),
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="computing", daemon=True
        )
        self._opened = AsyncExitStack()
        self._live: set[Computation[Any]] = set()
        self._called: list[Computation[Any]] = []  # trainings that have not begun

    def __enter__(self) -> Self:
        """Start the workers, and let all devices prepare. Raises InvalidExperiment if there is no
        such accelerator.
        """
        self._thread.start()
        try:
            made = Pool(**self._options)  # type: ignore[arg-type]
            pool = self._begin(self._opened.enter_async_context(made)).result()
        except BaseException:
            self.__exit__()
            raise
        self._pool = pool
        self._members = {node: pool.member(node) for node in self._experiment.tree.devices}
        self._prepared = {
            node: self._begin(one.prepare(self._experiment)) for node, one in self._members.items()
        }
        return self

    def __exit__(self, *_: object) -> None:
        for computation in tuple(self._live):
            computation.abandon()
        self._begin(self._opened.aclose()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def row_bytes(self) -> int:
        """The bytes of a model in memory, once a device has prepared."""
        return next(iter(self._prepared.values())).result().layout.row_bytes

    def pool(self, node: str) -> Self:
        """Return the pool of a device's process."""
        return self

    def member(self, node: str) -> RealMember:
        """Return a device's access to the pool."""
        timed = SimulatedMember(self._timed.pool(node), node)
        begin = self._begin, self._call
        return RealMember(
            node, self._members[node], timed, self._prepared[node], *begin, self._seconds
        )

    def evaluator(self, experiment: Experiment, folder: Path) -> RealEvaluator:
        """Return the evaluator of a cloud."""
        real = Evaluator(experiment, folder)
        self._opened.callback(real.close)
        return RealEvaluator(
            real, self._begin, partial(self._timed.compute, CLOUD, self._seconds.evaluation_s)
        )

    def _begin(self, work: Coroutine[Any, Any, _T]) -> Computation[_T]:
        computation = Computation(self._loop, work, self._live, [])
        computation.begin()
        return computation

    def _call(self, training: Coroutine[Any, Any, LocalResult]) -> Computation[LocalResult]:
        """Begin a training, unless it may be vmapped with others: they begin when the result of one
        is awaited.
        """
        computation = Computation(self._loop, training, self._live, self._called)
        if not self._pool.trains_together(self._experiment):
            computation.begin()
        return computation


Begin = Callable[[Coroutine[Any, Any, Any]], Computation[Any]]


@dataclass(frozen=True, slots=True)
class RealMember:
    """One device's access to the pool: `real` trains, and occupies its machine as `timed` does."""

    node: str
    real: PoolMember
    timed: SimulatedMember
    prepared: Computation[Prepared]
    begin: Begin
    call: Begin  # a training
    seconds: MachineSeconds

    failure = None  # a training that fails ends at its virtual end
    hardware = SimulatedMember.hardware

    @property
    def moves(self) -> int:
        """A count that grows while any training of the device's process makes progress."""
        return self.timed.moves

    def leave(self) -> None:
        """Do nothing: what was made for the experiment goes with the pool."""

    async def prepare(self, experiment: Experiment, *, frozen: Path | None = None) -> Prepared:
        """Return this device's facts. Raises InvalidExperiment, RunFailed."""
        await asyncio.sleep(BOOT_S)
        if frozen is None:
            return self.prepared.result()
        prepared: Prepared = self.begin(self.real.prepare(experiment, frozen=frozen)).result()
        return prepared

    async def train(self, order: Order) -> LocalResult:
        """Train as ordered, in the virtual seconds of this device's machine. Raises RunFailed."""
        prepared = self.prepared.result()
        seconds = 0.0
        scored_s = 0.0
        if order.epochs:
            seconds = self.seconds.training(
                self.node, samples=prepared.samples, epochs=order.epochs
            )
        models = order.scores + order.scores_trained
        if models:
            # only its evaluation knows how many
            own = not self.seconds.experiment.training.trainer.learns_module
            tests = prepared.tests or (max(1, prepared.samples // 10) if own else 0)
            scored_s = models * self.seconds.scoring(self.node, samples=tests)
        training = self.call(self.real.train(replace(order, progress=lambda done, of: None)))
        try:
            (train_s, scored_s), wait_s = await self.timed.occupy(
                (seconds, scored_s), order.progress
            )
        except BaseException:
            training.abandon()
            raise
        result: LocalResult = training.result()
        work = replace(result.work, train_s=train_s, wait_s=wait_s)
        work = replace(work, costs=UNKNOWN_COSTS)  # those of this host are not the device's
        if work.path is TrainingPath.WORKERS:  # of the same host, as well
            work = replace(work, path=TrainingPath.IN_PROCESS)
        if work.tests is not None:
            work = replace(work, tests=work.tests.lasting(scored_s))
        return replace(result, work=work, wall_s=0.0)


@dataclass(frozen=True, slots=True)
class RealEvaluator:
    """The cloud's evaluator; `compute` occupies the cloud's machine as long as an evaluation
    takes.
    """

    real: Evaluator
    begin: Begin
    compute: Callable[[], Coroutine[Any, Any, None]]

    async def start(self) -> Beginning:
        """Return the first model. Raises RunFailed, InvalidExperiment."""
        beginning: Beginning = self.begin(self.real.start()).result()
        await asyncio.sleep(BOOT_S)
        return beginning

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult | None:
        """Return a model's test score and loss, None if it has none. Raises RunFailed,
        InvalidExperiment.
        """
        evaluating = self.begin(self.real.evaluate(global_round, row))
        try:
            await self.compute()
        except BaseException:
            evaluating.abandon()
            raise
        result: EvaluationResult | None = evaluating.result()
        return result

    def close(self) -> None:
        """Do nothing: the process ends with the context in which it was made."""
