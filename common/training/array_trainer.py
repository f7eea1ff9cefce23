"""A trainer of the user's own: named numpy arrays in and out, with any library or none.

The cloud calls `initial` and `evaluate`, a device `initial`, `prepare`, `train` and `evaluate`; a
node needs only the libraries that these import. The arrays of `initial` are the model: float32
arrays are its parameters, those named in `buffers` its float32 buffers, and int64 arrays its
counters, as in `ModelLayout`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Never, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstrata.common.errors import RefusedModel
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.surroundings import OwnSurroundings
from fedstrata.common.model.layout import NAME_MOST, ModelLayout, Row, Section
from fedstrata.common.model.warm_start import read_initial
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings import own
from fedstrata.common.settings.tables import named_in_module
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.settings.trainers import TRAINER_KEY, OwnTrainer, TrainerTable
from fedstrata.common.training.returned import count, exchanged, form, number, numbers

Array: TypeAlias = "npt.NDArray[Any]"
Arrays: TypeAlias = Mapping[str, Array]
# the class of a trainer of fedstrata's, by the key that names its code first
BUILT: Final[Mapping[str, str]] = {
    f"{TRAINER_KEY}.client_fn": "fedstrata.common.training.flower:ClientTrainer",
    f"{TRAINER_KEY}.clientapp": "fedstrata.common.training.flower_app:AppTrainer",
}
NOTES_MOST: Final = 4  # of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSite:
    """The device that trains: its name, its place among the `places` devices of the lab, and its
    data folder.

    `seed`: of the run. `epochs`, `settings`: of its first local round, as in `LocalTask`.
    `accelerator`: where it should compute, `cpu` or for instance `cuda:0`.
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

    `seed`: of this local round; the generators of Python, numpy and, if it is imported, PyTorch are
    seeded with it already. `global_round`, `local_round`: from 1, the latter over the whole run.
    `settings`: the numbers of the table `training`, and those of `training.by_round` in this global
    round. `deadline_s`: after which the round may close without this device, None: it waits.
    `state`: a folder with what the device's last task left there, empty before the first one; it
    persists if the device is killed. `progress(done, of)` may be called between steps; it raises an
    error if the result is not wanted any more.

    A device evaluates the model that it receives, before it trains; `global_round` is then the one
    that made the model, and the rest as in the training that follows. At the cloud `node` is
    `cloud`, and there are no local rounds, settings or state.
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
    """The result of `train`: all arrays of the model, the mean loss of the last epoch, and the
    steps taken.

    `loss`: None if it is not known. `samples`: that were trained on, None: all of the device.
    `numbers`: of the trainer's choice, for the run's events; what is no finite number is left out,
    with one warning. `notes` are fedstrata's: what its user should know.
    """

    arrays: Arrays
    loss: float | None
    steps: int
    samples: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()


class Scored(NamedTuple):
    """The result of `evaluate`: the number of samples, their mean loss, and the score that the
    experiment names.
    """

    samples: int
    loss: float
    score: float

    @property
    def more(self) -> tuple[float, ...]:
        """The further scores: none."""
        return ()

    @property
    def attacks(self) -> tuple[float, ...]:
        """The success of attacks on labels, which it does not have: none."""
        return ()


class ArrayTrainer:
    """Base of a user's trainer; its constructor gets the keywords of `training.trainer`."""

    buffers: ClassVar[Collection[str]] = ()  # the names of the float32 arrays that are not trained
    # set in `prepare`: of this device's test samples, at most; a score over more is left out. 0:
    # not known
    tests = 0

    def load(self, method: str) -> None:
        """Import what a method needs and the file does not import at its head, before the
        generators are seeded.
        """

    def initial(self, seed: int) -> Arrays:
        """Return the first arrays of a run, float32 or int64, which depend on the seed alone."""
        raise NotImplementedError

    def prepare(self, site: TrainingSite) -> int:
        """Load this device's samples, once before its tasks, and return their number; with 0 it
        gets no tasks.
        """
        raise NotImplementedError

    def train(self, arrays: dict[str, Array], task: LocalTask) -> Trained:
        """Train the arrays, which are this call's own, as the task requires."""
        raise NotImplementedError

    def evaluate(
        self, arrays: dict[str, Array], task: LocalTask
    ) -> Scored | tuple[int, float, float] | None:
        """Return a number of test samples, their mean loss and the score; None: no score of this
        model.

        Without this method nothing is evaluated. Of a device the samples are its own, at the cloud
        those of the cloud; sums over devices weigh by them.
        """
        raise NotImplementedError

    def place(self, method: str) -> tuple[str, str, str]:
        """Return the key of the own code that does what a method does, its name, and how a message
        names it.
        """
        return "", "", method

    def array_name(self, name: str) -> str:
        """Return how a message names an array."""
        return name

    @property
    def evaluates(self) -> bool:
        """Whether this node, once prepared if it is a device, can evaluate models."""
        return type(self).evaluate is not ArrayTrainer.evaluate


