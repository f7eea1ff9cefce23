"""What goes into an aggregation and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.aggregation.statistics import Statistics, Trained


@dataclass(frozen=True, slots=True)
class Uploads:
    """A round's uploads: row k of `rows_K`, uint8 [K, row_bytes], is what `children[k]` sent.

    The order is that of the models dispatched, so it depends on no arrival. The rows of children that are missing
    (`reports` has None) hold rubbish; at least one has answered. `release` may be called to let memory go that was
    read (see `mixing.apply`).
    """

    children: tuple[str, ...]
    rows_K: npt.NDArray[np.uint8]
    reports: tuple[Trained | None, ...]
    release: Callable[[], None]

    @property
    def answered(self) -> tuple[int, ...]:
        """Return the rows that hold uploads, ascending."""
        return tuple(k for k, report in enumerate(self.reports) if report is not None)

    @property
    def statistics(self) -> Statistics:
        """Return samples and losses of those that answered, in row order."""
        return Statistics.of([report for report in self.reports if report is not None])


@dataclass(frozen=True, slots=True)
class Aggregated:
    """What a node's algorithm found and decided.

    `loss`: the mean training loss, weighted like the node's own average. `distances`: ||upload - new mean|| of each
    child that answered, over trainable columns; empty at an institution whose rule needs no such numbers itself.
    `spread`: mean_k ||w_k - mean||^2 / ||mean||^2 of K models after mixing, None for rules of one model. `facts`:
    what the plan decided, fit for JSON.
    """

    loss: float
    distances: Mapping[str, float]
    spread: float | None
    facts: Mapping[str, object]

    @property
    def plan(self) -> dict[str, object]:
        """Return what is told of it: the loss, the spread where there is one, and the facts."""
        spread = {} if self.spread is None else {"spread": self.spread}
        return {"loss": self.loss, **spread, **self.facts}
