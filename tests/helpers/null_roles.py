"""What the roles of `null_lab` compute: an evaluator without a test set, and devices that add
noise.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from fedstrata.common.experiment.schema import Experiment
from fedstrata.deploy.simulation.hardware import (
    Durations,
    NullWorkload,
    SimulatedEvaluator,
    SimulatedHardware,
    SimulatedMember,
    SimulatedPool,
)
from fedstrata.device.jobs import LocalResult, Order, Prepared
from tests.helpers.null_lab import MODEL_BYTES

DURATIONS: Final = Durations(boot_s=0.05, train_s=0.01, evaluate_s=0.01)


def hardware() -> SimulatedHardware:
    return SimulatedHardware(NullWorkload(MODEL_BYTES), DURATIONS, seed=1)


def evaluator(*_: object) -> SimulatedEvaluator:
    """Return the evaluator of a cloud."""
    return SimulatedEvaluator(hardware())


def wait_for(file: Path) -> None:
    """Return when no other process has locked it."""
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)


class NullMember(SimulatedMember):
    """One device, which a test can hold, or give another split of the data."""

    async def prepare(self, experiment: Experiment, *, frozen: Path | None = None) -> Prepared:
        """Return what all devices have, or the split that a test gave this one."""
        prepared = await super().prepare(experiment)
        device, _, digest = os.environ.get("NULL_LAB_SPLIT", "").partition(":")
        return replace(prepared, partition=digest) if device == self._node else prepared

    async def train(self, order: Order) -> LocalResult:
        """Train once this round is released."""
        held, _, release = os.environ.get("NULL_LAB_HOLD", "").partition(":")
        if release and order.local_round >= int(held):
            await asyncio.to_thread(wait_for, Path(release))
        return await super().train(order)


class NullPool(SimulatedPool):
    """The pool of one process of devices."""

    failure = None

    def __init__(self, **_: object) -> None:
        super().__init__(hardware())

    def member(self, node: str) -> NullMember:
        """Add a device."""
        return NullMember(self, node)

    async def __aenter__(self) -> NullPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass
