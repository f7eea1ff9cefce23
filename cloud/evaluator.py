"""The cloud agent's interface to the evaluator process: the initial model, and the scores of later
models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedstrata.cloud import checkpoint
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.offload import offload
from fedstrata.common.model import tensors
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.processes.shared_rows import place_of
from fedstrata.common.processes.subprocess_channel import (
    Record,
    ReplaceableProcess,
    SubprocessChannel,
)
from fedstrata.common.settings.training import ACCURACY, Score

MODULE: Final = "fedstrata.cloud.evaluator_process"


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Score and loss of a model on the test set; the experiment names the score, accuracy by
    default.

    `more`: the further scores of `score.also`; `attacks`: the success of each attack that has tests
    of its own.
    """

    global_round: int
    score: float
    loss: float
    more: Sequence[float] = ()
    attacks: Sequence[float] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Initial model of a run, uint8 [row_bytes], digest of the data split, and where models are
    evaluated.

    `notes`: what the user should know of the data, a line each. `initial`: the digest of the file
    of `model.initial`. `evaluates`: models can be evaluated at the cloud; a trainer of the user's
    own may not be able to.
    `frozen`: the model's frozen arrays, by name.
    """

    layout: ModelLayout
    row: Row
    partition: str
    accelerator: str = "cpu"
    notes: Sequence[str] = ()
    initial: str = ""
    evaluates: bool = True
    frozen: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


def needs_process(experiment: Experiment) -> bool:
    """Return whether the cloud needs PyTorch and the data set, and so an evaluator process: to
    evaluate or to begin.
    """
    begins = experiment.model.initial is None or experiment.tiers[0].aggregation.refines
    return begins or experiment.evaluation.on_cloud


class InitialModel:
    """The model of `model.initial`, for a cloud that needs neither PyTorch nor the data set.

    The digests of the devices' splits are not compared with any.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    async def start(self) -> Beginning:
        """Return the initial model. Raises InvalidExperiment."""
        load = partial(checkpoint.load_initial, self._experiment.model)
        layout, row, digest, frozen = await offload(load)
        return Beginning(layout, row, "", "", initial=digest, frozen=frozen)

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult:
        """Raise RuntimeError: devices score models."""
        raise RuntimeError("the cloud does not evaluate")

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class Evaluator:
    """One evaluator process that serves one request at a time. It writes the data split into the
    run's folder.

    It is replaced if it is killed or makes no progress: an evaluation depends on the model alone.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment = experiment
        self._folder = folder
        self._begun: Record = {}
        self._process = ReplaceableProcess(
            MODULE, "the evaluator process", idle_s=experiment.transfer.idle_s, begin=self._begin
        )

    async def start(self) -> Beginning:
        """Start the process and return the initial model. Raises RunFailed, InvalidExperiment."""

        async def first(channel: SubprocessChannel) -> Beginning:
            begun = dict(self._begun)
            layout = ModelLayout.from_json(begun.pop("layout"))
            frozen_bytes = begun.pop("frozen_bytes")
            (shared,) = channel.memory.rows(1, layout.row_bytes + frozen_bytes)
            row = await offload(shared[: layout.row_bytes].copy)
            frozen = tensors.parse(shared[layout.row_bytes :].tobytes()) if frozen_bytes else {}
            channel.memory.free()
            return Beginning(layout, row, **begun, frozen=frozen)

        return await self._process.do(first)

    async def evaluate(self, global_round: int, row: Row) -> EvaluationResult | None:
        """Return a model's test score and loss, None if own code has none now; `row` must not
        change meanwhile.

        Raises RunFailed, and InvalidExperiment for own code that fails.
        """

        async def evaluated(channel: SubprocessChannel) -> EvaluationResult | None:
            place = place_of(row)
            if place is None:
                (shared,) = channel.memory.rows(1, row.nbytes)
                await offload(partial(np.copyto, shared, row))
            reply = await channel.request(global_round=global_round, place=place)
            if "score" not in reply:
                return None
            return EvaluationResult(
                global_round, reply["score"], reply["loss"], reply["more"], reply["attacks"]
            )

        return await self._process.do(evaluated)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    async def _begin(self, channel: SubprocessChannel) -> None:
        self._begun = await channel.request(
            experiment=self._experiment.to_json(), folder=str(self._folder)
        )


def evaluated(score: Score, result: EvaluationResult | None) -> dict[str, float | None]:
    """Return the facts about a model, with its further scores: `accuracy` is None unless that is
    the first score.
    """
    if result is None:
        return {"accuracy": None, "score": None, "loss": None}
    first = {
        "accuracy": result.score if score.name == ACCURACY else None,
        "score": result.score,
        "loss": result.loss,
    }
    return first | dict(zip(score.columns.values(), result.more, strict=False))
