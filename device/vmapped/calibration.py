"""Calibration of vmapped training: step times of both ways, and the number of devices that fit in memory.

Vmapped training is tested before it is used. A model whose layers vmap cannot batch, or whose samples depend on the
others of their batch in an unsupported way, is trained one device after another.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.learning import models
from common.model.layout import Row
from device.training.sgd import forward_of, run_sgd
from device.vmapped.loop import Batches, Turn, Visits, VmappedResult, train
from device.vmapped.models import Recipe, VmappedModels
from device.vmapped.schedule import Load, VmappedSchedule, plan

WARMUP_STEPS = 2
TIMED_STEPS = 5
UNLIMITED_DEVICES = 1 << 20  # where memory is the host's
MEMORY_RESERVE_SHARE = 0.2  # of the free memory: for other libraries and gaps of the allocator
STEP_ERROR_MOST = 0.01  # relative to a step's length: models are float32, so a correct step is some 1e-5 off


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step: in-process, of a single device, and vmapped, of 1 and of `size` devices."""

    alone_s: float
    single_s: float
    vmapped_s: float
    size: int

    def one_by_one_s(self, made: VmappedSchedule) -> float:
        """Return the time of a schedule's work, one device after another."""
        return self.alone_s * sum(len(step.places) for step in made.steps)

    def together_s(self, made: VmappedSchedule) -> float:
        """Return the time of the schedule's vmapped steps, interpolated linearly in the number of devices."""
        more_s = (self.vmapped_s - self.single_s) / max(1, self.size - 1)
        return sum(self.single_s + more_s * (len(step.places) - 1) for step in made.steps)


def problem_of(recipe: Recipe, turns: Sequence[Turn]) -> str:
    """Return why two devices' first step differs from their own if it is vmapped and padded, or "".

    It is computed in float64, where only a different computation makes a difference.
    """
    recipe = _exact(recipe)
    whole = min(recipe.training.batch_size, *(turn.load.samples for turn in turns[:2]))
    short = whole - 1 if recipe.pads and whole > 1 else whole
    outcomes: dict[int, object] = {}
    counts = zip(turns, (whole, short), strict=False)
    tried = [_first(turn, count, partial(outcomes.__setitem__, k)) for k, (turn, count) in enumerate(counts)]
    try:
        train(recipe, tried, most=len(tried))
    except Exception as error:  # noqa: BLE001 - a layer that cannot be batched may raise anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for k, turn in enumerate(tried):
        how = outcomes[k]
        if not isinstance(how, VmappedResult):
            return str(how)
        start, mine, its = (recipe.layout.floats(row) for row in (turn.row, how.row, _alone(recipe, turn, 1)))
        apart, length = np.linalg.norm(mine - its), np.linalg.norm(its - start)
        if not apart <= STEP_ERROR_MOST * length:
            return f"a vmapped step differs from a device's own by {apart / length:.2g} of its length"
    return ""


def measure(recipe: Recipe, turns: Sequence[Turn]) -> StepTimes:
    """Time some steps of these turns vmapped, of one vmapped, and of one in-process; discard the results."""

    def alone(count: int) -> None:
        _alone(recipe, turns[0], count)

    alone_s, single_s, vmapped_s = (
        _seconds(recipe, steps) for steps in (alone, _vmapped(recipe, turns[:1]), _vmapped(recipe, turns))
    )
    return StepTimes(alone_s, single_s, vmapped_s, len(turns))


def most_in_memory(recipe: Recipe, turns: Sequence[Turn]) -> int:
    """Return the number of devices that fit into the accelerator's free memory, estimated from a few of the turns."""
    if recipe.accelerator.type != "cuda":
        return UNLIMITED_DEVICES
    few = min(len(turns), 4)
    each_bytes = max(1, (_peak_bytes(recipe, turns[:few]) - _peak_bytes(recipe, turns[:1])) // max(1, few - 1))
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(recipe.accelerator)
    return max(1, int(free_bytes * (1 - MEMORY_RESERVE_SHARE)) // each_bytes)


def _exact(recipe: Recipe) -> Recipe:
    """Return the same in float64, with a learning rate that makes a step long compared with a row's rounding."""
    training = recipe.training.model_copy(update={"precision": "fp32"})

    def normalise(images: Tensor) -> Tensor:
        inputs = recipe.normalise(images)
        return inputs.double() if inputs.is_floating_point() else inputs

    module = copy.deepcopy(recipe.module).double()
    return replace(recipe, module=module, normalise=normalise, training=training, learning_rate=0.1)


def _peak_bytes(recipe: Recipe, turns: Sequence[Turn]) -> int:
    before = torch.cuda.memory_allocated(recipe.accelerator)
    torch.cuda.reset_peak_memory_stats(recipe.accelerator)
    _vmapped(recipe, turns)(WARMUP_STEPS)
    return torch.cuda.max_memory_allocated(recipe.accelerator) - before


def _vmapped(recipe: Recipe, turns: Sequence[Turn]) -> Callable[[int], None]:
    """Return a function that takes the fullest step of these turns' schedule a given number of times."""
    made = plan([turn.load for turn in turns], batch_size=recipe.training.batch_size, pad=recipe.pads)
    ordered = [turns[k] for k in made.order]
    fullest = max(range(len(made.steps)), key=lambda i: int(made.steps[i].counts.sum()))
    state = VmappedModels(recipe, [turn.row for turn in ordered])
    places, batch = Batches(recipe, made, ordered).of(fullest)

    def steps(count: int) -> None:
        for _ in range(count):
            state.step(places, batch)

    return steps


def _seconds(recipe: Recipe, steps: Callable[[int], None]) -> float:
    """Return the seconds of one step, after a warm-up."""
    steps(WARMUP_STEPS)
    _synchronise(recipe)
    started = time.monotonic()
    steps(TIMED_STEPS)
    _synchronise(recipe)
    return (time.monotonic() - started) / TIMED_STEPS


def _alone(recipe: Recipe, turn: Turn, count: int) -> Row:
    """Take the first step of a turn `count` times as its trainer does, and return the model, uint8 [row_bytes]."""
    module, layout, size = recipe.module, recipe.layout, min(recipe.training.batch_size, turn.load.samples)
    places = turn.visits.places[:size].to(recipe.accelerator)
    changes = None if turn.visits.changes is None else turn.visits.changes[:size].to(recipe.accelerator)

    def batches() -> Iterator[tuple[int, Tensor, Tensor]]:
        for _ in range(count):
            yield 0, recipe.inputs(places, changes), recipe.labels.index_select(0, places)

    models.read_row(module, layout, turn.row)
    run_sgd(
        forward_of(module, recipe.training, device=recipe.accelerator),
        list(module.parameters()),
        batches(),
        training=recipe.training,
        learning_rate=recipe.learning_rate,
        last_epoch=0,
        watch=lambda _: None,
    )
    row = layout.empty()
    models.write_row(module, layout, row)
    return row


def _first(turn: Turn, count: int, done: Callable[[object], None]) -> Turn:
    """Return a turn of one batch of the same device."""
    changes = None if turn.visits.changes is None else turn.visits.changes[:count]
    visits = Visits(turn.visits.places[:count], changes)
    return Turn(turn.row, Load(count, 1), visits, lambda *_: None, threading.Event(), done)


def _synchronise(recipe: Recipe) -> None:
    if recipe.accelerator.type == "cuda":
        torch.cuda.synchronize(recipe.accelerator)
