"""Memory for assembling models: heap memory, or files that outlive the process.

A node that is killed during a transfer finds its chunks again: the file is checked against the manifest's digests, so
there is no index and the file need not be trusted. The kernel keeps the files in its page cache and may write them to
disk when memory is short, whereas heap memory must fit.

The files are their user's alone: folders have mode 0700, files 0600, and symbolic links are not followed. Else another
user, who can predict the names, could read models or have this user's files overwritten.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import StorageFailed
from common.host.files import private, private_folder

KEPT_S: Final = 7 * 86_400.0
RUN: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")  # a run's id; the user may have other files in the folder

log = logging.getLogger("fedstrata.spool")


class Rows:
    """Memory for K models: `array`, uint8 [K, row_bytes], each row contiguous; in a file each begins on a new page."""

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
        """Return, once per row, whether an earlier process may have left chunks of a model in this row."""
        found = place in self._found
        self._found.discard(place)
        return found

    def release(self, place: int | None = None) -> None:
        """Release the resident memory of one row, or of all rows, of a file; do nothing if all rows may stay resident.

        The rows are read from the file again when needed.
        """
        if self._mapped is None or not self._releasable:
            return
        stride = self.array.strides[0]
        start, length = (0, len(self._mapped)) if place is None else (place * stride, stride)
        self._mapped.madvise(mmap.MADV_DONTNEED, start, length)


class Spool:
    """One node's files in one run; only memory if `folder` is None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._temporary: Path | None = None

    @classmethod
    def open(cls, root: Path | None, *, run: str, node: str) -> Spool:
        """Open a node's files, and remove those of runs that nobody used for a week; without a root, use memory.

        Raises StorageFailed if `root` cannot be written, or is not this user's alone.
        """
        if root is None:
            return cls(None)
        folder = root / run / node
        try:
            for path in (root, root / run, folder):
                private_folder(path)
            os.utime(root / run)
            for old in root.iterdir():
                with suppress(FileNotFoundError):  # another node removes it, too
                    if RUN.fullmatch(old.name) and old.lstat().st_mtime < time.time() - KEPT_S:
                        shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            where, problem = error.filename or str(root), error.strerror or str(error)
            raise StorageFailed("--spool", where, problem, "Name a folder of your own that can be written.") from None
        return cls(folder)

    def rows(self, name: str, count: int, row_bytes: int, *, resident_bytes: float = 0.0) -> Rows:
        """Return rows for models, in a file of this name if there is a folder; `resident_bytes` may stay resident.

        Falls back to memory, with a warning, if the file cannot be used: a full disk, a symbolic link.
        """
        if self._folder is None or count == 0:
            return Rows(np.empty((count, row_bytes), np.uint8))
        path = self._folder / name
        stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = count * stride
        try:
            with open(path, "a+b", opener=private) as file:
                found = os.fstat(file.fileno()).st_size == size
                if not found:
                    file.truncate(0)
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS later
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            log.warning("no room for %d bytes at %s (%s): kept in memory", size, path, error.strerror)
            with suppress(OSError):
                path.unlink()
            return Rows(np.empty((count, row_bytes), np.uint8))
        array = np.frombuffer(mapped, np.uint8).reshape(count, stride)[:, :row_bytes]
        return Rows(array, mapped, range(count) if found else (), resident_bytes)

    def memory(self, name: str, count: int, *, row_bytes: int, resident_mb: float) -> npt.NDArray[np.uint8]:
        """Return rows for models in use, uint8 [count, row_bytes]; in a file if they exceed `resident_mb`."""
        if count * row_bytes <= 1e6 * resident_mb:
            return np.empty((count, row_bytes), np.uint8)
        return self.rows(name, count, row_bytes).array

    def folder(self, name: str) -> Path | None:
        """Return the folder for persistent data, None if there is none."""
        return None if self._folder is None else self._folder / name

    def states(self) -> Path:
        """Return the folder for the states between a node's tasks; a temporary one, lost with the process, if none."""
        if self._folder is not None:
            return self._folder / "states"
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="fedstrata-states-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        return self._temporary

    def close(self) -> None:
        """Remove the files at the end of the run. Rows in use stay readable."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):  # other nodes of the run still have files
                self._folder.parent.rmdir()
