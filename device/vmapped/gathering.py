"""Which trainings wait for one another, so that one stack can hold them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from common.errors import InvalidExperiment

VARIABLE: Final = "FEDSTRATA_STACKING"
STACK_DEVICES_MOST: Final = 1024  # trainings in one stack; memory sets a limit of its own
QUIET_S: Final = 0.05
PATIENCE_S: Final = 0.5


class Stacking(StrEnum):
    """Whether devices are trained in stacks: where that was measured to be quicker, or by order."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


def stacking() -> Stacking:
    """Return what the environment says. Raises InvalidExperiment."""
    given = os.environ.get(VARIABLE, Stacking.AUTO)
    try:
        return Stacking(given)
    except ValueError:
        raise InvalidExperiment(VARIABLE, given, "no such choice", f"Use {', '.join(Stacking)}.") from None


def most_together(accelerator: str) -> int:
    """Return how many trainings may go together: on a CPU one, for stacks do not pay there."""
    choice = stacking()
    alone = choice is Stacking.NEVER or (choice is Stacking.AUTO and accelerator == "cpu")
    return 1 if alone else STACK_DEVICES_MOST


async def gather(came: asyncio.Event, complete: Callable[[], bool]) -> None:
    """Wait until nothing has come for a moment, all that may come are there, or patience ends.

    The devices of a host have their models at nearly the same time; a stack that starts without the last of them makes
    it wait for a second one.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE_S
    while not complete() and (left := end - loop.time()) > 0:
        came.clear()
        try:
            await asyncio.wait_for(came.wait(), min(QUIET_S, left))
        except TimeoutError:
            return
