"""A trainer of the user's own: named numpy arrays in and out, with any library or none.

The cloud calls `initial` and `evaluate`, a device `initial`, `prepare`, `train` and `evaluate`; a node needs only the
libraries that these import. The arrays of `initial` are the model: float32 arrays are its parameters, those named in
`buffers` its float32 buffers, and int64 arrays its counters, as in `ModelLayout`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Never, TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import RefusedModel
from common.experiment import own
from common.experiment.schema import Experiment
from common.experiment.tables import named_in_module
from common.experiment.topology import CLOUD
from common.experiment.trainers import OwnTrainer, TrainerTable
from common.model import tensors
from common.model.layout import NAME_MOST, ModelLayout, Row, Section
from common.model.parts import read_initial
from common.randomness import Purpose, torch_seed

Array: TypeAlias = "npt.NDArray[Any]"
Arrays: TypeAlias = Mapping[str, Array]
BUILT: Final[Mapping[str, str]] = {"flower": "common.model.flower:ClientTrainer"}
NUMBERS_MOST: Final = 32  # of a result
NUMBER_NAME_MOST: Final = 64  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSite:
    """The device that trains: its name, its place among the `places` devices of the lab, and its data folder.

    `seed`: of the run. `epochs`, `settings`: of its first local round, as in `LocalTask`. `accelerator`: where it
    should compute, `cpu` or for instance `cuda:0`.
    """

    node: str
    place: int
    places: int
    data: Path
    seed: int
    epochs: int
    settings: Mapping[str, float]
    accelerator: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTask:
    """One local round of a device, or an evaluation.

    `seed`: of this local round; the generators of Python, numpy and, if it is imported, PyTorch are seeded with it
    already. `global_round`, `local_round`: from 1, the latter over the whole run. `settings`: the numbers of the table
    `training`, and those of `training.by_round` in this global round. `deadline_s`: after which the round may close
    without this device, None: it waits. `state`: a folder with what the device's last task left there, empty before the
    first one; it persists if the device is killed. `progress(done, of)` may be called between steps; it raises an error
    if the result is not wanted any more.

    A device evaluates the model that it receives, before it trains; `global_round` is then the one that made the model,
    and the rest as in the training that follows. At the cloud `node` is `cloud`, and there are no local rounds,
    settings or state.
    """

    node: str
    data: Path
    seed: int
    epochs: int
    global_round: int
    local_round: int
    settings: Mapping[str, float]
    deadline_s: float | None
    state: Path
    progress: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of `train`: all arrays of the model, the mean loss of the last epoch, and the steps taken.

    `loss`: None if it is not known. `samples`: that were trained on, None: all of the device. `numbers`: of the
    trainer's choice, for the run's events.
    """

    arrays: Arrays
    loss: float | None
    steps: int
    samples: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


class Scored(NamedTuple):
    """The result of `evaluate`: the number of samples, their mean loss, and the score that the experiment names."""

    samples: int
    loss: float
    score: float

    @property
    def more(self) -> tuple[float, ...]:
        """The further scores: none."""
        return ()


class ArrayTrainer:
    """Base of a user's trainer; its constructor gets the keywords of `training.trainer`."""

    buffers: ClassVar[Collection[str]] = ()  # the names of the float32 arrays that are not trained

    def load(self, method: str) -> None:
        """Import what a method needs and the file does not import at its head, before the generators are seeded."""

    def initial(self, seed: int) -> Arrays:
        """Return the first arrays of a run, float32 or int64, which depend on the seed alone."""
        raise NotImplementedError

    def prepare(self, site: TrainingSite) -> int:
        """Load this device's samples, once before its tasks, and return their number, at least 1."""
        raise NotImplementedError

    def train(self, arrays: dict[str, Array], task: LocalTask) -> Trained:
        """Train the arrays, which are this call's own, as the task requires."""
        raise NotImplementedError

    def evaluate(self, arrays: dict[str, Array], task: LocalTask) -> Scored | tuple[int, float, float]:
        """Return a number of test samples, their mean loss and the score. Without it nothing is evaluated.

        Of a device the samples are its own, at the cloud those of the cloud; sums over devices weigh by them.
        """
        raise NotImplementedError

    @property
    def evaluates(self) -> bool:
        """Whether this node, once prepared if it is a device, can evaluate models."""
        return type(self).evaluate is not ArrayTrainer.evaluate


