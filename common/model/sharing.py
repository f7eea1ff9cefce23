"""Equal models of one process in one memory: an institution's devices get the same."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

import numpy as np

from common.model.layout import Row

_SHARED: Final = WeakValueDictionary[str, Row]()  # by blob


def shared_row(blob: str, data: bytes) -> Row:
    """Return a model's bytes as a row, read-only, without a copy; equal ones of this process share one.

    Its `base` is the bytes that are shared. They are freed with the last such row.
    """
    row = _SHARED.get(blob)
    if row is None or row.base != data:  # equal ids prove nothing
        row = _SHARED[blob] = np.frombuffer(data, np.uint8)
    return row
