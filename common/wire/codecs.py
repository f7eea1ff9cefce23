"""How a row becomes a blob's bytes and back.

A codec whose blob *is* the row (`fp32`, bit for bit) needs no copy at either end: chunks are cut from the
row that the node holds, and assembled in the row that the algorithm will read.
"""

from __future__ import annotations

from typing import Final, Protocol

from common.errors import WireError
from common.layout import ModelLayout, Row


class Codec(Protocol):
    """One form of a model on the wire."""

    name: str

    def size(self, layout: ModelLayout) -> int:
        """Return the blob's bytes for this layout."""

    def encode(self, layout: ModelLayout, row: Row) -> memoryview:
        """Return the blob; it may share the row's memory."""

    def buffer(self, layout: ModelLayout, row: Row) -> memoryview:
        """Return where to assemble a blob that will become this row; it may be the row itself."""

    def decode(self, layout: ModelLayout, blob: memoryview, row: Row) -> None:
        """Turn the assembled blob into the row; nothing to do where they share memory."""


class Fp32:
    """float32 and int64 columns as they lie in the row, little-endian. Error: none."""

    name = "fp32"

    def size(self, layout: ModelLayout) -> int:
        return layout.row_bytes

    def encode(self, layout: ModelLayout, row: Row) -> memoryview:
        return row.data

    def buffer(self, layout: ModelLayout, row: Row) -> memoryview:
        return row.data

    def decode(self, layout: ModelLayout, blob: memoryview, row: Row) -> None:
        pass  # assembled in place


CODECS: Final[dict[str, Codec]] = {codec.name: codec for codec in (Fp32(),)}


def codec_of(name: str) -> Codec:
    """Return a codec by its wire name. Raises WireError."""
    try:
        return CODECS[name]
    except KeyError:
        raise WireError(f"unknown codec {name[:32]!r}; known: {', '.join(CODECS)}") from None
