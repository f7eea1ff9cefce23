"""Cheap numbers about K models from which every plan is made: counts, losses and the Gram matrix.

The Gram matrix is taken relative to a reference row z, E = X - z: models differ by orders less than they
weigh, and products of the raw rows in float32 would lose all digits of their differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

BLOCK_COLUMNS: Final = 65_536


class Trained(Protocol):
    """A child's report on its training."""

    @property
    def samples(self) -> int:
        """Return n_k."""

    @property
    def loss(self) -> float:
        """Return F_k."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a plan may know of K uploads, in row order: samples, and mean training loss of the last epoch."""

    samples_K: npt.NDArray[np.int64]
    losses_K: npt.NDArray[np.float64]

    @classmethod
    def of(cls, results: Sequence[Trained]) -> Statistics:
        """Collect them from what the children reported."""
        samples = np.array([result.samples for result in results], np.int64)
        return cls(samples, np.array([result.loss for result in results], np.float64))

    @property
    def shares_K(self) -> npt.NDArray[np.float64]:
        """Return p_k = n_k / sum of n; all alike where nobody has a sample."""
        counts_K = self.samples_K.astype(np.float64)  # foreign counts may be huge: their sum in int64 would wrap
        total = counts_K.sum()
        return counts_K / total if total > 0 else np.full_like(counts_K, 1 / len(counts_K))


def gram(models_KD: npt.NDArray[np.float32], reference_D: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return C = E E^T, float64 [K, K], with E = X - z over the trainable columns."""
    count = models_KD.shape[0]
    products_KK = np.zeros((count, count))
    for start in range(0, models_KD.shape[1], BLOCK_COLUMNS):
        columns = slice(start, start + BLOCK_COLUMNS)
        offset_KC = models_KD[:, columns].astype(np.float64) - reference_D[columns]
        products_KK += offset_KC @ offset_KC.T
    return products_KK


def distances(gram_KK: npt.NDArray[np.float64], weights_K: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ||x_m - X^T w|| for each row m, for weights that sum to 1: C_mm - 2 (C w)_m + w^T C w."""
    mixed_K = gram_KK @ weights_K
    squares_K = np.diagonal(gram_KK) - 2 * mixed_K + weights_K @ mixed_K
    roots_K: npt.NDArray[np.float64] = np.sqrt(np.maximum(squares_K, 0.0))
    return roots_K
