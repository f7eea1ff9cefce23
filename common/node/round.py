"""A round's outcome, and what a child may report of its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import RefusedModel
from common.rounds.timeline import Timeline
from common.wire.messages import Result

COUNT_MOST: Final = 10**12


@dataclass(frozen=True, slots=True)
class Round:
    """A closed round: results and rows of the children that answered, in the order of their names' list.

    `uploads`: uint8 [K, row_bytes], row k belongs to `children[k]`; valid until the next round is opened. `release`
    lets go of the memory that reading them took, where a file keeps them.
    """

    children: tuple[str, ...]
    results: tuple[Result, ...]
    uploads: npt.NDArray[np.uint8]
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    timeline: Timeline
    release: Callable[[], None] = lambda: None


def check_report(result: Result) -> None:
    """Refuse a result whose numbers cannot be, or whose sums would not fit in a message. Raises RefusedModel."""
    if result.samples < 1:
        raise RefusedModel("it reports no samples")
    if not np.isfinite(result.loss):
        raise RefusedModel(f"its training loss is {result.loss}")
    for what, count in (("samples", result.samples), ("epochs", result.epochs), ("steps of SGD", result.steps)):
        if count > COUNT_MOST:
            raise RefusedModel(f"it reports {count} {what}")
    if not (0 <= result.train_s < np.inf and 0 <= result.wait_s < np.inf):
        raise RefusedModel(f"it reports {result.train_s} s of training after {result.wait_s} s of waiting")
