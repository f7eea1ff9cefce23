"""Memory shared by an agent's process and one of its workers: models are passed in it, not through a pipe."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from typing import Final

import numpy as np
import numpy.typing as npt

_PAGE: Final = mmap.PAGESIZE


class SharedRows:
    """Rows in pairs, one to read and one to write, in a memory file that grows as needed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    def pairs(self, count: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the pairs, uint8 [count, 2, row_bytes], each row on its own pages; earlier pairs become invalid."""
        stride = -(-row_bytes // _PAGE) * _PAGE
        size = 2 * count * stride
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self._descriptor, size)
        return np.frombuffer(self._mapped, np.uint8, size).reshape(count, 2, stride)[..., :row_bytes]


def open_memory() -> int:
    """Return the descriptor of a new memory file, or of a file on disk if the system has no memory files."""
    if sys.platform == "linux":
        return os.memfd_create("fedstrata rows")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
