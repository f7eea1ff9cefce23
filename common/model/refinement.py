"""What a rule and its refiner exchange: the rule is numpy only, the refiner computes with samples
and torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from fedstrata.common.lazy import np, npt
from fedstrata.common.model.layout import ModelLayout, Row

Doubles: TypeAlias = "npt.NDArray[np.float64]"


@dataclass(frozen=True, slots=True, eq=False)
class RoundModels:
    """What a refiner gets in round `r`: rows of a layout, uint8 [row_bytes] each.

    `mean`: that of the uploads by `weights_K`, into which a refined model is written. `received`:
    what the children received. A rule may define rows that are no models.
    """

    r: int
    layout: ModelLayout
    mean: Row
    received: Row
    uploads: Sequence[Row]
    weights_K: Doubles


class Refiner(Protocol):
    """One node's means to compute with its samples. Called outside the event loop, one call at a
    time.
    """

    @property
    def moves(self) -> int:
        """Counter of progress, also during a call."""

    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        """Do what the node's rule asks for, write parameters of the mean, and return facts that
        JSON can hold.

        The same models give the same bits. Raises FedstrataError.
        """

    def cancel(self) -> None:
        """End a running call, and refuse others, both with FedstrataError; called from another
        thread.
        """

    def allow(self) -> None:
        """Allow calls again."""
