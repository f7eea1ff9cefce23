"""Scaled signs: a bit for each column, and for each 1024 of a tensor the mean magnitude (Bernstein
et al. 2018).

    C(d) = mean |d| sign(d) of each block;  ||d - C(d)||^2 = ||d||^2 - n (mean |d|)^2 <= (1 - 1 / n)
    ||d||^2

for a block of n columns, as with Karimireddy et al. (2019). A block ends with its tensor, as those
of int8: the mean magnitude of a layer's weights is not that of its biases. Bytes of each tensor:
the means, float32, then the bits, 1 for negative.
All sums are of pairs, in one order, so that every machine computes the same bits.
"""

from __future__ import annotations

from typing import Literal

from fedstrata.common.errors import WireError
from fedstrata.common.lazy import np, npt
from fedstrata.common.model.codec_settings import CodecSettings
from fedstrata.common.model.delta_codecs import PIECE_COLUMNS, SCALE_COLUMNS, DeltaCodec, blocks_of


class SignSettings(CodecSettings):
    """The sign of each change, and for each 1024 of a tensor their mean magnitude: 32 times smaller
    than fp32.
    """

    name: Literal["sign"] = "sign"  # the codec

    @property
    def contracts(self) -> bool:
        """Whether magnitudes are lost: always."""
        return True

    def build(self) -> DeltaCodec:
        return ScaledSigns()


class ScaledSigns(DeltaCodec):
    """Signs and mean magnitudes. A block with NaN or infinity has such a mean, and is refused."""

    by_tensor = True

    def nbytes(self, columns: int) -> int:
        """Return the bytes of the means and of the bits."""
        return 4 * blocks_of(columns) + -(-columns // 8)

    def encode(self, delta_D: npt.NDArray[np.float32], chance: np.random.Generator) -> bytes:
        """Return the means and the bits."""
        means = [
            _means(delta_D[at : at + PIECE_COLUMNS]) for at in range(0, delta_D.size, PIECE_COLUMNS)
        ]
        return np.concatenate(means).tobytes() + np.packbits(np.signbit(delta_D)).tobytes()

    def decode(self, data: bytes, columns: int) -> npt.NDArray[np.float32]:
        """Return the means with their signs. Raises WireError."""
        if len(data) != self.nbytes(columns):
            raise WireError(f"{len(data)} bytes of signs, not {self.nbytes(columns)}")
        blocks = blocks_of(columns)
        means = np.frombuffer(data, np.float32, blocks)
        if not (means.min() >= 0 and means.max() < np.inf):  # NaN is neither
            raise WireError(f"a mean magnitude is {means[~((means >= 0) & (means < np.inf))][0]}")
        bits = np.frombuffer(data, np.uint8, offset=4 * blocks)
        found = np.empty(columns, np.float32)
        whole = columns - columns % SCALE_COLUMNS
        found[:whole].reshape(-1, SCALE_COLUMNS)[:] = means[: whole // SCALE_COLUMNS, None]
        found[whole:] = means[-1]
        for at in range(0, columns, PIECE_COLUMNS):
            piece = found[at : at + PIECE_COLUMNS].view(np.uint32)
            signs = np.unpackbits(bits[at // 8 : (at + PIECE_COLUMNS) // 8], count=piece.size)
            piece |= signs.astype(np.uint32) << np.uint32(31)
        return found


def _means(piece: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the mean magnitude of each block of a piece; halves are added until one number is
    left.
    """
    blocks = blocks_of(piece.size)
    sums = np.zeros((blocks, SCALE_COLUMNS), np.float32)
    np.multiply(np.abs(piece), np.float32(1 / SCALE_COLUMNS), out=sums.reshape(-1)[: piece.size])
    with np.errstate(over="ignore", invalid="ignore"):
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        found = sums[:, 0]
        if last := piece.size % SCALE_COLUMNS:
            found[-1] *= np.float32(SCALE_COLUMNS / last)
    return found
