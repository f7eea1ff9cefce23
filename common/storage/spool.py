"""Memory for assembling models: heap memory, or files that outlive the process.

A node that is killed during a transfer finds its chunks again: the file is checked against the
manifest's digests, so there is no index and the file need not be trusted. The kernel keeps the
files in its page cache and may write them to disk when memory is short, whereas heap memory must
fit.

The files are their user's alone: folders have mode 0700, files 0600, and symbolic links are not
followed. Else another user, who can predict the names, could read models or have this user's files
overwritten.

A process holds a lock on the folder of its run, which the kernel releases if it is killed. When a
process begins with a run, it removes what no process holds: runs that were not used for a week, and
while all runs together take more than `SHARE` of the disk, the one that was not used for the
longest time. The last one is kept: it may be resumed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from fedstrata.common.errors import StorageFailed
from fedstrata.common.host.files import private, private_folder, write_private
from fedstrata.common.processes.shared_rows import map_file, new_row

KEPT_S: Final = 7 * 86_400.0
SHARE: Final = 0.1  # of the disk
SECRET_BYTES: Final = 32
COUNTS: Final = "samples"  # of the children, in JSON
DIGEST_BYTES: Final = 8
FROZEN: Final = "frozen"  # a folder that is no run's
FROZEN_KEPT: Final = 2  # of each node
FROZEN_KEPT_S: Final = 30 * 86_400.0
# a run's id; the user may have other files in the folder
RUN: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")

log = logging.getLogger("fedstrata.spool")


class Rows:
    """Memory for K models: `array`, uint8 [K, row_bytes], each row contiguous; in a file each
    begins on a new page.

    The file of a single row has its bytes and no others.
    """

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
        """Return, once per row, whether an earlier process may have left chunks of a model in this
        row.
        """
        found = place in self._found
        self._found.discard(place)
        return found

    def release(self, place: int | None = None) -> None:
        """Release the resident memory of one row, or of all rows, of a file; do nothing if all rows
        may stay resident.

        The rows are read from the file again when needed.
        """
        if self._mapped is None or not self._releasable:
            return
        stride = self.array.strides[0]
        start, length = (0, len(self._mapped)) if place is None else (place * stride, stride)
        self._mapped.madvise(mmap.MADV_DONTNEED, start, length)


class _RunLock:
    """A lock on the folder of a run, shared by all its nodes, which ends with this object or with
    the process.
    """

    def __init__(self, folder: Path) -> None:
        self.found = folder.lstat()
        self._release = weakref.finalize(self, os.close, _locked(folder, fcntl.LOCK_SH))


# one for each run: a process may have many nodes
_LOCKS: Final = weakref.WeakValueDictionary[Path, _RunLock]()


class Spool:
    """One node's files in one run; only memory if `folder` is None. `lock`: on the folder of the
    run.
    """

    def __init__(self, folder: Path | None, lock: _RunLock | None = None) -> None:
        self._folder = folder
        self._lock = lock
        self._temporary: Path | None = None
        self._secret = b""
        self._counts: dict[str, int] = {}

    @classmethod
    def open(cls, root: Path | None, *, run: str, node: str) -> Spool:
        """Open a node's files, and remove those of other runs as described above; without a root,
        use memory.

        Raises StorageFailed if `root` cannot be written, or is not this user's alone.
        """
        if root is None:
            return cls(None)
        folder = root / run / node
        try:
            private_folder(root)
            if (lock := _lock(folder)) is not _LOCKS.get(root / run):
                _LOCKS[root / run] = lock
                _remove_others(root, run)
            private_folder(folder)
        except OSError as error:
            where = error.filename or str(root)
            problem = error.strerror or str(error)
            raise StorageFailed(
                "--spool", where, problem, "Name a folder of your own that can be written."
            ) from None
        return cls(folder, lock)

    def rows(self, name: str, count: int, row_bytes: int, *, resident_bytes: float = 0.0) -> Rows:
        """Return rows for models, in a file of this name if there is a folder; `resident_bytes` may
        stay resident.

        Falls back to memory, with a warning, if the file cannot be used: a full disk, a symbolic
        link.
        """
        if self._folder is None or count == 0:
            return Rows(_in_memory(count, row_bytes))
        path = self._folder / name
        stride = row_bytes if count == 1 else -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = count * stride
        try:
            with open(path, "a+b", opener=private) as file:
                found = os.fstat(file.fileno()).st_size == size
                if not found:
                    file.truncate(0)
                    # a full disk is an error here, not a SIGBUS later
                    os.posix_fallocate(file.fileno(), 0, size)
                mapped = map_file(file.fileno(), size)
        except OSError as error:
            log.warning(
                "no room for %d bytes at %s (%s): kept in memory", size, path, error.strerror
            )
            with suppress(OSError):
                path.unlink()
            return Rows(_in_memory(count, row_bytes))
        array = np.frombuffer(mapped, np.uint8).reshape(count, stride)[:, :row_bytes]
        rows_found = range(count) if found else ()
        return Rows(array, mapped, rows_found, resident_bytes)

    def memory(
        self, name: str, count: int, *, row_bytes: int, resident_mb: float
    ) -> npt.NDArray[np.uint8]:
        """Return rows for models in use, uint8 [count, row_bytes]; in a file if they exceed
        `resident_mb`.
        """
        if count * row_bytes <= 1e6 * resident_mb:
            return _in_memory(count, row_bytes)
        return self.rows(name, count, row_bytes).array

    def folder(self, name: str) -> Path | None:
        """Return the folder for persistent data, None if there is none."""
        if self._folder is None:
            return None
        return self._folder / name

    def secret(self, draw: Callable[[int], bytes]) -> bytes:
        """Return the node's secret of the run, drawn once and kept in a file of mode 0600; in
        memory without a folder.

        `draw` returns random bytes. Falls back to memory, with a warning, if the file cannot be
        used.
        """
        if self._secret:
            return self._secret
        self._secret = draw(SECRET_BYTES)
        if self._folder is None:
            return self._secret
        path = self._folder / "secret"
        try:
            found = path.read_bytes() if path.exists() else b""
            if len(secret := _unsealed(found)) == SECRET_BYTES:
                self._secret = secret
            else:
                if found:
                    log.warning("%s is damaged: noise comes from another secret", path)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(path, _sealed(self._secret))
        except OSError as error:
            log.warning("no room for a secret at %s (%s): kept in memory", path, error.strerror)
        return self._secret

    def counts(self) -> dict[str, int]:
        """Return what `keep_counts` kept, nothing, with a warning, if it is damaged."""
        path = self.folder(COUNTS)
        try:
            kept = b"" if path is None else path.read_bytes()
        except OSError:
            kept = b""
        if text := _unsealed(kept):
            self._counts = json.loads(text)
        elif kept:
            log.warning("%s is damaged: numbers of samples are asked for again", path)
        return dict(self._counts)

    def keep_counts(self, counts: Mapping[str, int]) -> None:
        """Keep numbers by name for a restart, if they have changed. They are lost, with a warning,
        without room.
        """
        path = self.folder(COUNTS)
        if path is None or counts == self._counts:
            return
        self._counts = dict(counts)
        try:
            write_private(path, _sealed(json.dumps(self._counts).encode()))
        except OSError as error:
            log.warning(
                "no room for numbers of samples at %s (%s): lost with the process",
                path,
                error.strerror,
            )

    def states(self) -> Path:
        """Return the folder for the states between a node's tasks; a temporary one, lost with the
        process, if none.
        """
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
        self._lock = None


class FrozenFiles:
    """One node's files of frozen arrays, named by their digest.

    Those of a node that stays outlive its runs: it fetches no arrays twice. It keeps the last
    `FROZEN_KEPT`; those of a node that has used none for `FROZEN_KEPT_S` go with the next one.
    Those of a node with one `run` go with its end, so that the bytes of a lab do not depend on
    earlier ones. Nor do they depend on which nodes share a host: each has its own files. Without a
    root they are in a temporary folder, lost with the process.
    """

    def __init__(self, root: Path | None, node: str, *, run: str = "") -> None:
        self._root = root
        self._node = node
        self._run = run
        self._spool: Spool | None = None

    def path(self, digest: str) -> Path:
        """Return the place of a file."""
        return self._folder / digest

    def row(self, digest: str, nbytes: int) -> Rows:
        """Return one row in a file; in memory, with a warning, if the file cannot be used."""
        with suppress(OSError):
            private_folder(self._folder.parent)
            private_folder(self._folder)
        return Spool(self._folder).rows(digest, 1, nbytes)

    def used(self, digest: str) -> None:
        """Note that a file is in use, and remove what is older than the last ones."""
        with suppress(OSError):
            os.utime(self.path(digest))
            own = sorted(self._folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
            others = [] if self._run else self._folder.parent.glob("*/*")
            old = [path for path in others if path.lstat().st_mtime < time.time() - FROZEN_KEPT_S]
            for path in (*own[:-FROZEN_KEPT], *old):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the files of a node with one run."""
        if self._run and "_folder" in vars(self):
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._spool is not None:
            self._spool.close()

    @cached_property
    def _folder(self) -> Path:
        if self._root is not None and not self._run:
            with suppress(OSError):
                private_folder(self._root)
            return self._root / FROZEN / self._node
        with suppress(StorageFailed):  # it cannot be written
            self._spool = Spool.open(self._root, run=self._run, node=self._node)
            if (folder := self._spool.folder(FROZEN)) is not None:
                return folder
        temporary = Path(tempfile.mkdtemp(prefix="fedstrata-frozen-"))
        weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
        return temporary / self._node


