"""Trainings that share their steps: from requests to outcomes, with separate progress, end and
share of the time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedstrata.common.host.accelerators import out_of_memory
from fedstrata.common.model.layout import Row
from fedstrata.device.jobs import Cancelled, Progress
from fedstrata.device.training.batches import Changes
from fedstrata.device.vmapped.schedule import Integers, Load, VmappedSchedule, plan
from fedstrata.device.vmapped.stacked_models import Batch, Recipe, VmappedModels

LOOK_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class VmappedResult:
    """The result of a device's vmapped training: a model, uint8 [row_bytes], and the mean loss of
    its last epoch.

    `train_s` is its share of the steps it took part in: a step's seconds divided by the number of
    its devices; `cpu_s` that of the CPU seconds of their thread. `wall_s` are the seconds from its
    group's start to this outcome.
    """

    row: Row
    loss: float
    steps: int
    train_s: float
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """The samples that a device visits, epoch after epoch: `places` int64 [samples * epochs], and
    their changes.

    `uniform`: their random numbers, float32 [samples * epochs, draws], for an objective that reads
    some.
    """

    places: Tensor
    changes: Changes | None
    uniform: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One device's vmapped training; `row`, a model and its vectors, uint8, is read-only; `seed`:
    of dropout masks.

    `progress(steps_done, steps_total)` and, at most once, `done` are called from the training
    thread.
    """

    row: Row
    load: Load
    visits: Visits
    progress: Progress
    cancelled: threading.Event
    done: Callable[[VmappedResult | Cancelled], None]
    seed: int = 0


