"""Computation in a simulated lab: training and evaluation take random seconds of virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from cloud.evaluator import Beginning, EvaluationResult
from common.experiment.data import samples_most
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.model.layout import Row
from deploy.simulation.machines import Machines
from deploy.simulation.workload import STEPS_MOST, Workload
from device.jobs import LocalResult, Prepared, Progress

PROGRESS_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of virtual time. One epoch takes `train_s` times a random factor from 1 to 1 + `spread`."""

    boot_s: float = 0.3
    train_s: float = 1.0
    spread: float = 0.5
    evaluate_s: float = 0.2

    def training_s(self, node: str, *, epochs: int, drawn: float) -> float:
        """Return a training's seconds; `drawn`: from 0 to 1."""
        return self.train_s * epochs * (1 + self.spread * drawn)


@dataclass(slots=True)
class SimulatedHardware:
    """The machines of a lab: the workload, its durations, and counts of trainings.

    Devices in `hanging` never become ready.
    """

    workload: Workload
    durations: Durations
    seed: int
    machines: Machines | None = None
    trainings: int = 0
    trained: Counter[tuple[str, int]] = field(default_factory=Counter)  # by device and round
    hanging: set[str] = field(default_factory=set)
    _pools: dict[str, SimulatedPool] = field(default_factory=dict)

    def pool(self, node: str) -> SimulatedPool:
        """Return the pool of a device's process; a device without machines has a new one."""
        if self.machines is None:
            return SimulatedPool(self)
        return self._pools.setdefault(self.machines.process(node), SimulatedPool(self))

    async def compute(self, node: str, seconds: float) -> None:
        """Let a node's machine compute for so many seconds of one core."""
        if self.machines is None:
            await asyncio.sleep(seconds)
        else:
            await self.machines.host(node).use(seconds)

    @asynccontextmanager
    async def slot(self, node: str) -> AsyncIterator[float]:
        """Wait for one of the concurrent trainings of a device's process; yield the seconds of the wait."""
        if self.machines is None:
            yield 0.0
            return
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with self.machines.slots(node):
            yield loop.time() - begun


class SimulatedPool:
    """Replacement of `device.pool.pool.Pool` in one process, with any number of concurrent trainings."""

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
        self._samples = 0

    @property
    def moves(self) -> int:
        """A counter that grows while any training of the pool progresses."""
        return self._pool.moves

    def leave(self) -> None:
        """Do nothing: a simulated device keeps nothing."""

    async def prepare(self, experiment: Experiment) -> Prepared:
        """Return this device's layout, samples and partition digest, after `boot_s`."""
        hardware = self._hardware
        if self._node in hardware.hanging:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(hardware.durations.boot_s)
        workload = hardware.workload
        most = samples_most(experiment.data, devices=len(experiment.tree.devices))
        self._samples = min(most, workload.samples(self._node))
        kept_bytes = 4 * workload.layout.parameters * len(experiment.training.objective.keeps)
        return Prepared(workload.layout, self._samples, workload.partition, kept_bytes)

    async def train(self, row: Row, out: Row, *, epochs: int, local_round: int, progress: Progress) -> LocalResult:
        """Train after random seconds, with progress in between."""
        hardware, loop = self._hardware, asyncio.get_running_loop()
        rng = random.Random(f"{hardware.seed} training {self._node} {local_round}")
        seconds = hardware.durations.training_s(self._node, epochs=epochs, drawn=rng.random())
        parts = max(1, min(STEPS_MOST, int(seconds / PROGRESS_S)))
        async with hardware.slot(self._node) as wait_s:
            begun = loop.time()
            for part in range(1, parts + 1):
                await hardware.compute(self._node, seconds / parts)
                self._pool.moves += 1
                progress(part, parts)
            if hardware.machines is not None:
                seconds = loop.time() - begun  # others may have used the cores meanwhile
        hardware.trainings += 1
        hardware.trained[self._node, local_round] += 1
        loss, steps = hardware.workload.train(self._node, row, out, epochs=epochs, local_round=local_round)
        return LocalResult(self._samples, loss, min(steps, epochs * self._samples), train_s=seconds, wait_s=wait_s)


class SimulatedEvaluator:
    """Replacement of `cloud.evaluator.Evaluator`."""

    def __init__(self, hardware: SimulatedHardware) -> None:
        self._hardware = hardware

    async def start(self) -> Beginning:
        """Return the first model."""
        workload = self._hardware.workload
        await asyncio.sleep(3 * self._hardware.durations.boot_s)
        return Beginning(workload.layout, workload.first.copy(), workload.partition)

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult:
        """Return a model's accuracy and loss."""
        await self._hardware.compute(CLOUD, self._hardware.durations.evaluate_s)
        return EvaluationResult(global_round, *self._hardware.workload.evaluate(row))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
