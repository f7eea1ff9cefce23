"""QSGD (Alistarh et al. 2017): each column rounded up or down to one of few steps, by chance, so
that its mean is kept.

    C(d) = h round(d / h + u),  h = max |d| / s of each 1024 columns of a tensor,  s = 2^(bits - 1)
    - 1

with u uniform in (-1/2, 1/2): E[C(d)] = d, to 2^-16 of a step. The paper's bound is with the
Euclidean norm in place of the maximum, whose steps are longer. Its gain is an entropy code of many
zeros; here each column has `bits` bits, and the maximum, which the paper's experiments use too,
gives the smaller variance: at most h^2 / 4 a column.

A block ends with its tensor, as those of int8: with the steps of its layer's weights a bias would
be mostly chance. Bytes of each tensor: the steps h, float32, then for each 65,536 columns the
planes of bits of round(...) + s, lowest first.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment, WireError
from fedstrata.common.lazy import np, npt
from fedstrata.common.model.codec_settings import CodecSettings
from fedstrata.common.model.delta_codecs import PIECE_COLUMNS, SCALE_COLUMNS, DeltaCodec, blocks_of

# values of u: with them and s <= 127 all sums below are exact, or rounded to 2^-16
UNIFORM: Final = 32_768


class QsgdSettings(CodecSettings):
    """Each change rounded by chance to a few bits, so that its mean is kept."""

    name: Literal["qsgd"] = "qsgd"  # the codec
    # of a column: 2^bits - 1 values, from minus the largest change to it
    bits: Annotated[int, Field(ge=2, le=8)] = 4

    def check(self, key: str) -> None:
        """Check that what is left out does not grow. Raises InvalidExperiment."""
        super().check(key)
        if self.feedback and self.bits == 2:
            problem = (
                "rounding to -1, 0 and 1 leaves out more than it sends, so with feedback "
                "that grows without bound"
            )
            raise InvalidExperiment(
                f"{key}.bits", self.bits, problem, "Use 3 or more, or omit feedback."
            )

    def build(self) -> DeltaCodec:
        return Qsgd(self.bits)


class Qsgd(DeltaCodec):
    """Stochastic rounding against the maximum of each block; one with NaN or infinity is
    refused.
    """

    unbiased = True
    by_tensor = True

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._most = 2 ** (bits - 1) - 1  # s

    def nbytes(self, columns: int) -> int:
        """Return the bytes of the steps and of the planes."""
        pieces = [min(PIECE_COLUMNS, columns - at) for at in range(0, columns, PIECE_COLUMNS)]
        return 4 * blocks_of(columns) + sum(self._bits * -(-size // 8) for size in pieces)

    def encode(self, delta_D: npt.NDArray[np.float32], chance: np.random.Generator) -> bytes:
        """Return the steps and the planes."""
        steps = []
        planes = []
        for at in range(0, delta_D.size, PIECE_COLUMNS):
            piece = delta_D[at : at + PIECE_COLUMNS]
            padded = np.zeros(blocks_of(piece.size) * SCALE_COLUMNS, np.float32)
            padded[: piece.size] = piece
            blocks = padded.reshape(-1, SCALE_COLUMNS)
            step = np.nextafter(
                np.abs(blocks).max(axis=1) / np.float32(self._most), np.float32(np.inf)
            )
            # NaN stays; so no quotient exceeds s
            step = np.maximum(step, np.finfo(np.float32).tiny)
            steps.append(step)
            with np.errstate(invalid="ignore"):  # inf / inf, NaN: their step is refused
                blocks /= step[:, None]
                padded += np.float32(self._most + 0.5 / UNIFORM)  # u + 1/2 = (i + 1/2) / UNIFORM
                drawn = chance.integers(2 * UNIFORM, size=piece.size, dtype=np.uint16) >> 1
                padded[: piece.size] += drawn * np.float32(1 / UNIFORM)
                # they are at least 0, and rounded down
                numbers = padded[: piece.size].astype(np.uint8)
            planes += [np.packbits((numbers >> bit) & 1) for bit in range(self._bits)]
        return np.concatenate(steps).tobytes() + np.concatenate(planes).tobytes()

    def decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        """Return the steps times the integers. Raises WireError."""
        if len(data) != self.nbytes(columns):
            raise WireError(
                f"{len(data)} bytes of {self._bits} bits a column, not {self.nbytes(columns)}"
            )
        blocks = blocks_of(columns)
        steps = np.frombuffer(data, np.float32, blocks)
        if not (steps.min() >= 0 and steps.max() < np.inf):  # NaN is neither
            raise WireError(f"a step is {steps[~((steps >= 0) & (steps < np.inf))][0]}")
        packed = np.frombuffer(data, np.uint8, offset=4 * blocks)
        found = np.zeros(blocks * SCALE_COLUMNS, np.float32)
        start = 0
        for at in range(0, columns, PIECE_COLUMNS):
            size = min(PIECE_COLUMNS, columns - at)
            numbers = np.zeros(size, np.uint8)
            length = -(-size // 8)
            for bit in range(self._bits):
                numbers |= np.unpackbits(packed[start : start + length], count=size) << np.uint8(
                    bit
                )
                start += length
            if numbers.max() > 2 * self._most:
                raise WireError(f"an integer of {numbers.max()} steps, of {2 * self._most}")
            np.subtract(numbers, np.float32(self._most), out=found[at : at + size])
        with np.errstate(over="ignore"):  # overflows are refused as infinite
            found.reshape(-1, SCALE_COLUMNS)[:] *= steps[:, None]
        return found[:columns]
