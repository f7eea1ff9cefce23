"""Computation in a simulated lab: training and evaluation take random seconds of virtual time.

What is computed is a trivial workload; `deploy.simulation.simulated_computing` has the real one.
"""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from fedstrata.cloud.cloud_agent import ModelEvaluator
from fedstrata.cloud.evaluator import Beginning, EvaluationResult
from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.model.tensors import Tensors
from fedstrata.common.processes.subprocess_channel import REPLACEMENTS
from fedstrata.common.runtime.world import nothing
from fedstrata.common.settings.data import samples_most
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.training.scores import R2, R2_SUMS, ScoredModels, ScoreSums, packed_sums
from fedstrata.deploy.simulation.simulated_machines import Machines
from fedstrata.device.jobs import LocalResult, Order, Prepared, Progress, TrainingPool
from fedstrata.device.pool.executors import RETRIES

STEPS_MOST: Final = 8
FORWARD: Final = 1 / 3  # of the seconds of a step: the backward pass takes twice as long
NULL_CHANGE: Final = 0.01


class Workload(Protocol):
    """Models, their training and their evaluation; `frozen`: the cloud's frozen arrays, by name."""

    layout: ModelLayout
    first: Row
    partition: str
    frozen: Tensors

    def layout_at(self, node: str, frozen: Path | None) -> ModelLayout:
        """Return the layout of the model that a device builds, from a file of the cloud's frozen
        arrays if given.
        """

    def samples(self, node: str, experiment: Experiment) -> tuple[int, int]:
        """Return the numbers of a device's training and test samples."""

    def kept_bytes(self, experiment: Experiment) -> int:
        """Return the bytes behind a device's models that it keeps from task to task."""

    def train(
        self, node: str, row: Row, out: Row, *, epochs: int, local_round: int
    ) -> tuple[float, int]:
        """Train the flat model `row` into `out`; return the loss and the number of steps."""

    def evaluate(self, row: Row) -> tuple[float, float]:
        """Return accuracy and loss."""