class TrainerCode:
    """An experiment's trainer, whose errors, of the user's code and of what it returns, are
    InvalidExperiment.

    Arrays are exchanged as float32 or int64; the trainer gets them in the types in which it
    returned the first ones.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Import and build it. Raises InvalidExperiment."""
        settings: TrainerTable = experiment.training.trainer
        self._names = dict(settings.code)
        self.key, self.name = next(iter(self._names.items()))
        self._trainer: ArrayTrainer
        self._types: dict[str, np.dtype[Any]] = {}
        self._noted: dict[str, bool] = {}  # what its user should know, and whether it was returned
        self._node = ""
        self._surroundings = OwnSurroundings()
        with self._surroundings.entered():
            if isinstance(settings, OwnTrainer):
                self._trainer = own.build(self.key, settings, ArrayTrainer)
            else:
                self._trainer = named_in_module(BUILT[self.key])(experiment)

    @property
    def evaluates(self) -> bool:
        """Whether this node can evaluate models."""
        with self._guarded():
            return bool(self._trainer.evaluates)

    def notes(self) -> list[str]:
        """Return what the trainer's user should know, each once."""
        new = [note for note, returned in self._noted.items() if not returned][:NOTES_MOST]
        self._noted |= dict.fromkeys(new, True)
        return new

    def first(self, seed: int) -> tuple[ModelLayout, Row]:
        """Return the layout of the arrays, and the first model, uint8 [row_bytes]. Raises
        InvalidExperiment.
        """
        with self._guarded():
            self._trainer.load("initial")
            seed_generators(torch_seed(seed, Purpose.INIT))
            found = self._arrays_in(self._trainer.initial(seed), "initial")
        self._types = {name: value.dtype for name, value in found.items()}
        buffers = set(self._trainer.buffers)
        if unknown := sorted(buffers - found.keys()):
            self.refuse_of(
                "initial",
                f"returns no {', '.join(unknown)}, which its buffers name",
                "Return them.",
            )
        sections = {name: _section(value, name in buffers) for name, value in found.items()}
        if Section.PARAMETER not in sections.values():
            self.refuse_of(
                "initial", "returns no array of floats that is trained", "Return the parameters."
            )
        layout = ModelLayout.build(
            (name, found[name].shape, section) for name, section in sections.items()
        )
        row = layout.empty()
        self._write(layout, found, row, "initial")
        return layout, row

    def prepare(self, site: TrainingSite) -> int:
        """Let the device load its samples; return their number. Raises InvalidExperiment."""
        self._node = site.node
        with self._guarded():
            self._trainer.load("prepare")
            seed_generators(torch_seed(site.seed, Purpose.OWN_CODE, site.node))
            samples = self._trainer.prepare(site)
        return self._count(samples, "prepare", "returns samples =", least=0)

    @property
    def tests(self) -> int:
        """The number of this device's test samples, once prepared; 0: not known. Raises
        InvalidExperiment.
        """
        return self._count(self._trainer.tests, "prepare", "sets tests =", least=0)

    def train(
        self, layout: ModelLayout, row: Row, out: Row, task: LocalTask, *, samples: int
    ) -> Trained:
        """Train the model in `row` and write it into `out`; both uint8 [row_bytes], or longer.

        `samples`: of the device. Return what else `train` returned. Raises InvalidExperiment, and
        what the progress callback raises.
        """
        with self._guarded():
            self._trainer.load("train")
            seed_generators(task.seed)
            found = self._trainer.train(self._arrays(layout, row), task)
        if not isinstance(found, Trained):
            remedy = "Return Trained(arrays, loss, steps)."
            self.refuse_of("train", f"returns {form(found)}, not Trained", remedy)
        with self._guarded():
            arrays = self._arrays_in(found.arrays, "train")
        self._write(layout, arrays, out, "train")
        used = samples
        if found.samples is not None:
            used = self._count(found.samples, "train", "returns samples =", least=0)
        least = int(task.epochs > 0 and used > 0)
        steps = self._count(found.steps, "train", "returns steps =", least=least)
        most = task.epochs * max(samples, used)
        if task.epochs and steps > most:
            epochs = f"the {most} of {task.epochs} epochs of single samples"
            problem = f"returns steps = {steps}, more than {epochs}"
            self.refuse_of("train", problem, "Count a step for each batch.")
        loss = number(found.loss)
        if found.loss is not None and (loss is None or not isfinite(loss)):
            self._note("train", f"returns loss = {form(found.loss)}: it counts as unknown")
            loss = None
        kept, left_out = numbers(found.numbers)
        if left_out:
            more = f", and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            self._note("train", f"returns numbers that are not kept: {left_out[0]}{more}")
        return Trained({}, loss, steps, used, kept, self.notes())

    def evaluate(self, layout: ModelLayout, row: Row, task: LocalTask) -> Scored | None:
        """Return the samples, loss and score of a model, uint8 [row_bytes]; None if it has none
        now.

        Raises InvalidExperiment, and what the progress callback raises.
        """
        with self._guarded():
            self._trainer.load("evaluate")
            seed_generators(task.seed)
            found = self._trainer.evaluate(self._arrays(layout, row), task)
        if found is None:
            return None
        if not isinstance(found, tuple) or len(found) != len(Scored._fields):
            self.refuse_of("evaluate", f"returns {form(found)}", "Return samples, loss and score.")
        samples, *values = found
        tested = self._count(samples, "evaluate", "returns samples =", least=0)
        loss, score = map(number, values)
        if loss is None or score is None:
            problem = f"returns loss = {form(values[0])}, score = {form(values[1])}"
            self.refuse_of("evaluate", problem, "Return two floats.")
        # a diverged model has a loss of NaN
        if tested:
            return Scored(tested, loss, score)
        return None

    def refuse(self, problem: str, remedy: str) -> Never:
        """Raise InvalidExperiment for what the trainer did."""
        own.refuse(self.key, self.name, self._where(problem), remedy)

    def refuse_of(self, method: str, problem: str, remedy: str) -> Never:
        """Raise InvalidExperiment for what a method of the trainer returned."""
        key, name, called = self._trainer.place(method)
        at = "" if key else own.place(getattr(self._trainer, method))
        own.refuse(
            key or self.key, name or self.name, self._where(f"{called} {problem}") + at, remedy
        )

    def _note(self, method: str, text: str) -> None:
        key, name, called = self._trainer.place(method)
        self._noted.setdefault(f"{key or self.key} = {name or self.name!r}: {called} {text}", False)

    def _where(self, problem: str) -> str:
        if self._node:
            return f"{problem} ({self._node})"
        return problem

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        where = f" on {self._node}" if self._node else ""
        guarded = own.guarded(self._names, problem=f"fails{where} with {{}}", everything=True)
        with guarded, self._surroundings.entered():
            yield

    def _arrays(self, layout: ModelLayout, row: Row) -> dict[str, Array]:
        """Return copies of the arrays of a flat model, in the order of `initial` within each kind,
        and in its types.
        """
        views = layout.views(row[: layout.row_bytes])
        return {
            name: view.astype(self._types.get(name, view.dtype)) for name, view in views.items()
        }

    def _arrays_in(self, arrays: object, method: str) -> dict[str, Array]:
        """Return what own code returned as arrays by name."""
        if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
            self.refuse_of(
                method, f"returns arrays as {form(arrays)}", "Return a dict of arrays by name."
            )
        found = {name: np.asarray(value) for name, value in arrays.items()}
        for name, value in found.items():
            if not 0 < len(name) <= NAME_MOST or not name.isprintable():
                self.refuse_of(
                    method,
                    f"returns an array with the name {name!r:.40}",
                    "Use a short printable name.",
                )
            shown = self._trainer.array_name(name)
            kind = exchanged(value)
            if kind is None:
                remedy = "Return floats, or whole numbers for counters: `array.astype(np.float32)`."
                self.refuse_of(method, f"returns {shown} as {value.dtype}", remedy)
            if value.dtype not in (kind, self._types.get(name, kind)):
                text = f"returns {shown} as {value.dtype}: it is exchanged as {np.dtype(kind)}"
                self._note(method, text)
        return found

    def _write(
        self, layout: ModelLayout, found: Mapping[str, Array], out: Row, method: str
    ) -> None:
        views = layout.views(out[: layout.row_bytes])
        shown = self._trainer.array_name
        if absent := [shown(name) for name in views if name not in found]:
            remedy = "Return each array that `initial` returns."
            self.refuse_of(
                method,
                f"returns no {', '.join(absent[:3])}; the model has {len(views)} arrays",
                remedy,
            )
        if unknown := [shown(name) for name in found if name not in views]:
            problem = f"returns {', '.join(unknown[:3])}, which `initial` does not"
            self.refuse_of(method, problem, "Keep it in its state.")
        cast: dict[str, Array] = {}
        for name, view in views.items():
            value = found[name]
            if value.shape != view.shape:
                problem = (
                    f"returns {shown(name)} as {value.dtype} {[*value.shape]}, the model "
                    f"has {[*view.shape]}"
                )
                self.refuse_of(method, problem, "Return arrays as those of `initial`.")
            if exchanged(value) != view.dtype:
                problem = f"returns {shown(name)} as {value.dtype}, the model has {view.dtype}"
                self.refuse_of(method, problem, "Return arrays as those of `initial`.")
            with np.errstate(over="ignore"):  # what float32 does not have is found below
                cast[name] = value.astype(view.dtype, copy=False)
        layout.flatten(cast, out[: layout.row_bytes])
        try:
            layout.check_finite(out[: layout.row_bytes])
        except RefusedModel as error:
            remedy = "Check the learning rate, and what it divides by."
            self.refuse_of(method, f"returns a model whose {error}", remedy)

    def _count(self, value: object, method: str, what: str, *, least: int) -> int:
        found = count(value)
        if found is None or found < least:
            self.refuse_of(
                method, f"{what} {form(value)}", f"Return a whole number of {least} or more."
            )
        return found


