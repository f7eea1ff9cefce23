"""Computation in a simulated lab: training and evaluation take random seconds of virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from cloud.evaluator import Beginning, EvaluationResult
from common.experiment.data import samples_most
from common.experiment.schema import Experiment
from common.model.layout import Row
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


@dataclass(slots=True)
class SimulatedHardware:
    """The machines of a lab: the workload, its durations, and counts of trainings.

    Devices in `hanging` never become ready.
    """

    workload: Workload
    durations: Durations
    seed: int
    trainings: int = 0
    trained: Counter[tuple[str, int]] = field(default_factory=Counter)  # by device and round
    hanging: set[str] = field(default_factory=set)


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
        hardware, durations = self._hardware, self._hardware.durations
        rng = random.Random(f"{hardware.seed} training {self._node} {local_round}")
        seconds = durations.train_s * epochs * (1 + durations.spread * rng.random())
        parts = max(1, min(STEPS_MOST, int(seconds / PROGRESS_S)))
        for part in range(1, parts + 1):
            await asyncio.sleep(seconds / parts)
            self._pool.moves += 1
            progress(part, parts)
        hardware.trainings += 1
        hardware.trained[self._node, local_round] += 1
        loss, steps = hardware.workload.train(self._node, row, out, epochs=epochs, local_round=local_round)
        return LocalResult(self._samples, loss, min(steps, epochs * self._samples), train_s=seconds, wait_s=0.0)


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
        await asyncio.sleep(self._hardware.durations.evaluate_s)
        return EvaluationResult(global_round, *self._hardware.workload.evaluate(row))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
