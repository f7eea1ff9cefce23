"""Files of this machine: folders that belong to one user, writes that survive a power loss, and
their errors.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from fedstrata.common.errors import StorageFailed

PARTIAL: Final = ".partial"
TEXT_MB: Final = 1  # of a file of the user's that is read as a whole
RETRY_S: Final = 1.0
_MARKS: Final = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_OTHER_KIND: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)


def private_folder(path: Path) -> None:
    """Create a folder that only this user can read, mode 0700, or check an existing one.

    Raises OSError, also if it is a symbolic link, belongs to another user, or can be written by
    others: they could replace the files in it.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a symbolic link", str(path))
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"it belongs to another user, uid {found.st_uid}", str(path)
        )
    if found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            errno.EPERM, f"other users can write there, mode {mode:04o}", str(path)
        )


def private(path: str, flags: int) -> int:
    """Open a file that only this user can read, mode 0600; the `opener` of `open`. Symbolic links
    are an OSError.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, in one step. Raises OSError."""
    partial = path.with_name(path.name + PARTIAL)
    partial.unlink(missing_ok=True)  # its mode may be another one
    with open(partial, "xb", opener=private) as file:
        file.write(content)
    os.replace(partial, path)


def read_text(path: Path) -> str:
    """Return the text of a file of the user's: UTF-8, or as its byte order mark has it, which
    editors on Windows write.

    Raises OSError, also if it is longer than any such file, which may have no end;
    UnicodeDecodeError.
    """
    most = TEXT_MB << 20
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {TEXT_MB} MB", str(path))
    return content.decode(
        next((codec for mark, codec in _MARKS.items() if content.startswith(mark)), "utf-8")
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError of the `with` block as StorageFailed, with the path and a remedy."""
    try:
        yield
    except OSError as error:
        raise failure(error, path) from error


def check_writable(path: Path) -> None:
    """Make a file's folder, and check that it can be written, before the work that fills it. Raises
    StorageFailed.
    """
    there = path.exists()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not there:
            path.unlink()


def is_of_disk(error: OSError) -> bool:
    """Return whether an error is that of a full or a read-only disk."""
    return error.errno in (*_ROOM, errno.EROFS)


def failure(error: OSError, path: Path) -> StorageFailed:
    """Return the error of a file that could not be written."""
    remedy = "Examine that disk."
    if error.errno in _ROOM:
        remedy = "Make room on that disk."
    elif error.errno in _READ_ONLY:
        remedy = "Make that folder writable."
    elif error.errno in _DESCRIPTORS:
        remedy = (
            "Let this process have more open files and connections: ulimit -n, or "
            "LimitNOFILE of its service."
        )
    elif error.errno in _OTHER_KIND:
        remedy = "Name another place, in a folder that exists."
    return StorageFailed("file", str(path), error.strerror or str(error), remedy)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` when the `with` block ends, completely or not at all.

    That holds for a power loss, too: the content is on the disk before the name. Raises
    StorageFailed.
    """
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder, if there is one, whatever own code has made of the modes in it. Raises
    OSError.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except PermissionError:
        make_usable(path)
        shutil.rmtree(path)


def make_usable(folder: Path) -> None:
    """Let this user read and write all that is in a folder of own code. Raises OSError."""
    folder.chmod(0o700)
    for where, folders, files in os.walk(folder):
        for path in (Path(where, name) for name in (*folders, *files)):
            needed = 0o700 if path.is_dir() else 0o600
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | needed)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do it for folders
            raise
    finally:
        os.close(file)


async def until_written(
    write: Callable[[], Awaitable[None]], *, patience_s: float, warn: Callable[[str], None]
) -> None:
    """Call `write` until it succeeds, with one warning: the run waits for room instead of losing
    what it has computed.

    Raises its last StorageFailed after `patience_s`.
    """
    now = asyncio.get_running_loop().time
    deadline: float | None = None
    while True:
        try:
            await write()
            return
        except StorageFailed as error:
            if deadline is None:
                deadline = now() + patience_s
                warn(f"{error} The run waits for it, for {patience_s:g} s.")
            elif now() >= deadline:
                raise
        await asyncio.sleep(RETRY_S)
