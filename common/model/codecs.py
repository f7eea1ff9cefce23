"""How a row becomes a blob's bytes and back.

    blob = [ trainable columns in the codec's form | float32 buffers | int64 buffers ]      zstd: the whole, one frame

Buffers travel exactly whatever the form: they are few, and a variance of a normalisation layer that rounding made
zero or negative would ruin the model. `common.experiment.codecs` lists the codecs; the forms and their errors are in
`common.model.quantizers`.

A codec whose blob *is* the row (`fp32`, bit for bit) needs no copy at either end: chunks are cut from the row that
the node holds, and assembled in the row that the algorithm will read. The other forms are assembled at the row's end
and unpacked from its start, so that a parent of many children needs no further memory; only zstd's blobs lie apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import zstandard

from common.errors import RefusedModel, WireError
from common.experiment.codecs import DELTA, FORMS, UP, ZSTD
from common.model.layout import ModelLayout, Row
from common.model.quantizers import PIECE_BYTES, PIECE_COLUMNS, Brain, Bytes, Form, Half, Piece, Planes, Scaled

ZSTD_LEVEL: Final = 1  # level 3 takes twice the time for the same bytes: what is left after the forms is entropy alone
ZSTD_PIECE_BYTES: Final = 131_072
ZSTD_WINDOW_BYTES: Final = 8_388_608  # what a receiver sets aside at most; level 1 uses 512 kB

_FORMS: Final[dict[str, Form]] = dict(zip(FORMS, (Planes(), Half(), Brain(), Scaled()), strict=True))


class Codec(Protocol):
    """One form of a model on the wire. Rows are uint8 [row_bytes]; the calls may come from any thread.

    `is_row`: the blob is the row, nothing is encoded. `exact`: what arrives is bit for bit what was sent. `delta`:
    `encode` and `decode` want the `reference`, a row that both ends hold. `fixed`: every blob has exactly `size`
    bytes, else at most. But for deltas, what was decoded is encoded to the same bytes again.
    """

    name: str
    is_row: bool
    exact: bool
    delta: bool
    fixed: bool

    def size(self, layout: ModelLayout) -> int:
        """Return the blob's bytes for this layout, or the most it may have."""

    def encode(
        self, layout: ModelLayout, row: Row, *, reference: Row | None = None, out: Row | None = None
    ) -> memoryview:
        """Return the blob, in `out` (uint8 [size] or more, fresh memory where None) or sharing the row's memory."""

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        """Return where to assemble a blob of `size` bytes that will become this row; it may be part of the row."""

    def decode(self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None) -> None:
        """Turn the assembled blob into the row; nothing to do where they are the same memory.

        Raises WireError or RefusedModel where it is no such blob. NaN and Inf pass, see `ModelLayout.check_finite`.
        """


class Fp32:
    """float32 and int64 columns as they lie in the row, little-endian. Error: none."""

    name = "fp32"
    is_row, exact, delta, fixed = True, True, False, True

    def size(self, layout: ModelLayout) -> int:
        return layout.row_bytes

    def encode(
        self, layout: ModelLayout, row: Row, *, reference: Row | None = None, out: Row | None = None
    ) -> memoryview:
        return row.data

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        return row.data

    def decode(self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None) -> None:
        pass  # assembled in place


class Packed:
    """A form of the trainable columns, of a difference if `delta`, and zstd over all if `zstd`.

    Error: the form's, and for a lossy delta that of the difference and of adding it again: 2^-24 of each.
    """

    def __init__(self, form: str, *, delta: bool, zstd: bool) -> None:
        self.name = "+".join([DELTA] * delta + [form] + [ZSTD] * zstd)
        self.is_row = False
        self.exact = form == "fp32"
        self.delta = delta
        self.fixed = not zstd
        self._form_name, self._form = form, _FORMS[form]

    def size(self, layout: ModelLayout) -> int:
        plain = self._plain_size(layout)
        return plain if self.fixed else _bound(plain)

    def encode(
        self, layout: ModelLayout, row: Row, *, reference: Row | None = None, out: Row | None = None
    ) -> memoryview:
        blob = np.empty(self.size(layout), np.uint8) if out is None else out
        if self.fixed:
            at = 0
            for packed in self._pack(layout, row, reference, blob):
                at += packed.size
            return blob.data[:at]
        return _compress(self._pack(layout, row, reference, None), blob, self._plain_size(layout))

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        # Unpacking from the row's start must not overtake what is still packed at its end. It does not where no piece
        # is larger than its columns; int8's pieces of a single column are, by a byte.
        if self.fixed and all(piece.nbytes <= 4 * (piece.stop - piece.start) for piece in self._pieces(layout)):
            return row.data[layout.row_bytes - size :]
        return np.empty(size, np.uint8).data

    def decode(self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None) -> None:
        source: _BlobSource = _Plain(blob) if self.fixed else _Frame(blob)
        columns_D = layout.floats(row)
        against_D = layout.floats(self._required(reference)) if self.delta else None
        piece_bytes = np.empty(PIECE_BYTES, np.uint8)
        for piece in self._pieces(layout):
            packed, columns = piece_bytes[: piece.nbytes], columns_D[piece.start : piece.stop]
            source.read(packed)  # away from the row, which it may be part of
            try:
                self._form.unpack(packed, columns)
            except RefusedModel as error:
                raise RefusedModel(f"entry {_entry_at(layout, piece)}: {error}") from None
            if against_D is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    self._form.restore(columns, against_D[piece.start : piece.stop])
        source.read(row[4 * layout.parameters :])
        source.close()

    def _pack(self, layout: ModelLayout, row: Row, reference: Row | None, blob: Bytes | None) -> Iterator[Bytes]:
        """Yield the blob's parts one after another, written into `blob`, or else valid until the next one."""
        columns_D = layout.floats(row)
        against_D = layout.floats(self._required(reference)) if self.delta else None
        scratch, differences = np.empty((2, PIECE_COLUMNS), np.uint32), np.empty(PIECE_COLUMNS, np.float32)
        piece_bytes = np.empty(PIECE_BYTES, np.uint8)
        at = 0
        for piece in self._pieces(layout):
            columns = columns_D[piece.start : piece.stop]
            if against_D is not None:
                difference = differences[: columns.size]
                with np.errstate(over="ignore", invalid="ignore"):
                    self._form.difference(columns, against_D[piece.start : piece.stop], difference)
                columns = difference
            packed = piece_bytes[: piece.nbytes] if blob is None else blob[at : at + piece.nbytes]
            self._form.pack(columns, packed, scratch)
            at += piece.nbytes
            yield packed
        tail = row[4 * layout.parameters :]
        if blob is not None:
            blob[at : at + tail.size] = tail
        yield tail

    def _pieces(self, layout: ModelLayout) -> tuple[Piece, ...]:
        return _pieces(self._form_name, layout)

    def _plain_size(self, layout: ModelLayout) -> int:
        tail = layout.row_bytes - 4 * layout.parameters
        return sum(piece.nbytes for piece in self._pieces(layout)) + tail

    def _required(self, reference: Row | None) -> Row:
        if reference is None:
            raise AssertionError(f"{self.name} wants a reference")
        return reference


