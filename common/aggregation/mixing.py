"""The one kernel: out = W @ X, block of columns by block of columns.

W is kept as (index, weight) lists, one `Mixture` for each output row, so that zero weights are skipped and never
multiplied (0 * NaN = NaN: one diverged model must not poison the others).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from common.layout import ModelLayout

BLOCK_COLUMNS: Final = 65_536
RELEASE_BLOCKS: Final = 8
FLOAT32_TERMS: Final = 3


@dataclass(frozen=True, slots=True)
class Mixture:
    """One output row: the input rows it is made of, ascending, and their weights, none of them zero."""

    indices: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, weights_K: Sequence[float]) -> Mixture:
        """Return the mixture of one weight for each input row."""
        kept = [(k, float(weight)) for k, weight in enumerate(weights_K) if weight != 0.0]
        return cls(tuple(k for k, _ in kept), tuple(weight for _, weight in kept))

    @property
    def heaviest(self) -> int:
        """Return the input row with the largest weight, the lowest index on ties."""
        return self.indices[self.weights.index(max(self.weights))]


def mix(
    mixtures: Sequence[Mixture],
    models_KF: npt.NDArray[np.float32],
    *,
    out: npt.NDArray[np.float32],
    release: Callable[[], None] = lambda: None,
) -> None:
    """Write each mixture of the rows into a row of `out`, float32 [len(mixtures), F].

    `out` may be `models_KF` itself: a block is read for all rows before it is written. Rows of up to three terms
    are summed in float32, longer ones in float64 and rounded once, always in row order; a row with the single
    weight 1 is copied bit for bit. `release` is called every few blocks: what was read of the rows may leave memory.
    """
    for start in range(0, models_KF.shape[1], BLOCK_COLUMNS):
        block_KC = models_KF[:, start : start + BLOCK_COLUMNS]
        target = out[:, start : start + BLOCK_COLUMNS]
        if len(mixtures) > 1 and np.may_share_memory(target, block_KC):
            block_KC = block_KC.copy()
        for row, mixture in enumerate(mixtures):
            target[row] = _mix_block(mixture, block_KC)
        if start // BLOCK_COLUMNS % RELEASE_BLOCKS == RELEASE_BLOCKS - 1:
            release()


def mix_rows(
    mixtures: Sequence[Mixture],
    rows_K: npt.NDArray[np.uint8],
    *,
    layout: ModelLayout,
    out: npt.NDArray[np.uint8],
    release: Callable[[], None] = lambda: None,
) -> None:
    """Write each mixture of whole rows, uint8 [K, row_bytes], into a row of `out`, which may be `rows_K`.

    Float columns are mixed; counters are never averaged but copied from the heaviest input row.
    """
    counters = [layout.integers(rows_K[mixture.heaviest]).copy() for mixture in mixtures]
    mix(mixtures, layout.floats(rows_K), out=layout.floats(out), release=release)
    release()
    for target, source in zip(out, counters, strict=True):
        layout.integers(target)[:] = source


def _mix_block(mixture: Mixture, block_KC: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    mixed: npt.NDArray[np.float32]
    if mixture.weights == (1.0,):
        mixed = block_KC[mixture.indices[0]]
        return mixed
    dtype = np.float32 if len(mixture.indices) <= FLOAT32_TERMS else np.float64
    total = np.zeros(block_KC.shape[1], dtype)
    term = np.empty(block_KC.shape[1], dtype)
    for index, weight in zip(mixture.indices, mixture.weights, strict=True):
        np.copyto(
            term, block_KC[index]
        )  # a conversion of its own: numpy's mixed product goes by small pieces, 2x slower
        np.multiply(term, dtype(weight), out=term)
        np.add(total, term, out=total)
    mixed = total.astype(np.float32, copy=False)
    return mixed
