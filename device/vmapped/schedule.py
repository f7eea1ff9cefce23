"""The schedule of vmapped training: which batches of which devices are trained together, and in
which order.

S devices with one model and batch size take their steps together. They are sorted by their number
of steps, so the active ones are always the first A of S: views of the state, without copies, and
finished devices are not changed. Suffixes: S devices, A of them in one step, W samples of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one device: `samples` (at least 1), `epochs` times (at least 1)."""

    samples: int
    epochs: int


@dataclass(frozen=True, slots=True, eq=False)
class VmappedStep:
    """One batch for each device at `places`, int64 [A]: `counts` samples [A], the first numbered
    `starts` [A].

    A device visits samples * epochs samples in the order of its shuffles, numbered from 0.
    """

    places: Integers
    starts: Integers
    counts: Integers

    @property
    def width(self) -> int:
        """W: the slots of each device; slots beyond its count are padded."""
        return int(self.counts.max())

    @property
    def prefix(self) -> bool:
        """Whether the places are 0 .. A-1; they always ascend."""
        return int(self.places[-1]) == len(self.places) - 1

    @property
    def ragged(self) -> bool:
        """Whether any slot is padded."""
        return int(self.counts.min()) < self.width

    def slots(self) -> Integers:
        """Return the sample number of each slot, int64 [A, W]; padding repeats the batch's first
        sample.

        Padding has weight 0 in the loss. The model's output for it is finite whenever that for the
        batch is.
        """
        slots_W = np.arange(self.width)
        return self.starts[:, None] + np.where(slots_W < self.counts[:, None], slots_W, 0)


@dataclass(frozen=True, eq=False)
class VmappedSchedule:
    """The steps of vmapped training; `order` int64 [S] are the loads at its places."""

    order: Integers
    steps: tuple[VmappedStep, ...]

    @cached_property
    def totals(self) -> Integers:
        """The number of steps of each place, int64 [S]."""
        totals = np.zeros(len(self.order), np.int64)
        for step in self.steps:
            totals[step.places] += 1
        return totals

    def after(self, done: int, places: Integers) -> VmappedSchedule:
        """Return the schedule after `done` steps for some places, ascending int64 [s], which become
        0, 1 ..
        """
        anew = np.full(len(self.order), -1, np.int64)
        anew[places] = np.arange(len(places))
        kept = []
        for step in self.steps[done:]:
            here = anew[step.places] >= 0
            if here.any():
                kept.append(
                    VmappedStep(anew[step.places[here]], step.starts[here], step.counts[here])
                )
        return VmappedSchedule(self.order[places], tuple(kept))


def plan(loads: Sequence[Load], *, batch_size: int, pad: bool) -> VmappedSchedule:
    """Return the steps in which every device visits its batches, in order, each exactly once.

    `pad`: partial batches are padded to the step's width, and the schedule has as many steps as the
    longest device. A model with batch statistics must not get padding: then full batches are
    trained together, and a partial one after the step before it, together with those of equal size
    that are due at the same time.
    """
    samples = np.array([load.samples for load in loads], np.int64)
    epochs = np.array([load.epochs for load in loads], np.int64)
    batches = -(-samples // batch_size) if pad else samples // batch_size
    order = np.lexsort((np.arange(len(loads)), -samples, -batches * epochs))
    shape = _Shape(samples[order], epochs[order], batches[order], batch_size)
    steps = _padded(shape) if pad else _whole(shape)
    return VmappedSchedule(order, tuple(steps))


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """By place, int64 [S]: samples, epochs, and the batches of an epoch that are taken as the first
    A places.
    """

    samples: Integers
    epochs: Integers
    batches: Integers
    batch_size: int

    def together(self, t: int) -> VmappedStep:
        """Return the t-th step of all places that have as many."""
        active = int((self.batches * self.epochs > t).sum())
        samples = self.samples[:active]
        epoch, batch = np.divmod(t, self.batches[:active])
        counts = np.minimum(self.batch_size, samples - batch * self.batch_size)
        return VmappedStep(np.arange(active), epoch * samples + batch * self.batch_size, counts)


def _padded(shape: _Shape) -> Iterator[VmappedStep]:
    return map(shape.together, range(int(shape.batches[0] * shape.epochs[0])))


def _whole(shape: _Shape) -> Iterator[VmappedStep]:
    for epoch in range(int(shape.epochs.max())):
        # without a full batch
        small = np.flatnonzero((shape.batches == 0) & (shape.epochs > epoch))
        yield from _partial(shape, small, np.full(len(small), epoch))
    for t in range(int(shape.batches[0] * shape.epochs[0])):
        step = shape.together(t)
        yield step
        epochs, batch = np.divmod(t, shape.batches[step.places])
        ending = batch == shape.batches[step.places] - 1
        yield from _partial(shape, step.places[ending], epochs[ending])


def _partial(shape: _Shape, places: Integers, epochs: Integers) -> Iterator[VmappedStep]:
    """Yield the partial batches that end the epochs of these places, those of equal size
    together.
    """
    rests = shape.samples[places] % shape.batch_size
    for rest in np.unique(rests[rests > 0]):
        alike = rests == rest
        ends = (epochs[alike] + 1) * shape.samples[places[alike]]
        yield VmappedStep(places[alike], ends - rest, np.full(len(ends), rest))