def _in_memory(count: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return rows; a single one may be mapped by another process."""
    if count == 1:
        return new_row(row_bytes)[None]
    return np.empty((count, row_bytes), np.uint8)


def _lock(folder: Path) -> _RunLock:
    """Create a node's folder in that of its run, if there is none; return the lock on the latter.
    Raises OSError.
    """
    run = folder.parent
    while True:
        private_folder(run)
        # the last node of another process has removed it: it was empty
        with suppress(FileNotFoundError):
            lock = _LOCKS.get(run)
            if lock is None or not os.path.samestat(run.lstat(), lock.found):
                lock = _RunLock(run)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if os.path.samestat(run.lstat(), lock.found):
                return lock


def _locked(folder: Path, kind: int) -> int:
    """Return a descriptor of a folder that is locked, as far as the file system has locks. Raises
    OSError.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:
        if kind & fcntl.LOCK_NB:
            os.close(file)
            raise  # without locks nobody knows who uses it
    return file


def _remove_others(root: Path, run: str) -> None:
    """Remove the files of other runs that no process uses, so that they are neither old nor
    many.
    """
    others = [
        (*_use(path), path)
        for path in root.iterdir()
        if RUN.fullmatch(path.name) and path.name != run
    ]
    held = sum(size for _, size, _ in others)
    most = SHARE * shutil.disk_usage(root).total
    now = time.time()
    for left, (used_at, size, path) in zip(range(len(others))[::-1], sorted(others), strict=True):
        if (used_at < now - KEPT_S or (held > most and left)) and _remove_unused(path):
            held -= size


def _use(folder: Path) -> tuple[float, int]:
    """Return when a run's files were last written, and the bytes that they take."""
    used_at = size = 0
    with suppress(FileNotFoundError):  # it ends meanwhile
        for path in (folder, *folder.rglob("*")):
            found = path.lstat()
            used_at = max(used_at, found.st_mtime_ns)
            size = size + 512 * found.st_blocks
    return used_at / 1e9, size


def _remove_unused(folder: Path) -> bool:
    """Remove a run's folder and return True, unless a process uses it."""
    try:
        file = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)
    return True


def _sealed(content: bytes) -> bytes:
    """Return the content of a small file with its digest behind it."""
    return content + xxh3_64(content).digest()


def _unsealed(kept: bytes) -> bytes:
    """Return the content of a sealed file, b"" if it is damaged."""
    content = kept[:-DIGEST_BYTES]
    digest = kept[-DIGEST_BYTES:]
    if digest == xxh3_64(content).digest():
        return content
    return b""
