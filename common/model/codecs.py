"""Codecs: conversion of a flat model to the bytes of a blob and back.

    blob = [ trainable columns in the codec's form | float32 buffers | int64 buffers ] [ float32
    extras ]

With zstd all before the extras is one frame. Buffers and extras are always transferred exactly.
Buffers are few, and a variance of a normalisation layer that rounding made zero or negative would
ruin the model. `codec_settings.py` lists the codecs. Those that send a part of a change are in
`delta_codecs.py`.

A form converts float32 columns to fewer bytes, in pieces. A piece is small enough that it, its
packed form and the scratch memory fit into a core's second-level cache (1 MB). Pieces are packed
one after another; each form defines the bytes per piece, which depend only on the layout. All
arithmetic uses integers or single float32 operations, so every machine computes the same bits.

A codec whose blob *is* the flat model (`fp32`, bit for bit) needs no copy at either end: chunks are
slices of the model that the node holds, and are assembled in the row that the algorithm reads. The
other forms are assembled at the end of the row and unpacked from its start, so that a parent of
many children needs no further memory. Only zstd's blobs are in separate memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from fedstrata.common.errors import RefusedModel, WireError
from fedstrata.common.model.codec_settings import DELTA, UP, ZSTD, CodecSettings
from fedstrata.common.model.delta_codecs import PIECE_COLUMNS, SCALE_COLUMNS, LossyDelta, blocks_of
from fedstrata.common.model.layout import ModelLayout, Row, Section

PIECE_BYTES: Final = 4 * PIECE_COLUMNS  # packed, at most
# level 3 takes twice the time for the same bytes: after the forms only entropy is left
ZSTD_LEVEL: Final = 1
ZSTD_PIECE_BYTES: Final = 131_072
ZSTD_WINDOW_BYTES: Final = 8_388_608  # limit of a receiver's memory; level 1 uses 512 kB

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Scratch: TypeAlias = npt.NDArray[np.uint32]


# Forms


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns start..stop of a row, and their packed size in bytes."""

    start: int
    stop: int
    nbytes: int


class Form:
    """One encoding of float32 columns: as it is, `column_bytes` for each, its deltas float32
    differences.
    """

    column_bytes: int

    def pieces(self, layout: ModelLayout) -> Iterator[Piece]:
        """Yield the pieces, which cover the trainable columns 0..D in order and may span several
        tensors.
        """
        for start in range(0, layout.parameters, PIECE_COLUMNS):
            stop = min(start + PIECE_COLUMNS, layout.parameters)
            yield Piece(start, stop, self.column_bytes * (stop - start))

    def pack(self, x: Floats, out: Bytes, scratch: Scratch) -> None:
        """Write a piece's columns [n] into `out`, uint8 [nbytes]. `scratch`: uint32 [2,
        PIECE_COLUMNS].
        """
        raise NotImplementedError

    def unpack(self, packed: Bytes, x: Floats) -> None:
        """Write a packed piece's columns [n]. Raises RefusedModel if the bytes are invalid."""
        raise NotImplementedError

    def difference(self, x: Floats, reference: Floats, out: Floats) -> None:
        """Write the difference that `restore` adds to the reference to get x, rounded to 2^-24 of
        the sum.
        """
        np.subtract(x, reference, out=out)

    def restore(self, x: Floats, reference: Floats) -> None:
        """Add the reference to a difference, in place."""
        np.add(x, reference, out=x)


class Planes(Form):
    """float32 with the four bytes of the columns separated: all lowest bytes of a piece, then the
    next ones, ...

    For zstd, which compresses whole floats badly: this order groups signs and exponents. A trained
    ResNet-18 is compressed to 0.84 instead of 0.92, its exclusive or with its predecessor to 0.74
    instead of 0.83, in less time.
    A difference is the exclusive or of the bit patterns. Error: none.
    """

    column_bytes = 4

    def pack(self, x: Floats, out: Bytes, scratch: Scratch) -> None:
        np.copyto(out.reshape(4, -1), x.view(np.uint8).reshape(-1, 4).T)

    def unpack(self, packed: Bytes, x: Floats) -> None:
        planes = packed.reshape(4, -1)
        bits = x.view(np.uint32)
        np.copyto(bits, planes[3])
        for plane in planes[2::-1]:  # shifts are four times as fast as writing every fourth byte
            np.left_shift(bits, 8, out=bits)
            np.bitwise_or(bits, plane, out=bits)

    def difference(self, x: Floats, reference: Floats, out: Floats) -> None:
        np.bitwise_xor(x.view(np.uint32), reference.view(np.uint32), out=out.view(np.uint32))

    def restore(self, x: Floats, reference: Floats) -> None:
        bits = x.view(np.uint32)
        np.bitwise_xor(bits, reference.view(np.uint32), out=bits)


