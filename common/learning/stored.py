"""Data sets and splits that the processes of one host share: each is stored once, in a file that
they map.

A file in safetensors' format is named by a digest of everything its content depends on, so a stale
file is never found. Its content is checked against its own digest, and a damaged file is recreated.
Mapped pages are part of the kernel's cache: all processes share them, and the kernel drops them
when memory is short. The least recently used files are removed when all files together exceed
MOST_BYTES; processes that have mapped them can still use them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedstrata.common.errors import in_words
from fedstrata.common.host.files import PARTIAL, private, private_folder
from fedstrata.common.model import tensors

MOST_BYTES: Final = 16 << 30
SMALL_BYTES: Final = 8 << 20  # of source files; each process reads smaller ones itself

log = logging.getLogger("fedstrata.data")


@dataclass(frozen=True, slots=True)
class Stored:
    """Read-only tensors by name, and `facts` that JSON can hold."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def folder() -> Path:
    """Return the folder of the files: $XDG_CACHE_HOME/fedstrata/data, by default below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fedstrata" / "data"


def digest_of(facts: object, files: Iterable[Path]) -> str:
    """Return 32 hexadecimal digits over facts and the files' paths, sizes and modification
    times.
    """
    stats = [
        (str(path.absolute()), (stat := path.stat()).st_size, stat.st_mtime_ns)
        for path in sorted(files)
    ]
    return blake2b(json.dumps([facts, stats], default=str).encode(), digest_size=16).hexdigest()


def shared(digest: str, make: Callable[[], Stored]) -> Stored:
    """Return the content of this digest's file; the first process creates it, others wait
    meanwhile.

    If the folder cannot be used, `make` is called in this process only. Raises what `make` raises.
    """
    made: Stored | None = None
    try:
        place = folder()
        path = place / f"{digest}.safetensors"
        for each in (place.parent, place):
            private_folder(each)  # else other users could replace the data
        if (found := _read(path)) is not None:
            return found
        with _locked(place / "lock"):
            if (found := _read(path)) is not None:
                return found
            made = make()
            _write(path, made)
            _remove_old(place, but=path)
            if (found := _read(path)) is None:
                raise OSError(f"{path} cannot be read again")
    except (OSError, RuntimeError) as error:  # no home is a RuntimeError
        log.warning("this process keeps its own copy of the data: %s", in_words(error))
        if made is None:
            return make()
        return made
    made = None
    _give_back()
    return found


def file_of(digest: str, make: Callable[[], Stored]) -> Path | None:
    """Return this digest's file, which is created if it is missing, unchecked; None if the folder
    cannot be used.

    Raises what `make` raises.
    """
    try:
        place = folder()
        path = place / f"{digest}.safetensors"
        for each in (place.parent, place):
            private_folder(each)
        with _locked(place / "lock"):
            if not path.exists():
                _write(path, make())
                _remove_old(place, but=path)
        os.utime(path)  # marks its use
    except (OSError, RuntimeError):
        return None
    _give_back()
    return path


def _read(path: Path) -> Stored | None:
    """Return a file's content, mapped; None if the file is missing or damaged.

    It is checked in a mapping of its own, so that a process holds only the pages that it uses
    later.
    """
    try:
        checked, meta = _mapped(path)
        if tensors.content(_arrays(checked), meta) != meta.get(tensors.CONTENT):
            raise ValueError("its digest is another")
        del checked
        stored, _ = _mapped(path)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        log.warning("%s is damaged (%s); it will be recreated", path, error)
        return None
    with suppress(OSError):
        os.utime(path)  # marks its use
    return stored


def _mapped(path: Path) -> tuple[Stored, Mapping[str, str]]:
    """Return a file's tensors, mapped, and its metadata."""
    with safe_open(path, "pt") as file:
        # Private pages: an accidental write would not reach other processes.
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        meta = file.metadata() or {}
    return Stored(found, json.loads(meta["facts"])), meta


def _write(path: Path, stored: Stored) -> None:
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "wb", opener=private) as file:  # not synced: a damaged file is recreated
        tensors.write(file, _arrays(stored), {"facts": json.dumps(stored.facts)})
    os.replace(partial, path)


def _remove_old(place: Path, *, but: Path) -> None:
    """Remove unfinished files of other processes, and files beyond the limit, least recently used
    first.
    """
    for partial in place.glob(f"*{PARTIAL}"):
        partial.unlink()
    files = [(path.stat(), path) for path in place.glob("*.safetensors") if path != but]
    total = but.stat().st_size
    for stat, path in sorted(files, key=lambda file: -file[0].st_mtime):
        total += stat.st_size
        if total > MOST_BYTES:
            path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it if the process dies."""
    with open(path, "wb", opener=private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _arrays(stored: Stored) -> tensors.Tensors:
    return {name: tensor.numpy() for name, tensor in stored.tensors.items()}


def _give_back() -> None:
    """Return freed memory to the kernel, which malloc would keep (see `common.host.memory`)."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
