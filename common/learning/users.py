"""One user's samples, read from a stored data set without those of the others.

A stored set whose samples are in the order of their users has each user's span in its facts, with a
digest of it. So a device of one user reads and checks its own rows, and of the others the labels
alone, in blocks, for the split's digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from xxhash import xxh3_64

SPANS: Final = "spans"  # of a stored set's facts
USERS_MOST: Final = 10_000  # whose spans are in the facts
BLOCK_BYTES: Final = 1 << 20
TENSORS: Final = ("train", "test")  # and `_labels` of each
OWNERS: Final = ("owners", "test_owners")  # of both: whose each sample is

Span: TypeAlias = tuple[int, int, str]  # its begin and its end, and the digest of what is between


def spans_of(tensors: Mapping[str, Tensor], users: int) -> dict[str, list[Span]]:
    """Return each user's span of the training and of the test samples; empty without users, or if
    they are mixed.
    """
    if not 0 < users <= USERS_MOST or not all(name in tensors for name in OWNERS):
        return {}
    found = {}
    for name, owner in zip(TENSORS, OWNERS, strict=True):
        owners = tensors[owner].numpy()
        spans = [(0, 0, _digest(tensors, name, 0, 0))] * users
        edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        for start, stop in pairwise(edges):
            user = int(owners[start]) if start < stop else -1
            if user >= 0 and spans[user][1]:
                return {}
            if user >= 0:
                spans[user] = start, stop, _digest(tensors, name, start, stop)
        found[name] = spans
    return found


def read(path: Path, user: int) -> tuple[dict[str, Tensor], Mapping[str, Any]] | None:
    """Return a user's rows of the samples and labels of a stored set, and the set's facts; None if
    it has no spans.

    Raises ValueError for other rows than were stored, OSError, SafetensorError.
    """
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        if not (spans := facts.get(SPANS)):
            return None
        found = {}
        for name in TENSORS:
            start, stop, digest = spans[name][user]
            for each in (name, f"{name}_labels"):
                found[each] = file.get_slice(each)[start:stop]
            if _digest(found, name, 0, stop - start) != digest:
                raise ValueError(f"{path}: other {name} samples of user {user} than were stored")
    return found, facts


@lru_cache(maxsize=4)
def split_digest(path: Path, devices: int) -> str | None:
    """Return what `splits.digest_of` returns of the first users' samples, one for each device; None
    with fewer users.

    Raises OSError, SafetensorError.
    """
    with safe_open(path, "pt") as file:
        spans = json.loads(file.metadata()["facts"])[SPANS]["train"]
    if devices > len(spans):
        return None
    total = blake2b(digest_size=8)
    count, labels = _labels(path)
    total.update(count.to_bytes(8, "little"))
    for block in labels:
        total.update(block)
    for start, stop, _ in spans[:devices]:
        total.update((stop - start).to_bytes(8, "little"))
        total.update(np.arange(start, stop, dtype="<i8").tobytes())
    return total.hexdigest()


def _labels(path: Path) -> tuple[int, Iterator[bytes]]:
    """Return how many training labels there are, and their bytes in blocks, int64."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(size))["train_labels"]["data_offsets"]

    def blocks() -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(8 + size + start)
            for place in range(start, stop, BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, stop - place))

    return (stop - start) // torch.int64.itemsize, blocks()


def _digest(tensors: Mapping[str, Tensor], name: str, start: int, stop: int) -> str:
    total = xxh3_64()
    for each in (name, f"{name}_labels"):
        rows = np.ascontiguousarray(tensors[each][start:stop].numpy())
        total.update(rows.reshape(-1).view(np.uint8).data)
    return total.hexdigest()