class Half(Form):
    """IEEE 754 binary16, rounded to nearest, ties to even.

    Error: at most 2^-11 |x| for 2^-14 <= |x| <= 65504, at most 2^-25 below that. Values that would
    round above 65504 (|x| >= 65520) become infinite, following the standard, and the receiver
    refuses the model with the entry's name.

    Implemented with integers: numpy's casts take 1.5 times as long, and 10 times for a delta, whose
    columns are mostly subnormal, because each raises a flag. After F. Giesen,
    float_to_half_fast3_rtne (public domain), but without branches. Below 2^-14 the addition of 0.5
    rounds to multiples of 2^-24; from there on the exponent is shifted and the significand rounded.
    The first result is at most 1024, the second at least 1024 where it is valid and less where it
    is not, so the maximum is correct.
    """

    column_bytes = 2

    def pack(self, x: Floats, out: Bytes, scratch: Scratch) -> None:
        bits = x.view(np.int32)
        halves = out.view(np.uint16)
        normal, other = scratch.view(np.int32)[:, : x.size]
        np.bitwise_and(bits, 0x7FFF_FFFF, out=normal)
        np.right_shift(normal, 13, out=other)
        np.bitwise_and(other, 1, out=other)  # ties to even: the bit that becomes the last one
        np.add(normal, 0xFFF - (112 << 23), out=normal)
        np.add(normal, other, out=normal)
        np.right_shift(normal, 13, out=normal)
        np.bitwise_and(bits, 0x7FFF_FFFF, out=other)
        np.minimum(other, 0x3880_0000, out=other)  # 2^-14
        np.add(other.view(np.float32), np.float32(0.5), out=other.view(np.float32))
        np.subtract(other, 0x3F00_0000, out=other)  # 0.5
        np.maximum(normal, other, out=normal)
        if normal.max() >= 0x7C00:  # some value is infinite, NaN or too large
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                np.copyto(halves.view(np.float16), x, casting="unsafe")
            return
        np.right_shift(bits, 16, out=other)
        np.bitwise_and(other, 0x8000, out=other)
        np.bitwise_or(normal, other, out=normal)
        np.copyto(halves, normal, casting="unsafe")

    def unpack(self, packed: Bytes, x: Floats) -> None:
        np.take(_HALVES, packed.view(np.uint16), out=x, mode="clip")


class Brain(Form):
    """bfloat16: the upper half of a float32, rounded to nearest, ties to even.

    Error: at most 2^-8 |x| for |x| >= 2^-126 (8 bits of significand: half of 2^-7), at most 2^-134
    below that. Values that would round above 3.39e38 become infinite. NaN stays NaN.
    """

    column_bytes = 2

    def pack(self, x: Floats, out: Bytes, scratch: Scratch) -> None:
        bits = x.view(np.uint32)
        rounded = scratch[0, : x.size]
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        if np.isnan(x.max()):  # the addition may have turned a NaN into infinity or zero
            nans = np.isnan(x)
            rounded[nans] = (bits[nans] >> 16) | 0x40
        np.copyto(out.view(np.uint16), rounded, casting="unsafe")

    def unpack(self, packed: Bytes, x: Floats) -> None:
        bits = x.view(np.uint32)
        np.copyto(bits, packed.view(np.uint16))
        np.left_shift(bits, 16, out=bits)


