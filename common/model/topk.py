"""Top-k: the k columns of largest magnitude, exactly, and nothing of the others (Stich et al.
2018).

    k = max(1, ceil(share D));  ties go to the lowest column;  ||d - C(d)||^2 <= (1 - k / D) ||d||^2

Bytes: k float32 values in the order of their columns, then the columns in Elias and Fano's form
(Elias 1974). Of each column p_i the lowest s = floor(log2(D / k)) bits are packed. A bit vector has
a one at floor(p_i / 2^s) + i and zeros elsewhere. That is at most s + 2 bits for a column, 8.6 with
share = 0.01, where its entropy is 8.1. The size is fixed.
"""

from __future__ import annotations

from math import ceil
from typing import Any, Literal

from fedstrata.common.errors import WireError
from fedstrata.common.lazy import np, npt
from fedstrata.common.model.codec_settings import CodecSettings
from fedstrata.common.model.delta_codecs import DeltaCodec
from fedstrata.common.settings.tables import Fraction


class TopKSettings(CodecSettings):
    """The largest changes alone, with their columns; the others are left out."""

    sparse = True

    name: Literal["topk"] = "topk"  # the codec
    share: Fraction = 0.01  # of the trainable columns; about 5 bytes for each

    @property
    def contracts(self) -> bool:
        """Whether a column is left out."""
        return self.share < 1

    def build(self) -> DeltaCodec:
        return TopK(self.share)


class TopK(DeltaCodec):
    """The columns of largest magnitude. A NaN is larger than any number, so that the receiver
    refuses it.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def nbytes(self, columns: int) -> int:
        """Return the bytes of the values, of the low bits and of the bit vector."""
        count, low = self._form(columns)
        return 4 * count + _bytes(count * low) + _bytes(_ones_most(columns, count, low))

    def encode(self, delta_D: npt.NDArray[np.float32], chance: np.random.Generator) -> bytes:
        """Return the largest columns."""
        columns = delta_D.size
        count, low = self._form(columns)
        # ordered as the numbers are
        magnitudes_D = delta_D.view(np.uint32) & np.uint32(0x7FFF_FFFF)
        least = np.partition(magnitudes_D, columns - count)[columns - count]
        places = np.flatnonzero(magnitudes_D >= least)
        if (more := places.size - count) > 0:
            ties = np.flatnonzero(magnitudes_D[places] == least)
            places = np.delete(places, ties[ties.size - more :])
        ones = np.zeros(_ones_most(columns, count, low), np.uint8)
        ones[(places >> low) + np.arange(count)] = 1
        word = _word(low)
        words_K = (
            (places & ((1 << low) - 1)).astype(word).view(np.uint8).reshape(count, word.itemsize)
        )
        bits_KL = np.unpackbits(words_K, axis=1)[:, 8 * word.itemsize - low :]
        return (
            delta_D[places].tobytes() + np.packbits(bits_KL).tobytes() + np.packbits(ones).tobytes()
        )

    def decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        """Return the columns, zeros where none was sent. Raises WireError."""
        count, low = self._form(columns)
        if len(data) != self.nbytes(columns):
            raise WireError(f"{len(data)} bytes of the largest columns, not {self.nbytes(columns)}")
        values = np.frombuffer(data, np.float32, count)
        packed = np.frombuffer(data, np.uint8, offset=4 * count)
        lowest, upper = np.split(packed, [_bytes(count * low)])
        ones = np.flatnonzero(np.unpackbits(upper))
        if ones.size != count:
            raise WireError(f"{ones.size} columns, not {count}")
        places = (ones - np.arange(count)) << low
        word = _word(low)
        bits_KL = np.zeros((count, 8 * word.itemsize), np.uint8)
        bits_KL[:, 8 * word.itemsize - low :] = np.unpackbits(lowest, count=count * low).reshape(
            count, low
        )
        places |= np.packbits(bits_KL, axis=1).view(word)[:, 0].astype(np.int64)
        if places[-1] >= columns or (np.diff(places) <= 0).any():
            raise WireError("columns that do not grow, or that the model does not have")
        delta_D = np.zeros(columns, np.float32)
        delta_D[places] = values
        return delta_D

    def _form(self, columns: int) -> tuple[int, int]:
        """Return k, and the number of low bits."""
        # the product of floats may lie above a whole number
        count = max(1, ceil(self._share * columns - 1e-9))
        return count, (columns // count).bit_length() - 1


def _word(low: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the type of integers of so many bits, the highest byte first as in `np.packbits`."""
    if low <= 16:
        return np.dtype(">u2")
    return np.dtype(">u8")


def _ones_most(columns: int, count: int, low: int) -> int:
    """Return the length of the bit vector."""
    return count + ((columns - 1) >> low)


def _bytes(bits: int) -> int:
    return -(-bits // 8)
