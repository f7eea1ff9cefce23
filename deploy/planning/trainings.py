"""Measurement of trainings as a run has them: in the pool of a device process, with devices in
turn.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias

import numpy as np

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.rule import link_layouts
from fedstrata.common.model.layout import Row
from fedstrata.device.jobs import Order
from fedstrata.device.pool.pool import Pool

DEVICES_MOST: Final = 8  # that train in turn
WARM_UP: Final = 2  # trainings of each device that do not count
NOTHING: Final = 5  # trainings without steps

# Of a training: its steps, its seconds from its request to its result, and seconds and CPU seconds
# of the training itself, 0 if it was cancelled.
Measured: TypeAlias = tuple[int, float, float, float]


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """Seconds of one core: per SGD step, and per training without its steps, from one task to the
    next.

    `share`: of a core, that the trainings had.
    """

    step_s: float
    training_s: float
    share: float = 1.0


def train(experiment: Experiment, *, first: Row, training_s: float) -> TrainingSpeed:
    """Train some devices of an experiment in turn for `training_s` or longer, after a warm-up of at
    most half of it.

    `first` is the first model. A training without epochs has the seconds that all have beside their
    steps.
    """
    return asyncio.run(_measure(experiment, first, training_s))


async def _measure(experiment: Experiment, first: Row, training_s: float) -> TrainingSpeed:
    own = experiment.training.trainer.learns_module
    names = experiment.tree.devices
    devices = names[:: -(-len(names) // DEVICES_MOST)]
    async with Pool(accelerator="cpu", slots=1, devices=len(devices)) as pool:
        members = [pool.member(name) for name in devices]
        prepared, *_ = [await member.prepare(experiment) for member in members]
        links = link_layouts(experiment.tier_above(devices[0]).aggregation, prepared.layout)
        row = np.zeros(links.down.row_bytes + prepared.kept_bytes, np.uint8)
        row[: first.size] = first
        out = np.zeros(links.up.row_bytes + prepared.kept_bytes, np.uint8)

        async def train_one(turn: int, epochs: int, until: float) -> Measured:
            """Train once, and cancel it if it lasts until a time, of the monotonic clock, and a
            progress message.
            """
            begun = time.monotonic()
            done = (0, 0.0, 0.0, 0.0)

            def progress(steps: int, of: int) -> None:
                nonlocal done
                done = (steps, time.monotonic() - begun, 0.0, 0.0)
                if steps < of and time.monotonic() >= until:
                    training.cancel()

            member = members[turn % len(members)]
            training = asyncio.create_task(
                member.train(Order(row, out, epochs, turn, progress)), name="training"
            )
            await asyncio.wait((training,))
            if training.cancelled():
                return done
            did = training.result().work
            # A trainer of the user's own may count others than batches, by which a plan goes, and
            # none without epochs.
            steps = did.steps if own else epochs * experiment.steps_in_epoch(did.samples)
            return steps, did.train_s + did.wait_s, did.train_s, did.costs.cpu_s or 0.0

        async def train_many(*, most: float, lasting_s: float, epochs: int) -> list[Measured]:
            found = list[Measured]()
            until = time.monotonic() + lasting_s
            while len(found) < most and not (found and time.monotonic() >= until):
                found.append(await train_one(len(found), epochs, until))
            return found

        epochs = experiment.training.epochs
        await train_many(most=WARM_UP * len(members), lasting_s=training_s / 2, epochs=epochs)
        measured = await train_many(most=inf, lasting_s=training_s, epochs=epochs)
        nothing = await train_many(most=NOTHING, lasting_s=inf, epochs=0) if own else []
    rest_s = min((seconds for _, seconds, *_ in nothing), default=0.0)
    steps, seconds, train_s, cpu_s = map(sum, zip(*measured, strict=True))
    share = min(1.0, cpu_s / train_s) if train_s else 1.0
    return TrainingSpeed(max(0.0, seconds - rest_s * len(measured)) / max(1, steps), rest_s, share)