class Scaled(Form):
    """int8: x = scale * q with integers -127..127, and a float32 scale, max |x| / 127, for each
    1024 columns.

    A block of columns ends with its tensor: a layer's biases would lose all precision with the
    scale of its neighbour's weights. (1024 instead of 4096: the error of a ResNet-18's delta is a
    fifth smaller for 0.3 % more bytes.) A piece has its scales first, then its integers. A scale is
    rounded up to 17 significant bits, so that scale * q is exact and encoding a decoded model gives
    the same bytes again.

    Error: at most scale/2 (1 + 2^-16), the bracket for the rounding of the division, while |x| <=
    2^127; a block whose scale would be below 2^-126 becomes zeros. A block with NaN or infinity
    gets such a scale and is refused.
    """

    def pieces(self, layout: ModelLayout) -> Iterator[Piece]:
        for entry in layout.entries:
            if entry.section is Section.PARAMETER:
                for start in range(entry.start, entry.stop, PIECE_COLUMNS):
                    stop = min(start + PIECE_COLUMNS, entry.stop)
                    yield Piece(start, stop, 4 * blocks_of(stop - start) + stop - start)

    def pack(self, x: Floats, out: Bytes, scratch: Scratch) -> None:
        for columns, scales, integers in self._parts(x, out):
            quotients = scratch[0, : columns.size].view(np.float32).reshape(columns.shape)
            np.abs(columns, out=quotients)
            scale = _scales(quotients.max(axis=1))
            scales[:] = scale
            # x / inf = 0
            divisor = np.where(np.isfinite(scale) & (scale > 0), scale, np.float32(np.inf))
            with np.errstate(invalid="ignore"):  # inf / inf, NaN: their scale is refused
                np.divide(columns, divisor[:, None], out=quotients)
                np.rint(quotients, out=quotients)
                np.copyto(integers, quotients, casting="unsafe")

    def unpack(self, packed: Bytes, x: Floats) -> None:
        for columns, scales, integers in self._parts(x, packed):
            scale = scales.copy()  # aligned
            if not (scale.min() >= 0 and scale.max() < np.inf):  # NaN is neither
                raise RefusedModel(
                    f"a scale of int8 is {scale[~((scale >= 0) & (scale < np.inf))][0]}"
                )
            np.copyto(columns, integers)
            with np.errstate(over="ignore"):  # overflows are refused as infinite
                np.multiply(columns, scale[:, None], out=columns)

    @staticmethod
    def _parts(x: Floats, packed: Bytes) -> Iterator[tuple[Floats, Floats, npt.NDArray[np.int8]]]:
        """Yield the full blocks [k, 1024] and the rest [1, r], each with its scales [k] and
        integers.
        """
        blocks = blocks_of(x.size)
        whole = x.size // SCALE_COLUMNS
        scales = packed[: 4 * blocks].view(np.float32)
        integers = packed[4 * blocks :].view(np.int8)
        end = whole * SCALE_COLUMNS
        if whole:
            shape = whole, SCALE_COLUMNS
            yield x[:end].reshape(shape), scales[:whole], integers[:end].reshape(shape)
        if blocks > whole:
            yield x[None, end:], scales[whole:], integers[None, end:]


def _scales(largest: Floats) -> Floats:
    scale = largest / np.float32(127)
    rounded = ((scale.view(np.uint32) + 0x7F) & 0xFFFF_FF80).view(np.float32)
    rounded = np.where(np.isfinite(scale), rounded, scale)
    return np.where(rounded < np.finfo(np.float32).tiny, np.float32(0), rounded)


with np.errstate(invalid="ignore"):  # ARM's processors flag signalling NaNs, which are among them
    _HALVES: Final = np.arange(65_536, dtype=np.uint16).view(np.float16).astype(np.float32)


_FORMS: Final[dict[str, Form]] = {
    "fp32": Planes(),
    "fp16": Half(),
    "bf16": Brain(),
    "int8": Scaled(),
}


# Codecs


class Codec(Protocol):
    """One form of a model for transfer. Rows are uint8 [row_bytes]; methods may be called from any
    thread.

    `is_row`: the blob is the row, nothing is encoded. `exact`: the decoded model equals the
    original bit for bit. `delta`: `encode` and `decode` need a `reference`, a row that both ends
    hold. `fixed`: every blob has exactly `size` bytes, else at most. Except for deltas, encoding a
    decoded model gives the same bytes again.
    """

    name: str
    is_row: bool
    exact: bool
    delta: bool
    fixed: bool

    def size(self, layout: ModelLayout) -> int:
        """Return the size of a blob in bytes for this layout, or its upper limit."""

    def encode(
        self,
        layout: ModelLayout,
        row: Row,
        *,
        reference: Row | None = None,
        out: Row | None = None,
        chance: np.random.Generator | None = None,
    ) -> memoryview:
        """Return the blob, in `out` (uint8 [size] or more; None: new memory) or sharing the row's
        memory.

        `chance`: random numbers, which codecs of changes need.
        """

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        """Return the memory in which to assemble a blob of `size` bytes for this row; it may be
        part of the row.
        """

    def decode(
        self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None
    ) -> None:
        """Decode the assembled blob into the row; does nothing if they share memory.

        Raises WireError or RefusedModel if the blob is invalid. NaN and Inf pass, see
        `ModelLayout.check_finite`.
        """


class Fp32:
    """float32 and int64 columns as in the row, little-endian. Error: none."""

    name = "fp32"
    is_row = True
    exact = True
    delta = False
    fixed = True

    def size(self, layout: ModelLayout) -> int:
        return layout.row_bytes

    def encode(
        self,
        layout: ModelLayout,
        row: Row,
        *,
        reference: Row | None = None,
        out: Row | None = None,
        chance: np.random.Generator | None = None,
    ) -> memoryview:
        return row.data

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        return row.data

    def decode(
        self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None
    ) -> None:
        pass  # assembled in place


