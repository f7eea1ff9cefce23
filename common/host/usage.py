"""The disk that a folder takes, and what its file system has left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Final

REST_S: Final = 60.0  # between two counts of all files
REST_RATIO: Final = 50.0  # of the time that a count took, for a folder of very many files
BLOCK_BYTES: Final = 512  # of st_blocks, by POSIX


class FolderUsage:
    """The bytes of a folder's files on disk, counted from time to time, and the free bytes of its file system."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._now = folder, now
        self._used: int | None = None
        self._next = -float("inf")
        self._counting = Lock()  # by one thread at a time; others get the last count

    def used_bytes(self) -> int | None:
        """Return the bytes on disk of all files below the folder, None if there is no folder."""
        if self._now() >= self._next and self._counting.acquire(blocking=False):
            try:
                begun = self._now()
                self._used = _bytes_below(self._folder) if self._folder.is_dir() else None
                took_s = self._now() - begun
                self._next = begun + max(REST_S, REST_RATIO * took_s) if self._used is not None else begun
            finally:
                self._counting.release()
        return self._used

    def free_bytes(self) -> int | None:
        """Return the bytes that this user can still write to its file system, None if there is no folder."""
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize


def _bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder, except those that cannot be read or disappear meanwhile."""
    count, left = 0, [str(folder)]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        count += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
        except OSError:
            continue
    return count
