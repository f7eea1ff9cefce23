"""Manifests: the description of a blob, and its validation before anything is allocated."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from fedstrata.common.errors import RefusedModel
from fedstrata.common.protocol.messages import Manifest
from fedstrata.common.settings.links import LinkDirection

MIN_RATED_CHUNK: Final = 32_768
WINDOW_MOST: Final = 64
FROZEN_CODEC: Final = "safetensors"  # of frozen arrays
EXCHANGE: Final = "exchange"  # the codec of keys and shares of a secure sum
EXCHANGE_MOST: Final = 4_000_000  # bytes of them


def describe(
    data: memoryview,
    *,
    chunk_bytes: int,
    codec: str,
    layout: str,
    reference: str = "",
    salt: str = "",
    extras: int = 0,
) -> Manifest:
    """Return the manifest of a blob: xxh3-64 of each chunk, and their hash as the blob's id.

    The same bytes with another `salt` are another blob, whose streams have their own pace. The same
    holds for another `reference`, the id of the model that a delta is based on. `extras`: the last
    bytes that are no model.
    """
    size = data.nbytes
    digests = b"".join(
        chunk_digest(data[at : at + chunk_bytes]) for at in range(0, size, chunk_bytes)
    )
    head = struct.pack("<QQ", size, chunk_bytes) + (codec + layout + reference + salt).encode()
    blob = xxhash.xxh3_64_hexdigest(head + digests)
    return Manifest(blob, size, chunk_bytes, digests, codec, layout, reference, extras)


def renamed(manifest: Manifest, *, salt: str) -> Manifest:
    """Return the manifest of the same bytes and chunks as another blob, as with the salt of
    `describe`.
    """
    return replace(manifest, blob=xxhash.xxh3_64_hexdigest((manifest.blob + salt).encode()))


def chunk_digest(chunk: bytes | memoryview) -> bytes:
    """Return a chunk's 8-byte digest, which detects damage but does not protect against a malicious
    sender.
    """
    return xxhash.xxh3_64_digest(chunk)


def missing(manifest: Manifest, buffer: memoryview) -> npt.NDArray[np.bool_]:
    """Return the chunks, bool [chunks], that a buffer, uint8 [manifest.size], lacks, according to
    their digests.
    """
    data = buffer.cast("B")
    chunks = range(manifest.chunks)
    return np.array(
        [chunk_digest(data[manifest.span(i)]) != manifest.digest(i) for i in chunks], np.bool_
    )


def shared(manifest: Manifest, other: Manifest) -> npt.NDArray[np.bool_]:
    """Return the chunks, bool [chunks], that another blob has at the same place; none if its chunks
    differ in size.
    """
    if (manifest.size, manifest.chunk_bytes) != (other.size, other.chunk_bytes):
        return np.zeros(manifest.chunks, np.bool_)
    digests, others = (np.frombuffer(m.digests, np.uint64) for m in (manifest, other))
    return np.equal(digests, others, dtype=np.bool_)


def chunk_bytes_for(rate_bytes_s: float | None, most: int) -> int:
    """Return the chunk size for a link: half a second of its rate, between 32 KB and `most`
    bytes.
    """
    if rate_bytes_s is None:
        return most
    return max(MIN_RATED_CHUNK, min(most, int(rate_bytes_s / 2)))


def window_for(way: LinkDirection, chunk_bytes: int, usual: int, keepalive_s: float) -> int:
    """Return the number of chunks in flight on a link, from 2 to WINDOW_MOST.

    Twice the number that the link holds in a round trip, or `usual` if that is more. They take at
    most a third of the keep-alive time: pings wait behind them and must return in time.
    """
    if way.rate is None:
        return usual
    held = way.rate * 2 * way.delay_s / chunk_bytes
    wanted = min(max(usual, math.ceil(2 * held)), WINDOW_MOST)
    return max(2, int(min(wanted, keepalive_s / 3 * way.rate / chunk_bytes)))


def of_exchange(blob: bytes, *, cut: tuple[int, str]) -> Manifest:
    """Return the manifest of a question or an answer of a secure sum; `cut`: the chunk size, and a
    salt. All of it counts as extras.
    """
    chunk_bytes, salt = cut
    return describe(
        memoryview(blob),
        chunk_bytes=chunk_bytes,
        codec=EXCHANGE,
        layout="",
        reference="",
        salt=salt,
        extras=len(blob),
    )


def check_exchange(manifest: Manifest) -> None:
    """Validate the manifest of a question or an answer of a secure sum. Raises RefusedModel."""
    if (manifest.codec, manifest.layout, manifest.reference) != (EXCHANGE, "", ""):
        raise RefusedModel("a model in place of keys or shares")
    if manifest.size > EXCHANGE_MOST or manifest.extras != manifest.size:
        raise RefusedModel(f"{manifest.size} bytes of keys or shares")


@dataclass(frozen=True, slots=True)
class ModelForm:
    """The required form of a run's models: `size` bytes (at most, if not `exact`) in one codec.

    `layout`: the layout's digest; `delta`: each blob is a delta to a model that its receiver holds;
    `extras`: the bytes behind the model in each blob.
    """

    layout: str
    codec: str
    size: int
    exact: bool
    delta: bool
    extras: int = 0

    def check(self, manifest: Manifest, *, reference: str = "") -> None:
        """Validate the manifest of a model of this run. Raises RefusedModel."""
        against = reference if self.delta else ""
        if manifest.layout != self.layout:
            raise RefusedModel(
                f"wrong layout {manifest.layout[:32]!r}, this run's is {self.layout!r}"
            )
        if manifest.codec != self.codec:
            raise RefusedModel(f"codec {manifest.codec[:32]!r} is not used here: {self.codec}")
        if manifest.size > self.size or (self.exact and manifest.size < self.size):
            at_most = "" if self.exact else "at most "
            raise RefusedModel(
                f"{manifest.size} bytes, a model of this run has {at_most}{self.size}"
            )
        if manifest.extras != self.extras:
            raise RefusedModel(
                f"{manifest.extras} bytes of extras, a blob of this tier has {self.extras}"
            )
        if manifest.reference != against:
            raise RefusedModel(
                f"wrong reference model {manifest.reference!r}, expected {against!r}"
            )
