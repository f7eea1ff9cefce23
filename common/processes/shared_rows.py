"""Large rows that another process of this user maps: a model passes between them without a copy.

A row is found by its place, the path of the open file that has it and where it begins there. Small
rows are copied: each shared one holds a descriptor.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Row: TypeAlias = npt.NDArray[np.uint8]
Place: TypeAlias = tuple[str, int]  # a path, and the bytes before the row

SHARED_BYTES: Final = 16 << 20  # of a row; a copy of fewer takes some milliseconds


class SharedFile(mmap.mmap):
    """The memory of a file that stays open, `path` for other processes, as long as an array of it
    lives.
    """

    path: str


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """Map a file, so that `place_of` finds its rows if they are large and the system names open
    files.
    """
    if size < SHARED_BYTES or sys.platform != "linux":
        return mmap.mmap(descriptor, size)
    mapped = SharedFile(descriptor, size)
    kept = os.dup(descriptor)
    mapped.path = f"/proc/{os.getpid()}/fd/{kept}"
    weakref.finalize(mapped, os.close, kept)
    return mapped


def new_row(row_bytes: int) -> Row:
    """Return a row of zeros, uint8 [row_bytes], which `place_of` finds if it is large and the
    system allows that.
    """
    if row_bytes < SHARED_BYTES or sys.platform != "linux":
        return np.zeros(row_bytes, np.uint8)
    try:
        descriptor = os.memfd_create("fedstrata row")
        try:
            os.ftruncate(descriptor, row_bytes)
            return np.frombuffer(map_file(descriptor, row_bytes), np.uint8)
        finally:
            os.close(descriptor)
    except OSError:  # no more descriptors
        return np.zeros(row_bytes, np.uint8)


def place_of(row: Row) -> Place | None:
    """Return where another process finds a contiguous row, None if it must be copied."""
    base: object = row
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, SharedFile):
        return None
    return mapped.path, row.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data


def row_at(place: Place, row_bytes: int, *, writable: bool) -> Row:
    """Map another process's row, uint8 [row_bytes]; changes are that process's, too, if it is
    writable.
    """
    path, before = place
    skipped = before % mmap.ALLOCATIONGRANULARITY
    mode = "r+b" if writable else "rb"
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    with open(path, mode) as file:
        mapped = mmap.mmap(
            file.fileno(), skipped + row_bytes, access=access, offset=before - skipped
        )
    return np.frombuffer(mapped, np.uint8)[skipped:]
