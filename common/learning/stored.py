"""Data sets that the processes of one host share: each is stored once, in a file that they map.

A file, of safetensors' format, is named by a digest of all that its content depends on, so one that is stale is never
found; its content is compared with its own digest, and a damaged one is made anew. Mapped pages are the kernel's cache:
every process sees the same ones, and short of memory it drops them. Of the files that were not used for longest, those
beyond MOST_BYTES are removed; processes that have them mapped keep them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import platform
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64

MOST_BYTES: Final = 16 << 30
SMALL_BYTES: Final = 8 << 20  # of source files, below which each process reads them itself

PARTIAL: Final = ".partial"

log = logging.getLogger("fedstrata.data")

_NAMES: Final = {torch.int64: "I64", torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors by name, not to be written into, and `facts`, which JSON can hold."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def folder() -> Path:
    """Return where the files are: $XDG_CACHE_HOME/fedstrata/data, by default below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fedstrata" / "data"


def digest_of(facts: object, files: Iterable[Path]) -> str:
    """Return 32 hexadecimal digits over facts and the files' paths, sizes and times of change."""
    stats = [(str(path.absolute()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(files)]
    return blake2b(json.dumps([facts, stats], default=str).encode(), digest_size=16).hexdigest()


def shared(digest: str, make: Callable[[], Stored]) -> Stored:
    """Return what the file of this digest holds; the first process to ask makes it, those that come meanwhile wait.

    Where the folder cannot be used, what `make` returns is this process's own. Raises what `make` raises.
    """
    made: Stored | None = None
    try:
        place = folder()
        path = place / f"{digest}.safetensors"
        if (found := _read(path)) is not None:
            return found
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place / "lock"):
            if (found := _read(path)) is not None:
                return found
            made = make()
            _write(path, made)
            _remove_old(place, but=path)
            if (found := _read(path)) is None:
                raise OSError(f"{path} cannot be read again")
    except (OSError, RuntimeError) as error:  # no home is a RuntimeError
        log.warning("this process keeps a copy of the data of its own: %s", error)
        return make() if made is None else made
    made = None
    _give_back()
    return found


def _read(path: Path) -> Stored | None:
    """Return what a file holds, mapped; None where there is none, or a damaged one."""
    try:
        with safe_open(path, "pt") as file:
            # Of private pages, so that a write, which is a bug, would not reach other processes.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            meta = file.metadata() or {}
        facts = json.loads(meta["facts"])
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        log.warning("%s is damaged (%s): made anew", path, error)
        return None
    stored = Stored(tensors, facts)
    if _content(stored) != meta.get("content"):
        log.warning("%s is damaged: made anew", path)
        return None
    with suppress(OSError):
        os.utime(path)  # it was used now
    return stored


def _write(path: Path, stored: Stored) -> None:
    ordered = sorted(stored.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # each aligned
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(stored.facts), "content": _content(stored)}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(PARTIAL)
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, tensor in ordered:
            file.write(_bytes(tensor))
    os.replace(partial, path)


def _remove_old(place: Path, *, but: Path) -> None:
    """Remove what another process left unfinished, and the files beyond the most, least recently used first."""
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
    """Be the only process between here and the end; the kernel unlocks for one that dies."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _content(stored: Stored) -> str:
    """Return 16 hexadecimal digits over all that is stored."""
    total = xxh3_64(json.dumps(stored.facts).encode())
    for name, tensor in sorted(stored.tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def _give_back() -> None:
    """Return to the kernel what the making took; malloc would keep it (see `common.host.memory`)."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