def train(recipe: Recipe, turns: Sequence[Turn], *, most: int) -> None:
    """Train all turns in groups of equal size, at most `most` in one group.

    If memory runs out, a group is halved and continues with the failed step. Each turn ends with a
    call of its `done`, unless the memory does not suffice for it alone. A cancelled turn ends
    before the next step. Its place is still computed, because the sums of the others depend, by
    rounding, on the group's shape. So their results do not change, bit for bit. Raises RuntimeError
    if a step fails otherwise; the turns that have ended keep their outcomes.
    """
    made = plan(
        [turn.load for turn in turns], batch_size=recipe.training.batch_size, pad=recipe.pads
    )
    members = [
        _Member(turns[k], int(total)) for k, total in zip(made.order, made.totals, strict=True)
    ]
    whole = _Group(recipe, members, made)
    size = -(-len(turns) // -(-len(turns) // most))
    waiting = deque(
        whole.part(start, min(start + size, len(turns))) for start in range(0, len(turns), size)
    )
    while waiting:
        group = waiting.popleft()
        if not _trained(group):
            waiting.extendleft(reversed(group.halves()))


def _trained(group: _Group) -> bool:
    """Return False if memory ran out, without the exception, whose traceback references the step's
    tensors.
    """
    try:
        group.run()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    return True


@dataclass(slots=True, eq=False)
class _Member:
    """A turn under way: the steps taken by all, the seconds accounted to it, and whether it is
    done.
    """

    turn: Turn
    total: int
    steps: int = 0
    train_s: float = 0.0
    cpu_s: float = 0.0
    over: bool = False

    def end(self, how: VmappedResult | Cancelled) -> None:
        self.over = True
        self.turn.done(how)


class _Group:
    """The members trained in the same steps, in the order of their places."""

    def __init__(self, recipe: Recipe, members: Sequence[_Member], made: VmappedSchedule) -> None:
        self._recipe = recipe
        self._members = members
        self._plan = made
        self._state: VmappedModels | None = None
        self._began: float | None = None
        self._taken = 0  # steps of the schedule
        # Since the last report: the steps taken, each member's share of them and the number it took
        # part in.
        self._looked = 0.0
        self._cpu = 0.0
        self._since = 0
        self._shares = np.zeros(len(members))
        self._steps = np.zeros(len(members), np.int64)

    def run(self) -> None:
        """Train until every member is done. After a lack of memory `halves` can continue."""
        self._looked = time.monotonic()
        self._cpu = time.thread_time()
        self._began = self._began or self._looked
        if self._state is None:
            turns = [member.turn for member in self._members]
            rows = [turn.row for turn in turns]
            self._state = VmappedModels(self._recipe, rows, [turn.seed for turn in turns])
        self._state.move_to(self._recipe.accelerator)
        batches = Batches(self._recipe, self._plan, [member.turn for member in self._members])
        self._look(self._state)
        while self._taken < len(self._plan.steps) and self._drop_cancelled():
            step = self._plan.steps[self._taken]
            taking = np.array([not self._members[place].over for place in step.places])
            if taking.any():
                self._state.step(*batches.of(self._taken))
                self._since += 1
                self._shares[step.places] += taking / taking.sum()
                self._steps[step.places] += 1
            self._taken += 1
            if time.monotonic() - self._looked >= LOOK_S:
                self._look(self._state)
        self._look(self._state)

    def halves(self) -> list[_Group]:
        """Return two groups that continue, each with half the places, or none if a single member is
        left.
        """
        self._account()
        left = [place for place, member in enumerate(self._members) if not member.over]
        parts = []
        if len(left) > 1:
            middle = left[len(left) // 2]
            end = left[-1] + 1
            parts = [self.part(left[0], middle), self.part(middle, end)]
        self._state = None
        if self._recipe.accelerator.type == "cuda":
            torch.cuda.empty_cache()
        return parts

    def part(self, start: int, stop: int) -> _Group:
        """Return the places from start to stop as a separate group in their present state."""
        part = _Group(
            self._recipe,
            self._members[start:stop],
            self._plan.after(self._taken, np.arange(start, stop)),
        )
        part._began = self._began
        if self._state is not None:
            part._state = self._state.part(start, stop)
        return part

    def _drop_cancelled(self) -> bool:
        """End cancelled members; return whether any member is left."""
        left = [member for member in self._members if not member.over]
        for member in left:
            if member.turn.cancelled.is_set():
                member.end(Cancelled())
        return not all(member.over for member in left)

    def _look(self, state: VmappedModels) -> None:
        """Account the time, report progress, and end the members that have taken all their
        steps.
        """
        self._account()
        left = [(place, member) for place, member in enumerate(self._members) if not member.over]
        for _, member in left:
            member.turn.progress(member.steps, member.total)
        finished = [(place, member) for place, member in left if member.steps == member.total]
        if finished:
            rows, losses = state.read([place for place, _ in finished])
            wall_s = time.monotonic() - (self._began or 0.0)
            for (_, member), row, loss in zip(finished, rows, losses, strict=True):
                mean = loss / member.turn.load.samples
                member.end(
                    VmappedResult(row, mean, member.steps, member.train_s, wall_s, member.cpu_s)
                )

    def _account(self) -> None:
        """Divide the time since the last report among the members, by their steps since then."""
        if self._recipe.accelerator.type == "cuda":
            # steps that are only queued are no progress
            torch.cuda.synchronize(self._recipe.accelerator)
        now = time.monotonic()
        cpu = time.thread_time()
        if self._since:
            parts = self._shares / self._since
        else:
            parts = np.full(len(self._members), 1 / len(self._members))
        for member, part, steps in zip(self._members, parts, self._steps, strict=True):
            member.train_s += (now - self._looked) * float(part)
            member.cpu_s += (cpu - self._cpu) * float(part)
            member.steps += int(steps)
        self._looked = now
        self._cpu = cpu
        self._since = 0
        self._shares[:] = 0
        self._steps[:] = 0


class Batches:
    """The batches of all steps of a schedule, on the accelerator from the start, so that no step
    waits for a copy.
    """

    def __init__(self, recipe: Recipe, made: VmappedSchedule, turns: Sequence[Turn]) -> None:
        self._steps = made.steps
        self._dtype = next(recipe.module.parameters()).dtype
        lengths = np.array([len(turn.visits.places) for turn in turns], np.int64)
        first = np.cumsum(lengths) - lengths
        last_epoch = lengths - np.array([turn.load.samples for turn in turns], np.int64)
        numbers = torch.from_numpy(
            _joined([first[step.places, None] + step.slots() for step in made.steps])
        )
        counted = [
            np.where(step.starts >= last_epoch[step.places], step.counts, 0) for step in made.steps
        ]

        def to(tensor: Tensor) -> Tensor:
            return tensor.to(recipe.accelerator)

        self._samples = to(torch.cat([turn.visits.places for turn in turns])[numbers])
        changes = Changes.joined(turn.visits.changes for turn in turns)
        self._changes = None if changes is None else changes[numbers].to(recipe.accelerator)
        self._uniform = None
        self._numbers = numbers
        uniform = [turn.visits.uniform for turn in turns if turn.visits.uniform is not None]
        if uniform:
            self._uniform = to(torch.cat(uniform).to(self._dtype))
            self._numbers = to(numbers)
        self._places = to(torch.from_numpy(_joined([step.places for step in made.steps])))
        self._counts = to(torch.from_numpy(_joined([step.counts for step in made.steps])))
        self._counted = to(torch.from_numpy(_joined(counted)).double())
        self._slots = np.cumsum([0, *(len(step.places) * step.width for step in made.steps)])
        self._rows = np.cumsum([0, *(len(step.places) for step in made.steps)])

    def of(self, number: int) -> tuple[int | Tensor, Batch]:
        """Return the places and the samples of a step."""
        step = self._steps[number]
        slots = slice(*self._slots[number : number + 2])
        rows = slice(*self._rows[number : number + 2])
        weights = None
        if step.ragged:
            counts = self._counts[rows, None]
            real = torch.arange(step.width, device=counts.device) < counts
            weights = real.to(self._dtype) / counts
        shape = (len(step.places), step.width)
        samples = self._samples[slots].view(shape)
        changes = None if self._changes is None else self._changes[slots]
        uniform = None
        if self._uniform is not None:
            uniform = self._uniform[self._numbers[slots]].view(*shape, -1)
        batch = Batch(step, samples, changes, weights, self._counted[rows], uniform)
        return len(step.places) if step.prefix else self._places[rows], batch


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> Integers:
    if arrays:
        return np.concatenate([array.ravel() for array in arrays])
    return np.zeros(0, np.int64)
