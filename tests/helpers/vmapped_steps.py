"""Whether the vmapped steps of two devices are those of each alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedstrata.common.learning import models
from fedstrata.common.learning.computing import first_line
from fedstrata.common.learning.datasets import Normalise
from fedstrata.common.learning.models import head_places
from fedstrata.common.learning.nets import reseed
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.device.jobs import Cancelled
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.sgd import LocalSteps, features_of, forward_of
from fedstrata.device.training.trained_network import TRIAL_NOISE
from fedstrata.device.vmapped.schedule import Load
from fedstrata.device.vmapped.shared_steps import Turn, Visits, VmappedResult, train
from fedstrata.device.vmapped.stacked_models import Recipe

TRIAL_STEPS: Final = 3
TRIAL_LEARNING_RATE: Final = 0.01  # its steps are long compared with the rounding of float32 models
# How far vmapped steps may be from a device's own, relative to their length. In float64 both give
# the same float32 model, up to its last bit. In the others rounding decides on which side of a
# ReLU's kink a value is, and batch norm over few samples amplifies it: 0.02 and 0.33 were seen
# (ResNet-18, batches of 10, on a CPU). Wrong steps are 1 off.
ERROR_MOST: Final = {"float64": 1e-6, "fp32": 0.1, "tf32": 0.5, "bf16": 0.5}
ROUNDING: Final = 2.0**-22  # of float32, with a bit to spare


def problem_of(recipe: Recipe, turns: Sequence[Turn]) -> str:
    """Return why two devices' vmapped steps differ from their in-process ones, or "".

    Of the steps, all but the first start from other parameters than the received ones and with
    momentum. They are computed twice: in float64, where only another formula makes a difference,
    however small a term it has; and in the precision that will run, whose kernels may fail. Raises
    torch.OutOfMemoryError.
    """
    precision = recipe.training.precision
    exact = replace(
        recipe,
        module=copy.deepcopy(recipe.module).double(),
        normalise=partial(_in_float64, recipe.normalise),
        training=recipe.training.model_copy(update={"precision": "fp32"}),
    )
    return _problem(exact, turns, "float64") or _problem(recipe, turns, precision)


def _problem(recipe: Recipe, turns: Sequence[Turn], precision: str) -> str:
    recipe = replace(recipe, learning_rate=TRIAL_LEARNING_RATE)
    whole = min(recipe.training.batch_size, *(turn.load.samples for turn in turns[:2]))
    short = whole - 1 if recipe.pads and whole > 1 else whole
    outcomes: dict[int, VmappedResult | Cancelled] = {}
    counts = zip(turns, (whole, short), strict=False)
    tried = [
        replace(
            _repeated(turn, torch.arange(count).repeat(TRIAL_STEPS), Load(count, TRIAL_STEPS)),
            row=_with_noise(turn.row, recipe.layout),
            progress=lambda *_: None,
            cancelled=threading.Event(),
            done=partial(outcomes.__setitem__, k),
        )
        for k, (turn, count) in enumerate(counts)
    ]
    try:
        train(recipe, tried, most=len(tried))
    except Exception as error:  # noqa: BLE001 - a layer that cannot be batched may raise anything
        return f"{type(error).__name__} in {precision}: {first_line(error)}"
    for k, turn in enumerate(tried):
        if not isinstance(result := outcomes.get(k), VmappedResult):
            raise torch.OutOfMemoryError(f"{recipe.accelerator} has no memory for one vmapped step")
        start, vmapped, own = (turn.row, result.row, _alone(recipe, turn, TRIAL_STEPS))
        if precision == "float64":
            problem = _different_tensor(recipe.layout, start, vmapped, own)
        else:
            problem = _different_part(
                recipe.layout, start, vmapped, own, most=ERROR_MOST[precision]
            )
        if problem:
            return f"vmapped steps in {precision} {problem}"
    return ""


def _different_tensor(layout: ModelLayout, start: Row, vmapped: Row, own: Row) -> str:
    """Return the first tensor whose steps differ by more than the rounding of results to float32."""
    starts, vmappeds, owns = map(layout.views, (start, vmapped, own))
    for name, value in owns.items():
        apart = np.abs(vmappeds[name] - value) - ROUNDING * np.abs(value)
        difference, length = np.linalg.norm(apart.clip(0)), np.linalg.norm(value - starts[name])
        if not difference <= ERROR_MOST["float64"] * length:
            share = f"{difference / length:.2g} of their length" if length else "all"
            return f"that differ by {share} in {name}"
    return ""


def _different_part(layout: ModelLayout, start: Row, vmapped: Row, own: Row, *, most: float) -> str:
    """Return how far the steps of the parameters, or those of the buffers, are apart, if it is too
    far.
    """
    for part in (slice(layout.parameters), slice(layout.parameters, None)):
        start_C, vmapped_C, own_C = (layout.floats(row)[part] for row in (start, vmapped, own))
        apart, length = np.linalg.norm(vmapped_C - own_C), np.linalg.norm(own_C - start_C)
        if not apart <= most * length:
            return f"that differ by {apart / length:.2g} of their length"
    return ""


def _in_float64(normalise: Normalise, images: Tensor) -> Tensor:
    inputs = normalise(images)
    return inputs.double() if inputs.is_floating_point() else inputs


def _alone(recipe: Recipe, turn: Turn, count: int) -> Row:
    """Take the first step of a turn `count` times as its trainer does, and return the model, uint8
    [row_bytes].
    """
    module = recipe.module
    layout, size = recipe.layout, min(recipe.training.batch_size, turn.load.samples)
    places = turn.visits.places[:size].to(recipe.accelerator)
    changes = (
        None if turn.visits.changes is None else turn.visits.changes[:size].to(recipe.accelerator)
    )
    inputs, labels = recipe.inputs(places, changes), recipe.labels.index_select(0, places)
    models.read_row(module, layout, turn.row)
    weights = models.weights_of(module, layout)
    reseed(module, turn.seed, recipe.accelerator)
    found = recipe.vectors.read(turn.row)
    drawn, dtype = turn.visits.uniform, next(module.parameters()).dtype
    uniform = None if drawn is None else drawn[:size].to(recipe.accelerator, dtype)
    steps = LocalSteps(
        forward_of(module, recipe.training, device=recipe.accelerator),
        list(weights.values()),
        training=recipe.training,
        learning_rate=recipe.learning_rate,
        buffers=list(module.buffers()),
        vectors={
            name: list(recipe.parts_of(name, vector).values()) for name, vector in found.items()
        },
        features=features_of(module, recipe.training, device=recipe.accelerator),
        head=head_places(module, layout) if objective_of(recipe.training).uses_head else (),
        personal=[place for place, name in enumerate(weights) if name in recipe.personal],
    )
    for _ in range(count):
        steps.take([inputs, labels, *([] if uniform is None else [uniform])])
    row = layout.empty()
    models.write_row(module, layout, row)
    return row


def _repeated(turn: Turn, some: Tensor, load: Load) -> Turn:
    """Return a turn that visits some of this one's visits, int64 [samples * epochs]."""
    changes = None if turn.visits.changes is None else turn.visits.changes[some]
    uniform = None if turn.visits.uniform is None else turn.visits.uniform[some]
    return replace(turn, load=load, visits=Visits(turn.visits.places[some], changes, uniform))


def _with_noise(row: Row, layout: ModelLayout) -> Row:
    """Return a row whose vectors are noise: those of a first task are zeros, which have no effect."""
    row = row.copy()
    behind = row[layout.model_bytes :].view(np.float32)
    behind[:] = np.random.default_rng(1).normal(scale=TRIAL_NOISE, size=behind.size)
    return row
