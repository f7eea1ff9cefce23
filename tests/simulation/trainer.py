"""A trainer of a user's own in drawn labs: real code in virtual time, with a state, numbers, and
scores on devices.

Each task changes the state and the model, each by the other, so a state that is lost, repeated or
of another task gives another model.
"""

from __future__ import annotations

import signal
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedstrata.cloud.evaluator import Beginning, EvaluationResult
from fedstrata.common.accounting.costs import UNKNOWN_COSTS
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.model.layout import Row
from fedstrata.common.processes.subprocess_channel import ProcessEnded
from fedstrata.common.training.array_trainer import (
    Array,
    Arrays,
    ArrayTrainer,
    LocalTask,
    Scored,
    Trained,
    TrainerTester,
    TrainingSite,
)
from fedstrata.deploy.simulation.hardware import (
    SimulatedEvaluator,
    SimulatedHardware,
    SimulatedMember,
)
from fedstrata.device.jobs import LocalResult, Order, Prepared
from fedstrata.device.training.arrays import ArrayTraining

NAME: Final = "tests.simulation.trainer:DrawnTrainer"
STEPS: Final = 8  # of an epoch
STATE: Final = "state.npy"


class DrawnTrainer(ArrayTrainer):
    """Adds noise, and what it remembers, to `columns` numbers. Every third device knows no loss if
    it is `silent`.
    """

    buffers = ("mean",)

    def __init__(self, *, columns: int, silent: bool) -> None:
        self._columns = columns
        self._silent = silent
        self._place = 0

    def initial(self, seed: int) -> Arrays:
        """Return parameters, a buffer and a counter."""
        w = np.random.standard_normal(self._columns).astype(np.float32)
        return {"w": w, "mean": np.zeros((), np.float32), "tasks": np.zeros((), np.int64)}

    def prepare(self, site: TrainingSite) -> int:
        """Return 50 to 149 samples, depending on the name."""
        self._place = site.place
        self.tests = 3 + site.place
        return self.samples_of(site.node)

    @staticmethod
    def samples_of(node: str) -> int:
        """Return the samples that a device prepares; its trainings use others."""
        return 50 + zlib.crc32(node.encode()) % 100

    def train(self, arrays: dict[str, Array], task: LocalTask) -> Trained:
        """Train the arrays and the state."""
        file = task.state / STATE
        kept = np.load(file) if file.exists() else np.zeros(4, np.float32)
        after = kept * np.float32(0.5) + arrays["w"][:4] + np.float32(task.local_round)
        np.save(file, after)
        task.progress(STEPS // 2, STEPS * task.epochs)
        noise = np.random.standard_normal(self._columns).astype(np.float32)
        w = arrays["w"] + np.float32(0.01 * task.epochs) * (noise + after.mean())
        made = {"w": w, "mean": w.mean(), "tasks": arrays["tasks"] + 1}
        loss = None if self._silent and self._place % 3 == 0 else float(np.abs(w).mean())
        numbers = {"kept": float(after.sum())}
        return Trained(
            made, loss, STEPS * task.epochs, samples=50 - self._place % 2, numbers=numbers
        )

    def evaluate(self, arrays: dict[str, Array], task: LocalTask) -> Scored:
        """Return a score of the model and the state."""
        file = task.state / STATE
        kept = float(np.load(file).sum()) if file.exists() else 0.0
        return Scored(3 + self._place, float(np.abs(arrays["w"]).mean()), float(np.tanh(kept) ** 2))


class TrainerComputing:
    """The pools and the evaluator of a lab whose experiment has the trainer: `timed` has their
    virtual seconds.
    """

    def __init__(self, timed: SimulatedHardware) -> None:
        self._timed = timed

    def pool(self, node: str) -> TrainerPool:
        """Return the pool of a device's process."""
        return TrainerPool(self._timed)

    def evaluator(self, experiment: Experiment, folder: Path) -> TrainerEvaluator:
        """Return the evaluator of a cloud."""
        return TrainerEvaluator(
            self._timed.evaluator(experiment, folder), TrainerTester(experiment)
        )


@dataclass(frozen=True, slots=True)
class TrainerPool:
    """The pool of a device's process."""

    timed: SimulatedHardware

    def member(self, node: str) -> TrainerMember:
        """Add a device."""
        return TrainerMember(node, self.timed, self.timed.pool(node).member(node))


class TrainerMember:
    """One device's access to its pool."""

    failure = None
    hardware = SimulatedMember.hardware

    def __init__(self, node: str, hardware: SimulatedHardware, timed: SimulatedMember) -> None:
        self._node = node
        self._hardware = hardware
        self._timed = timed
        self._experiment: Experiment | None = None
        self._training: ArrayTraining | None = None

    @property
    def moves(self) -> int:
        """A counter that grows while any training of the pool progresses."""
        return self._timed.moves

    def leave(self) -> None:
        """Forget the training."""
        self._training = None

    async def prepare(self, experiment: Experiment, *, frozen: Path | None = None) -> Prepared:
        """Return this device's facts, after `boot_s`."""
        await self._timed.prepare(experiment)
        return self._begin(experiment)

    async def train(self, order: Order) -> LocalResult:
        """Train at once, and return the result when the training is over: what ends meanwhile
        leaves its traces.

        A worker that is to be killed is killed in the midst of the training, one that is killed
        meanwhile after it.
        """
        durations, dies = self._hardware.durations, bool(self._hardware.worker_ends[self._node])
        result = self._result(order, dies=dies)

        def again() -> None:
            nonlocal result
            assert self._experiment is not None
            self._begin(self._experiment)
            result = self._result(order)

        seconds = (
            durations.training_s(self._node, epochs=order.epochs, drawn=0.5)
            if order.epochs
            else 0.0
        )
        scored_s = (order.scores + order.scores_trained) * durations.scoring_s(
            self._node, share=0.1
        )
        (train_s, scored_s), wait_s = await self._timed.occupy(
            (seconds, scored_s), order.progress, again=again
        )
        assert result is not None
        work = replace(result.work, train_s=train_s, wait_s=wait_s, costs=UNKNOWN_COSTS)
        if work.tests is not None:
            work = replace(work, tests=work.tests.lasting(scored_s))
        if order.epochs:
            self._hardware.trained[self._node, order.local_round] += 1
        return replace(result, work=work)

    def _begin(self, experiment: Experiment) -> Prepared:
        """Prepare in a new process."""
        self._experiment = experiment
        self._training = ArrayTraining(experiment, node=self._node, accelerator="cpu")
        return self._training.prepare()

    def _result(self, order: Order, *, dies: bool = False) -> LocalResult | None:
        """Train, and return the result, None if the process dies with the trainer's first report."""
        assert self._training is not None

        def progress(done: int, of: int) -> None:
            if dies:
                raise ProcessEnded("the trainer's process", -signal.SIGKILL)

        with suppress(ProcessEnded):
            return self._training.train(replace(order, progress=progress))
        return None


@dataclass(frozen=True, slots=True)
class TrainerEvaluator:
    """The cloud's evaluator; `timed` has its virtual seconds, and the ends of its process."""

    timed: SimulatedEvaluator
    tester: TrainerTester

    async def start(self) -> Beginning:
        """Return the first model."""
        await self.timed.start()
        return Beginning(
            self.tester.layout, self.tester.first.copy(), "", evaluates=self.tester.evaluates
        )

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult:
        """Return a model's score and loss."""
        await self.timed.evaluate(global_round, row)
        found = self.tester.evaluate(row, global_round)
        assert found is not None
        return EvaluationResult(global_round, found.score, found.loss)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def settings(columns: int, *, silent: bool) -> dict[str, Any]:
    """Return the table `training.trainer`."""
    return {"name": NAME, "columns": columns, "silent": silent}
