"""Measurement of trainings as a run has them: in the pools of a lab's device processes, with devices in turn."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

import numpy as np

from common.errors import first_error
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.methods.rule import link_layouts
from common.model.layout import Row
from device.jobs import Order
from device.pool.pool import Pool

DEVICES_MOST: Final = 8  # that train in turn, for each training at once
WARM_UP: Final = 2  # trainings of each device in each worker that do not count
LONGER: Final = 3  # times the epochs, of every second training of a device
NOTHING: Final = 5  # trainings without steps


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """Seconds of one core: per SGD step, and per training without its steps, from one task to the next.

    `share`: of a core, that the trainings had.
    """

    step_s: float
    training_s: float
    share: float = 1.0


class MeasuredTraining(NamedTuple):
    """The steps of a training and its seconds, from its request to its result.

    train_s, cpu_s: seconds and CPU seconds of the training itself, 0 if it was cancelled
    """

    steps: int
    seconds: float
    train_s: float = 0.0
    cpu_s: float = 0.0


def train(experiment_json: str, devices: Sequence[str], slots: int, *, first: Row, training_s: float) -> TrainingSpeed:
    """Train some devices of an experiment in turn, `slots` of them at once, for `training_s` or longer.

    A warm-up takes at most half as long. `first` is the first model.
    """
    some = devices[:: -(-len(devices) // (slots * DEVICES_MOST))]
    enough = [*some] * (1 if len(some) >= slots else slots)  # the same device may train several times at once
    measured, least_s = asyncio.run(_measure(parse(experiment_json), enough, slots, first=first, training_s=training_s))
    step_s, rest_s = line(measured, least_s=least_s)
    train_s = sum(each.train_s for each in measured)
    share = sum(each.cpu_s for each in measured) / train_s if train_s else 1.0
    return TrainingSpeed(step_s, rest_s, min(1.0, share))


async def _measure(
    experiment: Experiment, devices: Sequence[str], slots: int, *, first: Row, training_s: float
) -> tuple[list[MeasuredTraining], float]:
    """Return trainings, and the least seconds of one without steps."""
    own = experiment.training.trainer.learns_module
    async with Pool(accelerator="cpu", slots=slots, devices=len(devices)) as pool:
        members = [pool.member(name) for name in devices]
        prepared, *_ = [await member.prepare(experiment) for member in members]
        links = link_layouts(experiment.tier_above(devices[0]).aggregation, prepared.layout)
        row = np.zeros(links.down.row_bytes + prepared.kept_bytes, np.uint8)
        row[: first.size] = first

        async def train_one(turn: int, out: Row, epochs: int, until: float) -> MeasuredTraining:
            """Train once, and cancel it if it lasts until a time, of the monotonic clock, and a progress message."""
            begun, done = time.monotonic(), MeasuredTraining(0, 0.0)

            def progress(steps: int, of: int) -> None:
                nonlocal done
                done = MeasuredTraining(steps, time.monotonic() - begun)
                if steps < of and time.monotonic() >= until:
                    training.cancel()

            member = members[turn % len(members)]
            training = asyncio.create_task(member.train(Order(row, out, epochs, turn, progress)), name="training")
            await asyncio.wait((training,))
            if training.cancelled():
                return done
            result = training.result()
            # A trainer of the user's own may count others than batches, by which a plan goes, and none without epochs.
            steps = result.steps if own else epochs * experiment.steps_in_epoch(result.samples)
            seconds = result.train_s + result.wait_s
            return MeasuredTraining(steps, seconds, result.train_s, result.costs.cpu_s or 0.0)

        async def train_many(at_once: int, *, most: float, until: float, epochs: int) -> list[MeasuredTraining]:
            found, turns = list[MeasuredTraining](), itertools.count()

            async def work() -> None:
                out = np.zeros(links.up.row_bytes + prepared.kept_bytes, np.uint8)
                for turn in turns:
                    if turn >= most or (found and time.monotonic() >= until):
                        return
                    longer = LONGER if turn // len(members) % 2 else 1
                    found.append(await train_one(turn, out, epochs * longer, until))

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(at_once):
                        group.create_task(work())
            except BaseExceptionGroup as errors:
                raise first_error(errors) or errors from None
            return found

        epochs, warm_up = experiment.training.epochs, WARM_UP * slots * len(members)
        await train_many(slots, most=warm_up, until=time.monotonic() + training_s / 2, epochs=epochs)
        measured = await train_many(slots, most=inf, until=time.monotonic() + training_s, epochs=epochs)
        nothing = await train_many(1, most=NOTHING, until=inf, epochs=0) if own else []
    return measured, min((each.seconds for each in nothing), default=0.0)


def line(measured: Sequence[MeasuredTraining], *, least_s: float) -> tuple[float, float]:
    """Return the seconds of a step, and of a training without its steps, which are at least `least_s`.

    A weighted least squares fit: a training's noise grows with its steps. It keeps the sum of the seconds. If all
    trainings have as many steps, or noise makes one of them too small, the rest is `least_s`.
    """
    steps, seconds = (np.array(column, float) for column in zip(*(each[:2] for each in measured), strict=True))
    weights = 1 / np.sqrt(steps)
    matrix = np.stack([weights, steps * weights], axis=1)
    (rest_s, step_s), _, rank, _ = np.linalg.lstsq(matrix, seconds * weights, rcond=None)
    if rank < 2 or rest_s < least_s or step_s <= 0:
        return max(0.0, float(seconds.sum()) - least_s * len(steps)) / float(steps.sum()), least_s
    return float(step_s), float(rest_s)