class Packed:
    """A form of the trainable columns, of a difference if `delta`, and zstd over the whole blob if
    not `fixed`.

    Error: the form's; for a lossy delta the error of the difference plus that of its addition:
    2^-24 of each.
    """

    is_row = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._form_name = next(part for part in name.split("+") if part in _FORMS)
        self._form = _FORMS[self._form_name]
        self.exact = self._form_name == "fp32"
        self.delta = name.startswith(DELTA)
        self.fixed = not name.endswith(ZSTD)

    def size(self, layout: ModelLayout) -> int:
        plain = self._plain_size(layout)
        return (plain if self.fixed else _bound(plain)) + 4 * layout.extras

    def encode(
        self,
        layout: ModelLayout,
        row: Row,
        *,
        reference: Row | None = None,
        out: Row | None = None,
        chance: np.random.Generator | None = None,
    ) -> memoryview:
        blob = np.empty(self.size(layout), np.uint8) if out is None else out
        if self.fixed:
            end = sum(packed.size for packed in self._pack(layout, row, reference, blob))
        else:
            end = _compress(
                self._pack(layout, row, reference, None), blob, self._plain_size(layout)
            )
        whole = end + 4 * layout.extras
        blob[end:whole] = row[layout.model_bytes :]
        return blob.data[:whole]

    def buffer(self, layout: ModelLayout, row: Row, *, size: int) -> memoryview:
        # Unpacking from the start of the row must not overtake the packed bytes at its end. It
        # cannot if no piece is larger than its columns. int8's pieces of a single column are larger
        # by a byte.
        if self.fixed and all(
            piece.nbytes <= 4 * (piece.stop - piece.start) for piece in self._pieces(layout)
        ):
            return row.data[layout.row_bytes - size :]
        return np.empty(size, np.uint8).data

    def decode(
        self, layout: ModelLayout, blob: memoryview, row: Row, *, reference: Row | None = None
    ) -> None:
        extras = 4 * layout.extras
        if len(blob) < extras:
            raise WireError(f"a blob of {len(blob)} bytes is too short")
        row[layout.model_bytes :] = np.frombuffer(blob, np.uint8)[len(blob) - extras :]
        blob = blob[: len(blob) - extras]
        source: _BlobSource = _Plain(blob) if self.fixed else _ZstdFrame(blob)
        columns_D = layout.floats(row)
        against_D = layout.floats(self._required(reference)) if self.delta else None
        piece_bytes = np.empty(PIECE_BYTES, np.uint8)
        for piece in self._pieces(layout):
            packed = piece_bytes[: piece.nbytes]
            columns = columns_D[piece.start : piece.stop]
            source.read(packed)  # a copy: the source may be part of the row
            try:
                self._form.unpack(packed, columns)
            except RefusedModel as error:
                name = next(
                    entry.name
                    for entry in layout.entries
                    if entry.start <= piece.start < entry.stop
                )
                raise RefusedModel(f"entry {name}: {error}") from None
            if against_D is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    self._form.restore(columns, against_D[piece.start : piece.stop])
        source.read(row[4 * layout.parameters : layout.model_bytes])
        source.close()

    def _pack(
        self, layout: ModelLayout, row: Row, reference: Row | None, blob: Bytes | None
    ) -> Iterator[Bytes]:
        """Yield the parts of the blob in order, written into `blob`, or else valid until the next
        one.
        """
        columns_D = layout.floats(row)
        against_D = layout.floats(self._required(reference)) if self.delta else None
        scratch = np.empty((2, PIECE_COLUMNS), np.uint32)
        differences = np.empty(PIECE_COLUMNS, np.float32)
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


class _ZstdFrame:
    """A blob of one zstd frame, decompressed only as far as requested, whatever size its header
    declares.
    """

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
    chunker = zstandard.ZstdCompressor(level=ZSTD_LEVEL).chunker(
        size=size, chunk_size=ZSTD_PIECE_BYTES
    )
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
    """Return the upper limit of zstd's output for this input size (`ZSTD_COMPRESSBOUND` in
    zstd.h).
    """
    return size + (size >> 8) + (max(0, 131_072 - size) >> 11)


@lru_cache(maxsize=64)
def _pieces(form: str, layout: ModelLayout) -> tuple[Piece, ...]:
    return tuple(_FORMS[form].pieces(layout))


BUILT_IN: Final[dict[str, Codec]] = {name: Packed(name) for name in UP} | {Fp32.name: Fp32()}


def codec_of(name: str | CodecSettings) -> Codec:
    """Return a codec by its wire name, or by its settings. Raises WireError; InvalidExperiment for
    own code.
    """
    if isinstance(name, CodecSettings):
        return BUILT_IN.get(name.name) or LossyDelta(name)
    try:
        return BUILT_IN[name]
    except KeyError:
        raise WireError(f"unknown codec {name[:32]!r}; known: {', '.join(BUILT_IN)}") from None