class _BlobSource(Protocol):
    def read(self, target: Bytes) -> None: ...

    def close(self) -> None: ...


class _Plain:
    """A blob as it is, read in order."""

    def __init__(self, blob: memoryview) -> None:
        self._bytes = np.frombuffer(blob, np.uint8)
        self._at = 0

    def read(self, target: Bytes) -> None:
        end = self._at + target.size
        if end > self._bytes.size:
            raise WireError(f"a blob of {self._bytes.size} bytes is too short")
        np.copyto(target, self._bytes[self._at : end])
        self._at = end

    def close(self) -> None:
        if self._at < self._bytes.size:
            raise WireError(f"{self._bytes.size - self._at} bytes too many in a blob")


class _Frame:
    """A blob of one zstd frame, decompressed as far as it is asked for, whatever its header promises."""

    def __init__(self, blob: memoryview) -> None:
        inflate = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
        self._reader = inflate.stream_reader(blob)

    def read(self, target: Bytes) -> None:
        if target.size and self._inflate(target) < target.size:
            raise WireError("a zstd frame that ends too early")

    def close(self) -> None:
        if self._inflate(np.empty(1, np.uint8)):
            raise WireError("a zstd frame that holds more than a model")

    def _inflate(self, target: Bytes) -> int:
        try:
            return self._reader.readinto(target.data)
        except (zstandard.ZstdError, MemoryError) as error:
            raise WireError(f"no zstd frame: {error}") from None


def _compress(parts: Iterator[Bytes], blob: Bytes, size: int) -> memoryview:
    """Write the parts, `size` bytes together, as one frame into `blob` and return what it takes."""
    chunker = zstandard.ZstdCompressor(level=ZSTD_LEVEL).chunker(size=size, chunk_size=ZSTD_PIECE_BYTES)
    at = 0

    def write(chunks: Iterator[bytes]) -> None:
        nonlocal at
        for chunk in chunks:
            blob.data[at : at + len(chunk)] = chunk
            at += len(chunk)

    for part in parts:
        write(chunker.compress(part.data))
    write(chunker.finish())  # type: ignore[no-untyped-call]
    return blob.data[:at]


def _bound(size: int) -> int:
    """Return the most that zstd makes of so many bytes (`ZSTD_COMPRESSBOUND` in zstd.h)."""
    return size + (size >> 8) + (max(0, 131_072 - size) >> 11)


@lru_cache(maxsize=64)
def _pieces(form: str, layout: ModelLayout) -> tuple[Piece, ...]:
    return tuple(_FORMS[form].pieces(layout))


def _entry_at(layout: ModelLayout, piece: Piece) -> str:
    return next(entry.name for entry in layout.entries if entry.start <= piece.start < entry.stop)


def _build(name: str) -> Codec:
    form = next(part for part in name.split("+") if part in FORMS)
    return Packed(form, delta=name.startswith(DELTA), zstd=name.endswith(ZSTD))


CODECS: Final[dict[str, Codec]] = {name: Fp32() if name == Fp32.name else _build(name) for name in UP}


def codec_of(name: str) -> Codec:
    """Return a codec by its wire name. Raises WireError."""
    try:
        return CODECS[name]
    except KeyError:
        raise WireError(f"unknown codec {name[:32]!r}; known: {', '.join(CODECS)}") from None
