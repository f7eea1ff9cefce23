"""Gathering of training requests that can share one vmapped group."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import Final

from common.errors import InvalidExperiment
from common.experiment.training import TrainingSettings

VARIABLE: Final = "FEDSTRATA_VMAPPED"
VMAPPED_DEVICES_MOST: Final = 1024  # in one group; memory sets another limit
QUIET_S: Final = 0.05
WAIT_SHARE: Final = 0.1  # of the training: an executor that waits for another device trains nobody meanwhile
PATIENCE: Final = 10  # quiet times


class VmappedMode(StrEnum):
    """When devices are trained vmapped: if it was measured to be faster, never, or always, as in `training.vmapped`."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


def vmapped_mode(training: TrainingSettings, accelerator: str) -> VmappedMode:
    """Return when an experiment's devices are trained vmapped here. Raises InvalidExperiment.

    This host's environment variable decides, then the experiment, then the kind of accelerator.
    """
    if training.deterministic or training.compile:
        return VmappedMode.NEVER
    default = VmappedMode.NEVER if accelerator == "cpu" else VmappedMode.AUTO
    given = os.environ.get(VARIABLE, training.vmapped or default)
    try:
        return VmappedMode(given)
    except ValueError:
        raise InvalidExperiment(VARIABLE, given, "no such choice", f"Use {', '.join(VmappedMode)}.") from None


def most_together(training: TrainingSettings, accelerator: str) -> int:
    """Return how many trainings of an experiment may be vmapped together. Raises InvalidExperiment."""
    return 1 if vmapped_mode(training, accelerator) is VmappedMode.NEVER else VMAPPED_DEVICES_MOST


async def gather(came: asyncio.Event, complete: Callable[[], bool], *, train_s: float = inf) -> None:
    """Wait until nothing has come for a moment, all expected requests are there, or the time limit is reached.

    The devices of a host get their models at nearly the same time. A device that comes after a group's start would have
    to wait for a second group. `train_s`: the time of such a group's training; the moment is short compared with it.
    """
    loop, quiet_s = asyncio.get_running_loop(), min(QUIET_S, WAIT_SHARE * train_s)
    end = loop.time() + PATIENCE * quiet_s
    while not complete() and (left := end - loop.time()) > 0:
        came.clear()
        try:
            await asyncio.wait_for(came.wait(), min(quiet_s, left))
        except TimeoutError:
            return
