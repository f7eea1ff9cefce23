"""Uploads of earlier rounds that a rule keeps: in memory up to a limit, the others in a folder,
mapped when read.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from fedstrata.common.host.files import PARTIAL, writing
from fedstrata.common.lazy import np
from fedstrata.common.methods.rule import RuleContext
from fedstrata.common.model.layout import Row


class CachedUpload:
    """One upload of a child, the round of its arrival, and its loss. The row is read-only."""

    def __init__(
        self, child: str, r: int, loss: float, *, row: Row | None, path: Path | None
    ) -> None:
        self.name = f"{child}@{r}"
        self.child = child
        self.r = r
        self.loss = loss
        self.path = path
        self._memory = row
        self._mapped: mmap.mmap | None = None

    @property
    def in_memory(self) -> bool:
        """Whether the row is held in memory."""
        return self._memory is not None

    @property
    def row(self) -> Row:
        """The row, uint8 [row_bytes], mapped from its file if it is not in memory."""
        if self._memory is not None:
            return self._memory
        if self._mapped is None:
            assert self.path is not None
            with self.path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._mapped, np.uint8)

    def release(self) -> None:
        """Release the pages that were read from a file."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file as soon as the row has no more references."""
        self._mapped = None


class UploadCache:
    """Storage of uploads: up to `memory_bytes` in memory, the others in a folder.

    Without a folder of the node all uploads are kept in memory. Files of an earlier process are
    removed from it.
    """

    def __init__(self, context: RuleContext, *, memory_bytes: float) -> None:
        self._folder = folder = context.folder
        self._row_bytes = context.layout.row_bytes
        self._memory_bytes = memory_bytes
        self._held = 0
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with writing(folder):
                folder.mkdir(parents=True)

    def keep(self, child: str, r: int, row: Row, *, loss: float) -> CachedUpload:
        """Copy an upload. Raises StorageFailed if the file cannot be written."""
        if (folder := self._folder_beyond_memory()) is None:
            self._held += self._row_bytes
            return CachedUpload(child, r, loss, row=row.copy(), path=None)
        path = folder / f"{child}@{r}"
        _write(path, row)
        return CachedUpload(child, r, loss, row=None, path=path)

    def drop(self, kept: CachedUpload) -> None:
        """Remove an upload."""
        if kept.in_memory:
            self._held -= self._row_bytes
        if kept.path is not None:
            kept.path.unlink(missing_ok=True)

    def save(self, folder: Path, uploads: Iterable[CachedUpload]) -> None:
        """Save uploads to another folder by hard links; a written file never changes."""
        for kept in uploads:
            if kept.path is None and self._folder is not None:
                _write(self._folder / kept.name, kept.row)
                kept.path = self._folder / kept.name
            if kept.path is None:
                _write(folder / kept.name, kept.row)
            else:
                _link(kept.path, folder / kept.name)

    def restore(self, folder: Path, child: str, r: int, *, loss: float) -> CachedUpload:
        """Restore a saved upload. Raises OSError, or ValueError if its size differs."""
        path = folder / f"{child}@{r}"
        if path.stat().st_size != self._row_bytes:
            raise ValueError(f"{path} is not a model of {self._row_bytes} bytes")
        if (own := self._folder_beyond_memory()) is None:
            return self.keep(child, r, np.fromfile(path, np.uint8), loss=loss)
        _link(path, own / path.name)
        return CachedUpload(child, r, loss, row=None, path=own / path.name)

    def _folder_beyond_memory(self) -> Path | None:
        if self._held + self._row_bytes <= self._memory_bytes:
            return None
        return self._folder


def _write(path: Path, row: Row) -> None:
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        with partial.open("wb") as file:  # not synced: the files of an earlier process are removed
            file.write(row.data)
        os.replace(partial, path)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        pass  # of a restoration that failed; a written file never changes
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
