"""What a trainer of the user's own must do before a lab relies on it: repeat, resume, and return what it declares."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import numpy as np

from common.experiment.schema import Experiment
from common.model.layout import Row
from common.model.scores import ScoreSums
from device.jobs import LocalResult, Order
from device.training.arrays import ArrayTraining

ROUNDS = 3


def of(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield each item and its problem, "" for none. Raises InvalidExperiment if the trainer fails."""
    with TemporaryDirectory(prefix="fedstrata-") as home:
        folders = [Path(home) / name for name in ("first", "again", "killed")]
        first = _Device(experiment, folders[0])
        yield "first arrays and samples", ""
        models = [first.round(r) for r in range(ROUNDS)]
        yield f"{ROUNDS} rounds", "" if any(map(_differ, models, [first.start, *models])) else "it changes no array"
        again = _Device(experiment, folders[1])
        same = _problem(models, [again.round(r) for r in range(ROUNDS)])
        yield "the same twice", same and f"{same}; draw random numbers from task.seed, or from global generators"
        if first.evaluates:
            yield "the same score twice", "" if first.score() == again.score() else "its scores of one model differ"
        killed = _Device(experiment, folders[2])
        for r in range(ROUNDS - 1):
            killed.round(r)
        resumed = _Device(experiment, folders[2], model=killed.model)
        same = _problem(models[-1:], [resumed.round(ROUNDS - 1)])
        yield "killed and resumed", same and f"{same}; what it needs to keep belongs into task.state"
        once, more = resumed.result, resumed.again(ROUNDS, epochs=2)
        wrong = "" if more.samples == once.samples else f"it reports {more.samples} samples after {once.samples}"
        yield "the same samples with more epochs", wrong
        few = f"it takes {more.steps} steps in two epochs, and {once.steps} in one"
        yield "more steps with more epochs", "" if more.steps > once.steps else few


class _Device:
    """A device with a trainer, alone: its model goes from task to task. `model`: None for the first one."""

    def __init__(self, experiment: Experiment, folder: Path, model: Row | None = None) -> None:
        self._training = ArrayTraining(experiment, node=experiment.tree.devices[0], accelerator="cpu")
        self._layout = self._training.prepare().layout
        self.start = self._training.first.copy()
        self.model = self.start if model is None else model
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def round(self, r: int) -> Row:
        """Train for a round, and return the model."""
        self.result = self._train(r, epochs=1, folder=self._folder)
        return self.model

    def again(self, r: int, *, epochs: int) -> LocalResult:
        """Train for some epochs, from a copy of the state."""
        with TemporaryDirectory(prefix="fedstrata-") as home:
            copy = Path(home) / "state"
            shutil.copytree(self._folder, copy)
            return self._train(r, epochs=epochs, folder=copy)

    @property
    def evaluates(self) -> bool:
        """Whether it can score models."""
        return self._training.evaluates

    def score(self) -> ScoreSums:
        """Return the sums of the model over its test samples, without the seconds."""
        tests = self._order(ROUNDS, epochs=0, folder=self._folder, scores=True)[0].tests
        assert tests is not None and tests.received is not None
        return replace(tests.received, seconds=0.0)

    def _train(self, r: int, *, epochs: int, folder: Path) -> LocalResult:
        result, self.model = self._order(r, epochs=epochs, folder=folder)
        return result

    def _order(self, r: int, *, epochs: int, folder: Path, scores: bool = False) -> tuple[LocalResult, Row]:
        out = self._layout.empty()
        given = self.model.copy()
        given.flags.writeable = False
        order = Order(given, out, epochs, r, lambda done, of: None, Event(), scores, folder=folder)
        return self._training.train(order), out


def _differ(one: Row, other: Row) -> bool:
    return not np.array_equal(one, other)


def _problem(wanted: Sequence[Row], found: Sequence[Row]) -> str:
    return "its models differ" if any(map(_differ, wanted, found)) else ""
