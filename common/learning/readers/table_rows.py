"""The test rows of a table without a test file: drawn once and for all, so that no run's seed has a say."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.learning.readers.arrays import Refuse
from common.randomness import Purpose, generator


def rows_to_test(count: int, share: float, *, refuse: Refuse) -> npt.NDArray[np.bool_]:
    """Return which of `count` rows are for testing, bool [count]: at least one, and not all."""
    if count < 2:
        refuse(f"has {count} rows", "It needs at least two, one to train and one to test.")
    picked = np.zeros(count, np.bool_)
    tests = min(count - 1, max(1, round(share * count)))
    picked[generator(0, Purpose.PARTITION, "test rows").permutation(count)[:tests]] = True
    return picked
