"""The cloud agent's interface to the evaluator process: the initial model, and the scores of later models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from common.experiment.schema import Experiment
from common.host.offload import offload
from common.host.subprocess_channel import SubprocessChannel
from common.model.layout import ModelLayout, Row


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Score and loss of a model on the test set; the experiment names the score, accuracy by default."""

    global_round: int
    score: float
    loss: float


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Initial model of a run, uint8 [row_bytes], digest of the data split, and where models are evaluated.

    `notes`: what the user should know of the data, a line each.
    """

    layout: ModelLayout
    row: Row
    partition: str
    accelerator: str = "cpu"
    notes: Sequence[str] = ()


class Evaluator:
    """One evaluator process that serves one request at a time. It writes the data split into the run's folder."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment = experiment
        self._folder = folder
        self._channel: SubprocessChannel | None = None

    async def start(self) -> Beginning:
        """Start the process and return the initial model. Raises RunFailed, InvalidExperiment."""
        channel = self._channel = await SubprocessChannel.start("cloud.evaluator_process", "the evaluator process")
        reply = await channel.request(experiment=self._experiment.to_json(), folder=str(self._folder))
        layout = ModelLayout.from_json(reply["layout"])
        (shared,) = channel.memory.rows(1, layout.row_bytes)
        row = await offload(shared.copy)
        return Beginning(layout, row, reply["partition"], reply["accelerator"], reply["notes"])

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult:
        """Return a model's test score and loss; `row` must not change meanwhile.

        Raises RunFailed, and InvalidExperiment for own code that fails.
        """
        if self._channel is None:
            raise RuntimeError("call Evaluator.start first")
        (shared,) = self._channel.memory.rows(1, row.nbytes)
        await offload(partial(np.copyto, shared, row))
        reply = await self._channel.request()
        return EvaluationResult(global_round, reply["score"], reply["loss"])

    def close(self) -> None:
        """End the process."""
        if self._channel is not None:
            self._channel.close()