class TrainerCode:
    """An experiment's trainer, whose errors, of the user's code and of what it returns, are InvalidExperiment."""

    def __init__(self, experiment: Experiment) -> None:
        """Import and build it. Raises InvalidExperiment."""
        settings: TrainerTable = experiment.training.trainer
        self._names = dict(settings.code)
        self.key, self.name = next(iter(self._names.items()))
        if isinstance(settings, OwnTrainer):
            self._trainer = own.build(self.key, settings, ArrayTrainer)
        else:
            self._trainer = named_in_module(BUILT[settings.name])(experiment)

    @property
    def evaluates(self) -> bool:
        """Whether this node can evaluate models."""
        with self._guarded():
            return bool(self._trainer.evaluates)

    def first(self, seed: int) -> tuple[ModelLayout, Row]:
        """Return the layout of the arrays, and the first model, uint8 [row_bytes]. Raises InvalidExperiment."""
        with self._guarded():
            self._trainer.load("initial")
            seed_generators(torch_seed(seed, Purpose.INIT))
            arrays = self._trainer.initial(seed)
        found = self._named(arrays, "initial")
        buffers = set(self._trainer.buffers)
        if unknown := sorted(buffers - found.keys()):
            self.refuse(f"initial returns no {', '.join(unknown)}, which its buffers name", "Return them.")
        sections = {name: _section(value, name in buffers) for name, value in found.items()}
        if Section.PARAMETER not in sections.values():
            self.refuse("initial returns no float32 array that is trained", "Return the parameters.")
        layout = ModelLayout.build((name, found[name].shape, section) for name, section in sections.items())
        row = layout.empty()
        self._write(layout, found, row, "initial")
        return layout, row

    def prepare(self, site: TrainingSite) -> int:
        """Let the device load its samples; return their number. Raises InvalidExperiment."""
        with self._guarded():
            self._trainer.load("prepare")
            seed_generators(torch_seed(site.seed, Purpose.OWN_CODE, site.node))
            samples = self._trainer.prepare(site)
        return self._count(samples, "prepare returns samples =", least=1)

    def train(self, layout: ModelLayout, row: Row, out: Row, task: LocalTask, *, samples: int) -> Trained:
        """Train the model in `row` and write it into `out`; both uint8 [row_bytes], or longer.

        `samples`: of the device. Return what else `train` returned. Raises InvalidExperiment, and what the progress
        callback raises.
        """
        with self._guarded():
            self._trainer.load("train")
            seed_generators(task.seed)
            found = self._trainer.train(_arrays(layout, row), task)
        if not isinstance(found, Trained):
            self.refuse(f"train returns {type(found).__name__}, not Trained", "Return Trained(arrays, loss, steps).")
        self._write(layout, self._named(found.arrays, "train"), out, "train")
        used = samples if found.samples is None else self._count(found.samples, "train returns samples =", least=1)
        if used > samples:
            self.refuse(f"train returns samples = {used}, and the device has {samples}", "Return the device's own.")
        steps = self._count(found.steps, "train returns steps =", least=1 if task.epochs else 0)
        if task.epochs and steps > task.epochs * samples:
            problem = f"train returns steps = {steps}, more than {task.epochs} epochs of {samples} samples can have"
            self.refuse(problem, "Count a step for each batch.")
        loss = None if found.loss is None else self._number(found.loss, "train returns loss =")
        return Trained({}, loss, steps, used, self._numbers(found.numbers))

    def evaluate(self, layout: ModelLayout, row: Row, task: LocalTask) -> Scored:
        """Return the samples, loss and score of a model, uint8 [row_bytes].

        Raises InvalidExperiment, and what the progress callback raises.
        """
        with self._guarded():
            self._trainer.load("evaluate")
            seed_generators(task.seed)
            found = self._trainer.evaluate(_arrays(layout, row), task)
        if not isinstance(found, tuple) or len(found) != len(Scored._fields):
            self.refuse(f"evaluate returns {found!r:.60}", "Return samples, loss and score.")
        samples, loss, score = found
        count = self._count(samples, "evaluate returns samples =", least=1)
        if not all(isinstance(each, float | int | np.number) for each in (loss, score)):
            self.refuse(f"evaluate returns loss = {loss!r:.40}, score = {score!r:.40}", "Return two floats.")
        return Scored(count, float(loss), float(score))  # a diverged model has a loss of NaN

    def refuse(self, problem: str, remedy: str) -> Never:
        """Raise InvalidExperiment for what the trainer returned."""
        own.refuse(self.key, self.name, problem, remedy)

    def _guarded(self) -> Any:
        return own.guarded(self._names, everything=True)

    def _named(self, arrays: object, method: str) -> dict[str, Array]:
        if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
            self.refuse(f"{method} returns arrays as {type(arrays).__name__}", "Return a dict of arrays by name.")
        found = {name: np.asarray(value) for name, value in arrays.items()}
        for name, value in found.items():
            if not 0 < len(name) <= NAME_MOST or not name.isprintable():
                self.refuse(f"{method} returns an array with the name {name!r:.40}", "Use a short printable name.")
            if value.dtype not in (np.float32, np.int64):
                remedy = "Return float32, or int64 for counters: `array.astype(np.float32)`."
                self.refuse(f"{method} returns {name} as {value.dtype}", remedy)
        return found

    def _write(self, layout: ModelLayout, found: Mapping[str, Array], out: Row, method: str) -> None:
        views = layout.views(out[: layout.row_bytes])
        if absent := [name for name in views if name not in found]:
            self.refuse(f"{method} returns no {', '.join(absent[:3])}", "Return each array that `initial` returns.")
        if unknown := [name for name in found if name not in views]:
            self.refuse(f"{method} returns {', '.join(unknown[:3])}, which `initial` does not", "Keep it in its state.")
        for name, view in views.items():
            value = found[name]
            if (value.shape, value.dtype) != (view.shape, view.dtype):
                given = f"{method} returns {name} as {value.dtype} {[*value.shape]}"
                self.refuse(f"{given}, not {view.dtype} {[*view.shape]}", "Return arrays as those of `initial`.")
        layout.flatten(found, out[: layout.row_bytes])
        try:
            layout.check_finite(out[: layout.row_bytes])
        except RefusedModel as error:
            self.refuse(f"{method} returns a model whose {error}", "Check the learning rate, and what it divides by.")

    def _count(self, value: object, what: str, *, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            self.refuse(f"{what} {value!r:.40}", f"Return an int of {least} or more.")
        return int(value)

    def _number(self, value: object, what: str) -> float:
        if not isinstance(value, float | int | np.number) or not isfinite(number := float(value)):
            self.refuse(f"{what} {value!r:.40}", "Return a finite float.")
        return number

    def _numbers(self, found: object) -> dict[str, float]:
        named = isinstance(found, Mapping) and all(
            isinstance(name, str) and 0 < len(name) <= NUMBER_NAME_MOST and name.isprintable() for name in found
        )
        if not isinstance(found, Mapping) or not named or len(found) > NUMBERS_MOST:
            remedy = f"Return a dict of at most {NUMBERS_MOST} floats, with names of {NUMBER_NAME_MOST} characters."
            self.refuse(f"train returns numbers = {found!r:.60}", remedy)
        return {name: self._number(value, f"train returns numbers[{name!r}] =") for name, value in found.items()}


class TrainerTester:
    """An experiment's first model and its scores by the trainer of a user, as `ModelTester` has them of a module.

    `initial`: the digest of the file of `model.initial`. `evaluates`: whether the cloud evaluates, and the trainer can.
    Raises InvalidExperiment.
    """

    notes = ()
    frozen: ClassVar[Arrays] = MappingProxyType({})

    def __init__(self, experiment: Experiment) -> None:
        self._code = TrainerCode(experiment)
        self._data = Path(experiment.data.root.replace("{node}", CLOUD))
        self._seed = torch_seed(experiment.seed, Purpose.OWN_CODE)
        self.layout, self.first = self._code.first(experiment.seed)
        self.initial = ""
        if (initial := experiment.model.initial) is not None:
            found = read_initial(initial, self.layout, self.first, model=self._code.name)
            self.initial = tensors.content(found, {})
        self.evaluates = experiment.evaluation.on_cloud and self._code.evaluates
        if experiment.evaluation.at == "both" and not self.evaluates:
            remedy = 'Write an evaluate, or set evaluation.at = "devices".'
            self._code.refuse("the cloud cannot evaluate with it", remedy)

    def evaluate(self, row: Row, global_round: int = 0) -> Scored:
        """Return the score and the loss of a flat model of a global round, uint8 [row_bytes].

        Raises InvalidExperiment.
        """
        with TemporaryDirectory(prefix="fedstrata-") as state:
            task = LocalTask(
                node=CLOUD,
                data=self._data,
                seed=self._seed,
                epochs=0,
                global_round=global_round,
                local_round=0,
                settings={},
                deadline_s=None,
                state=Path(state),
                progress=lambda done, of: None,
            )
            return self._code.evaluate(self.layout, row, task)


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy and, if it is imported, PyTorch, which then computes on one core.

    Sums must not depend on the number of cores.
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)


def _arrays(layout: ModelLayout, row: Row) -> dict[str, Array]:
    """Return copies of the arrays of a flat model, in the order of `initial` within each kind."""
    return {name: view.copy() for name, view in layout.views(row[: layout.row_bytes]).items()}


def _section(value: Array, buffer: bool) -> Section:
    if value.dtype == np.int64:
        return Section.COUNTER
    return Section.BUFFER if buffer else Section.PARAMETER
