"""Codecs: conversion of a flat model to the bytes of a blob and back.

    blob = [ trainable columns in the codec's form | float32 buffers | int64 buffers ] [ float32 extras ]

With zstd all before the extras is one frame. Buffers and extras are always transferred exactly. Buffers are few, and a
variance of a normalisation layer that rounding made zero or negative would ruin the model. `common.experiment.links`
lists the codecs; `common.model.quantizers` has the forms and their errors.

A codec whose blob *is* the flat model (`fp32`, bit for bit) needs no copy at either end: chunks are slices of the model
that the node holds, and are assembled in the row that the algorithm reads. The other forms are assembled at the end of
the row and unpacked from its start, so that a parent of many children needs no further memory. Only zstd's blobs are in
separate memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import zstandard

from common.errors import RefusedModel, WireError
from common.experiment.links import DELTA, UP, ZSTD
from common.model.layout import ModelLayout, Row
from common.model.quantizers import PIECE_BYTES, PIECE_COLUMNS, Brain, Bytes, Form, Half, Piece, Planes, Scaled

ZSTD_LEVEL: Final = 1  # level 3 takes twice the time for the same bytes: after the forms only entropy is left
ZSTD_PIECE_BYTES: Final = 131_072
ZSTD_WINDOW_BYTES: Final = 8_388_608  # limit of a receiver's memory; level 1 uses 512 kB

_FORMS: Final[dict[str, Form]] = {"fp32": Planes(), "fp16": Half(), "bf16": Brain(), "int8": Scaled()}


class Codec(Protocol):
    """One form of a model for transfer. Rows are uint8 [row_bytes]; methods may be called from any thread.

    `is_row`: the blob is the row, nothing is encoded. `exact`: the decoded model equals the original bit for bit.
    `delta`: `encode` and `decode` need a `reference`, a row that both ends hold. `fixed`: every blob has exactly `size`
    bytes, else at most. Except for deltas, encoding a decoded model gives the same bytes again.
    """

    name: str
    is_row: bool
    exact: bool
    delta: bool
    fixed: bool

    def size(self, layout: ModelLayout) -> int:
        """Return the size of a blob in bytes for this layout, or its upper limit."""

    def encode(
        self, layout: ModelLayout, row: Row, *, reference: Row | None = None, out: Row | None = None
    ) -> memoryview:
        """Return the blob, in `out` (uint8 [size] or more; None: new memory) or sharing the row's memory."""

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        """Return the memory in which to assemble a blob of `size` bytes for this row; it may be part of the row."""

    def decode(self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None) -> None:
        """Decode the assembled blob into the row; does nothing if they share memory.

        Raises WireError or RefusedModel if the blob is invalid. NaN and Inf pass, see `ModelLayout.check_finite`.
        """


class Fp32:
    """float32 and int64 columns as in the row, little-endian. Error: none."""

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
    """A form of the trainable columns, of a difference if `delta`, and zstd over the whole blob if `zstd`.

    Error: the form's; for a lossy delta the error of the difference plus that of its addition: 2^-24 of each.
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
        return (plain if self.fixed else _bound(plain)) + 4 * layout.extras

    def encode(
        self, layout: ModelLayout, row: Row, *, reference: Row | None = None, out: Row | None = None
    ) -> memoryview:
        blob = np.empty(self.size(layout), np.uint8) if out is None else out
        if self.fixed:
            end = sum(packed.size for packed in self._pack(layout, row, reference, blob))
        else:
            end = _compress(self._pack(layout, row, reference, None), blob, self._plain_size(layout))
        whole = end + 4 * layout.extras
        blob[end:whole] = row[layout.model_bytes :]
        return blob.data[:whole]

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        # Unpacking from the start of the row must not overtake the packed bytes at its end. It cannot if no piece is
        # larger than its columns. int8's pieces of a single column are larger by a byte.
        if self.fixed and all(piece.nbytes <= 4 * (piece.stop - piece.start) for piece in self._pieces(layout)):
            return row.data[layout.row_bytes - size :]
        return np.empty(size, np.uint8).data

    def decode(self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None) -> None:
        extras = 4 * layout.extras
        if len(blob) < extras:
            raise WireError(f"a blob of {len(blob)} bytes is too short")
        row[layout.model_bytes :] = np.frombuffer(blob, np.uint8)[len(blob) - extras :]
        blob = blob[: len(blob) - extras]
        source: _BlobSource = _Plain(blob) if self.fixed else _Frame(blob)
        columns_D = layout.floats(row)
        against_D = layout.floats(self._required(reference)) if self.delta else None
        piece_bytes = np.empty(PIECE_BYTES, np.uint8)
        for piece in self._pieces(layout):
            packed, columns = piece_bytes[: piece.nbytes], columns_D[piece.start : piece.stop]
            source.read(packed)  # a copy: the source may be part of the row
            try:
                self._form.unpack(packed, columns)
            except RefusedModel as error:
                raise RefusedModel(f"entry {_entry_at(layout, piece)}: {error}") from None
            if against_D is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    self._form.restore(columns, against_D[piece.start : piece.stop])
        source.read(row[4 * layout.parameters : layout.model_bytes])
        source.close()

    def _pack(self, layout: ModelLayout, row: Row, reference: Row | None, blob: Bytes | None) -> Iterator[Bytes]:
        """Yield the parts of the blob in order, written into `blob`, or else valid until the next one."""
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
        tail = row[4 * layout.parameters : layout.model_bytes]
        if blob is not None:
            blob[at : at + tail.size] = tail
        yield tail

    def _pieces(self, layout: ModelLayout) -> tuple[Piece, ...]:
        return _pieces(self._form_name, layout)

    def _plain_size(self, layout: ModelLayout) -> int:
        tail = layout.model_bytes - 4 * layout.parameters
        return sum(piece.nbytes for piece in self._pieces(layout)) + tail

    def _required(self, reference: Row | None) -> Row:
        if reference is None:
            raise AssertionError(f"{self.name} needs a reference")
        return reference


class _BlobSource(Protocol):
    def read(self, target: Bytes) -> None: ...

    def close(self) -> None: ...


class _Plain:
    """An uncompressed blob, read in order."""

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
    """A blob of one zstd frame, decompressed only as far as requested, whatever size its header declares."""

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
            raise WireError(f"not a zstd frame: {error}") from None


def _compress(parts: Iterator[Bytes], blob: Bytes, size: int) -> int:
    """Write the parts, `size` bytes together, as one frame into `blob` and return its length."""
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
    return at


def _bound(size: int) -> int:
    """Return the upper limit of zstd's output for this input size (`ZSTD_COMPRESSBOUND` in zstd.h)."""
    return size + (size >> 8) + (max(0, 131_072 - size) >> 11)


@lru_cache(maxsize=64)
def _pieces(form: str, layout: ModelLayout) -> tuple[Piece, ...]:
    return tuple(_FORMS[form].pieces(layout))


def _entry_at(layout: ModelLayout, piece: Piece) -> str:
    return next(entry.name for entry in layout.entries if entry.start <= piece.start < entry.stop)


def _build(name: str) -> Codec:
    form = next(part for part in name.split("+") if part in _FORMS)
    return Packed(form, delta=name.startswith(DELTA), zstd=name.endswith(ZSTD))


CODECS: Final[dict[str, Codec]] = {name: Fp32() if name == Fp32.name else _build(name) for name in UP}


def codec_of(name: str) -> Codec:
    """Return a codec by its wire name. Raises WireError."""
    try:
        return CODECS[name]
    except KeyError:
        raise WireError(f"unknown codec {name[:32]!r}; known: {', '.join(CODECS)}") from None