class NullWorkload:
    """Workload that adds small noise, determined by node, round and epochs. It does not need
    torch.
    """

    partition = "simulated"

    def __init__(self, model_bytes: int) -> None:
        self.frozen: Tensors = {}
        columns = max(2, model_bytes // 4)
        split = columns * 3 // 4
        tensors = [
            ("a.weight", (split,), Section.PARAMETER),
            ("b.weight", (columns - split,), Section.PARAMETER),
        ]
        self.layout = ModelLayout.build(tensors)
        self.first = self.layout.empty()
        self.layout.floats(self.first)[:] = np.random.default_rng(1).standard_normal(
            columns, np.float32
        )

    def layout_at(self, node: str, frozen: Path | None) -> ModelLayout:
        """Return the same for all."""
        return self.layout

    def samples(self, node: str, experiment: Experiment) -> tuple[int, int]:
        """Return 50 to 149 samples, depending on the name, of which some may be held out, and 5 to
        14 for testing.
        """
        samples = min(
            50 + zlib.crc32(node.encode()) % 100,
            samples_most(experiment.data, devices=len(experiment.tree.devices)),
        )
        taken = experiment.evaluation.taken_of(samples)
        return samples - taken, taken or max(1, samples // 10)

    def kept_bytes(self, experiment: Experiment) -> int:
        """Return those of the objective's vectors, and of one more for personal arrays."""
        return (
            4
            * self.layout.parameters
            * (len(experiment.training.objective.keeps) + bool(experiment.model.personal))
        )

    def train(
        self, node: str, row: Row, out: Row, *, epochs: int, local_round: int
    ) -> tuple[float, int]:
        """Add noise, float32 [D]. The vectors behind the model change it, and each other, so that
        none may be lost.
        """
        rng = np.random.Generator(np.random.PCG64([zlib.crc32(node.encode()), local_round, epochs]))
        noise = rng.standard_normal(self.layout.columns, np.float32)
        before_VD, after_VD = (
            self.layout.extra_columns(each).reshape(-1, len(noise)) for each in (row, out)
        )
        drift = before_VD.mean(0) if len(before_VD) else np.zeros_like(noise)
        self.layout.floats(out)[:] = self.layout.floats(row) + NULL_CHANGE * (noise + drift)
        for place, after in enumerate(after_VD):
            after[:] = noise * (place + 1) - drift / 2
        return 1.0, epochs * STEPS_MOST

    def evaluate(self, row: Row) -> tuple[float, float]:
        """Return constants."""
        return 0.5, 1.0


PROGRESS_S: Final = 0.5  # as often as a training reports progress
PROGRESS_MOST_S: Final = 5.0  # and no training of many minutes is silent for longer


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of virtual time. One epoch takes `train_s` times a random factor from 1 to 1 +
    `spread`.
    """

    boot_s: float = 0.3
    train_s: float = 1.0
    spread: float = 0.5
    evaluate_s: float = 0.2

    def training_s(self, node: str, *, epochs: int, drawn: float) -> float:
        """Return a training's seconds; `drawn`: from 0 to 1."""
        return self.train_s * epochs * (1 + self.spread * drawn)

    def scoring_s(self, node: str, *, share: float) -> float:
        """Return the seconds of scoring a model on a share of as many samples as an epoch has."""
        return FORWARD * share * self.training_s(node, epochs=1, drawn=0.0)


class Computing(Protocol):
    """What the nodes of a lab compute with."""

    def pool(self, node: str) -> TrainingPool:
        """Return the pool of a device's process."""

    def evaluator(self, experiment: Experiment, folder: Path) -> ModelEvaluator:
        """Return the evaluator of a cloud, of the experiment and the run's folder."""


@dataclass(slots=True)
class SimulatedHardware:
    """The machines of a lab: the workload, its durations, and counts of trainings.

    Devices in `hanging` never become ready. The evaluator's next requests fail with its process:
    `evaluator_ends`. `worker_ends`: the worker processes of a device that are killed while they
    train, this training or the next one.
    """

    workload: Workload
    durations: Durations
    seed: int
    machines: Machines | None = None
    trainings: int = 0
    trained: Counter[tuple[str, int]] = field(default_factory=Counter)  # by device and round
    hanging: set[str] = field(default_factory=set)
    evaluator_ends: int = 0
    worker_ends: Counter[str] = field(default_factory=Counter)
    _pools: dict[str, SimulatedPool] = field(default_factory=dict)

    def pool(self, node: str) -> SimulatedPool:
        """Return the pool of a device's process; a device without machines has a new one."""
        if self.machines is None:
            return SimulatedPool(self)
        return self._pools.setdefault(node, SimulatedPool(self))

    def evaluator(self, experiment: Experiment, folder: Path) -> SimulatedEvaluator:
        """Return the evaluator of a cloud."""
        return SimulatedEvaluator(self, further=len(experiment.score.also))

    async def compute(self, node: str, seconds: float) -> None:
        """Let a node's machine compute for so many seconds of one core."""
        if self.machines is None:
            await asyncio.sleep(seconds)
        else:
            await self.machines.host(node).use(seconds)

    @asynccontextmanager
    async def slot(self, node: str) -> AsyncIterator[float]:
        """Wait for one of the concurrent trainings of a device's process; yield the seconds of the
        wait.
        """
        if self.machines is None:
            yield 0.0
            return
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with self.machines.slots(node):
            yield loop.time() - begun


class SimulatedPool:
    """Replacement of `device.pool.pool.Pool` in one process, with any number of concurrent
    trainings.
    """

    def __init__(self, hardware: SimulatedHardware) -> None:
        self.hardware = hardware
        self.moves = 0

    def member(self, node: str) -> SimulatedMember:
        """Add a device."""
        return SimulatedMember(self, node)


class SimulatedMember:
    """One device's access to the pool."""

    failure = None
    hardware = "simulated"

    def __init__(self, pool: SimulatedPool, node: str) -> None:
        self._pool = pool
        self._hardware = pool.hardware
        self._node = node
        self._samples = self._tests = 0
        self._reads_losses = False
        self._scores: Sequence[str] = ()

    @property
    def moves(self) -> int:
        """A counter that grows while any training of the pool progresses."""
        return self._pool.moves

    def leave(self) -> None:
        """Do nothing: a simulated device keeps nothing."""

    async def prepare(self, experiment: Experiment, *, frozen: Path | None = None) -> Prepared:
        """Return this device's layout, samples and partition digest, after `boot_s`."""
        hardware = self._hardware
        if self._node in hardware.hanging:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(hardware.durations.boot_s)
        workload = hardware.workload
        self._samples, self._tests = workload.samples(self._node, experiment)
        self._scores = experiment.score.names
        self._reads_losses = experiment.tier_above(self._node).aggregation.reads_losses
        kept_bytes = workload.kept_bytes(experiment)
        layout = workload.layout_at(self._node, frozen)
        return Prepared(layout, self._samples, workload.partition, kept_bytes, self._tests)

    async def train(self, order: Order) -> LocalResult:
        """Train after random seconds, with progress in between."""
        hardware = self._hardware
        rng = random.Random(f"{hardware.seed} training {self._node} {order.local_round}")
        seconds = 0.0
        scored_s = 0.0
        if order.epochs:
            seconds = hardware.durations.training_s(
                self._node, epochs=order.epochs, drawn=rng.random()
            )
        models = order.scores + order.scores_trained if self._tests else 0
        if models:
            scored_s = models * hardware.durations.scoring_s(
                self._node, share=self._tests / self._samples
            )
        (train_s, scored_s), wait_s = await self.occupy((seconds, scored_s), order.progress)
        received = self._tested(order.row) if models and order.scores else None
        if not order.epochs:
            found = None if received is None else ScoredModels(received).lasting(scored_s)
            return LocalResult(Work(self._samples, wait_s=wait_s, tests=found))
        hardware.trained[self._node, order.local_round] += 1
        loss, steps = hardware.workload.train(
            self._node, order.row, order.out, epochs=order.epochs, local_round=order.local_round
        )
        steps = min(steps, order.epochs * self._samples)
        trained = self._tested(order.out) if models and order.scores_trained else None
        tests = ScoredModels(received, trained).lasting(scored_s) if models else None
        work = Work(
            self._samples,
            loss,
            order.epochs,
            steps,
            train_s,
            wait_s,
            path=TrainingPath.IN_PROCESS,
            tests=tests,
        )
        start_loss = loss if self._reads_losses else None
        return LocalResult(work, start_loss=start_loss)

    def _tested(self, row: Row) -> ScoreSums:
        """Return sums over the test samples, of which R2 has one target."""
        score, loss = self._hardware.workload.evaluate(row)
        sums = []
        for name in self._scores:
            count = R2_SUMS if name == R2 else 1
            sums += [self._tests * score] * count
        return ScoreSums(self._tests, self._tests * loss, packed_sums(sums))

    async def occupy(
        self, work: tuple[float, float], progress: Progress, *, again: Callable[[], None] = nothing
    ) -> tuple[tuple[float, float], float]:
        """Occupy a slot of the device's process, and a core of its host, with a training and a
        scoring.

        `work`: the seconds of both. Return those that they took, which are more if others use the
        cores, and the seconds of the wait for the slot, and for a worker that was killed. `again`
        is called then, once another one has started. Raises RunFailed if that is killed, too.
        """
        hardware = self._hardware
        loop = asyncio.get_running_loop()
        seconds = sum(work)
        parts = max(
            1, min(STEPS_MOST, int(seconds / PROGRESS_S)), math.ceil(seconds / PROGRESS_MOST_S)
        )
        part = killed = 0
        async with hardware.slot(self._node) as queued_s:
            wait_s = queued_s
            begun = loop.time()
            while part < parts:
                await hardware.compute(self._node, seconds / parts)
                self._pool.moves += 1
                if hardware.worker_ends[self._node]:
                    hardware.worker_ends[self._node] -= 1
                    killed += 1
                    if killed > RETRIES:
                        raise RunFailed(
                            f"the process that trained {self._node} was killed, and so was its "
                            "replacement"
                        )
                    await asyncio.sleep(hardware.durations.boot_s)
                    again()
                    wait_s += loop.time() - begun
                    part = 0
                    begun = loop.time()
                    continue
                part += 1
                progress(part, parts)
            hardware.trainings += bool(work[0] or not work[1])
            took_s = loop.time() - begun if hardware.machines is not None else seconds
        scored_s = took_s * work[1] / seconds if work[1] else 0.0
        # rounding could make it negative, which parents refuse
        train_s = took_s - scored_s if work[0] else 0.0
        return (train_s, scored_s), wait_s


class SimulatedEvaluator:
    """Replacement of `cloud.evaluator.Evaluator`. `further`: how many scores there are beside the
    first one.
    """

    def __init__(self, hardware: SimulatedHardware, *, further: int = 0) -> None:
        self._hardware = hardware
        self._further = further

    async def start(self) -> Beginning:
        """Return the first model."""
        workload = self._hardware.workload
        await asyncio.sleep(3 * self._hardware.durations.boot_s)
        return Beginning(
            workload.layout, workload.first.copy(), workload.partition, frozen=workload.frozen
        )

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult:
        """Return a model's accuracy and loss."""
        hardware = self._hardware
        ended = 0
        await hardware.compute(CLOUD, hardware.durations.evaluate_s)
        while hardware.evaluator_ends:
            hardware.evaluator_ends -= 1
            ended += 1
            if ended > REPLACEMENTS:
                raise RunFailed("the evaluator process was killed, and so were its replacements")
            await asyncio.sleep(3 * hardware.durations.boot_s)
            await hardware.compute(CLOUD, hardware.durations.evaluate_s)
        score, loss = hardware.workload.evaluate(row)
        return EvaluationResult(global_round, score, loss, [score] * self._further)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
