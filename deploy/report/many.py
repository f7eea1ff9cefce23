"""What a report shows of thousands of devices: quantiles in place of a row for each, or evenly spaced ones of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np

NODES_MOST: Final = 300  # devices of a run up to which a report has a row for each
QUANTILES: Final = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}

_T = TypeVar("_T")


def spaced(items: Sequence[_T], most: int = NODES_MOST) -> Sequence[_T]:
    """Return all items, or evenly spaced ones beginning with the first if there are more than `most`."""
    return items[:: -(-len(items) // most)] if len(items) > most else items


def quantiles(rows: Sequence[Sequence[float]]) -> list[list[Any]]:
    """Return the quantiles of each column, a row for each of QUANTILES with its name first."""
    values = np.quantile(np.asarray(rows, dtype=np.float64), list(QUANTILES.values()), axis=0)
    return [[name, *row] for name, row in zip(QUANTILES, values.tolist(), strict=True)]
