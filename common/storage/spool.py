"""Where models are assembled: memory, or files that outlive the process.

A node that is killed in the middle of a transfer finds its chunks again: the file is scanned against the manifest's
digests, so no index is kept and nothing in it need be trusted. The kernel keeps the files in its page cache and may
write them out when memory is short, where rows of memory would have to fit.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment

KEPT_S: Final = 7 * 86_400.0

log = logging.getLogger("fedstrata.spool")


class Rows:
    """Memory for K models: `array`, uint8 [K, row_bytes], each row contiguous and, in a file, on a page of its own."""

    def __init__(
        self,
        array: npt.NDArray[np.uint8],
        mapped: mmap.mmap | None = None,
        found: Iterable[int] = (),
        resident_bytes: float = 0.0,
    ) -> None:
        self.array = array
        self._mapped = mapped
        self._releasable = mapped is not None and array.nbytes > resident_bytes
        self._found = set(found)

    def take_found(self, place: int) -> bool:
        """Return, once, whether an earlier process may have left parts of a model in this row."""
        found = place in self._found
        self._found.discard(place)
        return found

    def release(self, place: int | None = None) -> None:
        """Let go of the memory of one row, or of all, that a file keeps, unless all of them may stay resident.

        What is read again comes back from the file.
        """
        if self._mapped is None or not self._releasable:
            return
        stride = self.array.strides[0]
        start, length = (0, len(self._mapped)) if place is None else (place * stride, stride)
        self._mapped.madvise(mmap.MADV_DONTNEED, start, length)


class Spool:
    """One node's files in one run, or, where `folder` is None, memory only."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def open(cls, root: Path | None, *, run: str, node: str) -> Spool:
        """Take up a node's files, and remove those that nobody came back for in a week; without a root, use memory.

        Raises InvalidExperiment where `root` cannot be written.
        """
        if root is None:
            return cls(None)
        folder = root / run / node
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(root / run)
            for old in root.iterdir():
                if old.stat().st_mtime < time.time() - KEPT_S:
                    shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise InvalidExperiment(
                "--spool", str(root), error.strerror or str(error), "Name another folder."
            ) from None
        return cls(folder)

    def rows(self, name: str, count: int, row_bytes: int, *, resident_bytes: float = 0.0) -> Rows:
        """Return rows for models, in a file of this name where there is a folder; so many bytes may stay resident.

        Falls back to memory, with a warning, where the disk has no room.
        """
        if self._folder is None or count == 0:
            return Rows(np.empty((count, row_bytes), np.uint8))
        path = self._folder / name
        stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = count * stride
        try:
            with path.open("a+b") as file:
                found = os.fstat(file.fileno()).st_size == size
                if not found:
                    file.truncate(0)
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS later
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            log.warning("no room for %d bytes at %s (%s): kept in memory", size, path, error.strerror)
            path.unlink(missing_ok=True)
            return Rows(np.empty((count, row_bytes), np.uint8))
        array = np.frombuffer(mapped, np.uint8).reshape(count, stride)[:, :row_bytes]
        return Rows(array, mapped, range(count) if found else (), resident_bytes)

    def memory(self, name: str, count: int, *, row_bytes: int, resident_mb: float) -> npt.NDArray[np.uint8]:
        """Return rows for models that are at work, uint8 [count, row_bytes]: a file's where they are too many."""
        if count * row_bytes <= 1e6 * resident_mb:
            return np.empty((count, row_bytes), np.uint8)
        return self.rows(name, count, row_bytes).array

    def folder(self, name: str) -> Path | None:
        """Return where to keep what outlives the process, None where nothing does."""
        return None if self._folder is None else self._folder / name

    def close(self) -> None:
        """Remove the files: the run is over. Rows in use stay readable."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            try:
                self._folder.parent.rmdir()
            except OSError:
                pass  # other nodes of the run are still there
