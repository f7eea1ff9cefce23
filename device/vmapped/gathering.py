"""Gathering of training requests that can share one stack."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from common.errors import InvalidExperiment

VARIABLE: Final = "FEDSTRATA_STACKING"
STACK_DEVICES_MOST: Final = 1024  # in one stack; memory sets another limit
QUIET_S: Final = 0.05
PATIENCE_S: Final = 0.5


class Stacking(StrEnum):
    """Whether devices are trained in stacks (vmapped): if it was measured to be faster, never, or always."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


def stacking() -> Stacking:
    """Return the setting of the environment variable. Raises InvalidExperiment."""
    given = os.environ.get(VARIABLE, Stacking.AUTO)
    try:
        return Stacking(given)
    except ValueError:
        raise InvalidExperiment(VARIABLE, given, "no such choice", f"Use {', '.join(Stacking)}.") from None


def most_together(accelerator: str) -> int:
    """Return how many trainings may be stacked: one on a CPU, where stacks are not faster."""
    choice = stacking()
    alone = choice is Stacking.NEVER or (choice is Stacking.AUTO and accelerator == "cpu")
    return 1 if alone else STACK_DEVICES_MOST


async def gather(came: asyncio.Event, complete: Callable[[], bool]) -> None:
    """Wait until nothing has come for a moment, all expected requests are there, or the time limit is reached.

    The devices of a host get their models at nearly the same time. A device that comes after a stack's start would have
    to wait for a second stack.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE_S
    while not complete() and (left := end - loop.time()) > 0:
        came.clear()
        try:
            await asyncio.wait_for(came.wait(), min(QUIET_S, left))
        except TimeoutError:
            return