class TrainerTester:
    """An experiment's first model and its scores by the trainer of a user, as `ModelTester` has
    them of a module.

    `initial`: the digest of the file of `model.initial`. `evaluates`: whether the cloud evaluates,
    and the trainer can. Raises InvalidExperiment.
    """

    frozen: ClassVar[Arrays] = MappingProxyType({})

    def __init__(self, experiment: Experiment) -> None:
        self._code = TrainerCode(experiment)
        self._data = Path(experiment.data.root.replace("{node}", CLOUD))
        self._seed = torch_seed(experiment.seed, Purpose.OWN_CODE)
        self.layout, self.first = self._code.first(experiment.seed)
        self.initial = ""
        self._notes = list[str]()
        if (initial := experiment.model.initial) is not None:
            found = read_initial(initial, self.layout, self.first, model=self._code.name)
            self.initial = found.content
            self._notes += found.notes
        self.evaluates = experiment.evaluation.on_cloud and self._code.evaluates
        self._notes += self._code.notes()
        if experiment.evaluation.at == "both" and not self.evaluates:
            remedy = 'Write an evaluate, or set evaluation.at = "devices".'
            self._code.refuse("the cloud cannot evaluate with it", remedy)

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know of the first arrays."""
        return self._notes

    def evaluate(self, row: Row, global_round: int = 0) -> Scored | None:
        """Return the score and the loss of a flat model of a global round, uint8 [row_bytes]; None
        if it has none now.

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
    """Seed the generators of Python, numpy and, if it is imported, PyTorch, which then computes on
    one core.

    Sums must not depend on the number of cores.
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)


def _section(value: Array, buffer: bool) -> Section:
    if value.dtype.kind != "f":
        return Section.COUNTER
    if buffer:
        return Section.BUFFER
    return Section.PARAMETER
