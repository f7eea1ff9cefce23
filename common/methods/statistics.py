"""Statistics of K models for the plans: counts, losses and inner products.

Inner products are taken in float64 relative to a reference row z, E = X - z. Models differ by much
less than their norm, so products of the original rows in float32 would lose all digits of the
differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Protocol, TypeAlias

from fedstrata.common.lazy import np, npt
from fedstrata.common.methods.mixing import by_block, cut, over
from fedstrata.common.methods.settings import Weights
from fedstrata.common.model.layout import Entry, ModelLayout, Row, Section

Numbers: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.int64]"
Doubles: TypeAlias = "npt.NDArray[np.float64]"

THREAD_COLUMNS: Final = 65_536  # per block and thread
PIECE_COLUMNS: Final = 8_192
PIECE_NUMBERS: Final = 2**20  # of all rows together


class TrainingReport(Protocol):
    """A child's training statistics."""

    @property
    def samples(self) -> int:
        """The number of samples n_k."""

    @property
    def loss(self) -> float | None:
        """The loss F_k, None if the child does not know it."""

    @property
    def path_steps(self) -> int:
        """The SGD steps, of an institution those on its critical path."""

    @property
    def start_loss(self) -> float | None:
        """The training loss of the model received, if it was asked for."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of K uploads in row order: samples, mean training loss of the last epoch, SGD
    steps.

    A loss is NaN where the child does not know it. `start_losses_K`: of the model received, NaN
    where it was not asked for.
    """

    samples_K: npt.NDArray[np.int64]
    losses_K: Doubles
    steps_K: Doubles
    start_losses_K: Doubles

    @classmethod
    def of(cls, results: Sequence[TrainingReport]) -> Statistics:
        """Collect the statistics from the children's results."""
        samples = np.array([result.samples for result in results], np.int64)
        columns = zip(
            *((result.loss, result.path_steps, result.start_loss) for result in results),
            strict=True,
        )
        return cls(samples, *(np.array(each, np.float64) for each in columns))  # None becomes NaN

    @property
    def shares_K(self) -> Doubles:
        """The shares p_k = n_k / sum of n; equal if all counts are zero."""
        # unchecked counts may be huge: an int64 sum could wrap
        return shares(self.samples_K.astype(np.float64))

    def weights_K(self, weights: Weights) -> Doubles:
        """Return the weights of a mean: the shares, or 1/K each."""
        count = len(self.samples_K)
        if weights == "data":
            return self.shares_K
        return np.full(count, 1 / count)

    def mean_loss(self, weights_K: Doubles) -> float | None:
        """Return the mean of the known losses by their weights, None if there is none. `weights_K`:
        their sum is 1.
        """
        known = ~np.isnan(self.losses_K)
        if known.all():
            return float(weights_K @ self.losses_K)
        total = weights_K[known].sum()
        if total > 0:
            return float(weights_K[known] @ self.losses_K[known] / total)
        return None


def shares(amounts_K: Doubles) -> Doubles:
    """Return nonnegative amounts as fractions of their sum; equal fractions if all are zero."""
    total = amounts_K.sum()
    if total == 0:
        return np.full_like(amounts_K, 1 / len(amounts_K))
    fractions_K: Doubles = amounts_K / total
    return fractions_K


@dataclass(frozen=True, slots=True)
class Gram:
    """Inner products of K rows X relative to z: C = E E^T [K, K], a = E z [K], q = z.z, with E = X
    - z.

    Sums over disjoint columns add up: `one + other`. Squared distances are clipped at 0, cosines at
    -1 and 1.
    """

    offsets_KK: Doubles
    along_K: Doubles
    square: float

    @classmethod
    def of(
        cls,
        rows: Sequence[Numbers],
        reference_D: Numbers,
        *,
        along: Callable[[slice], Doubles] | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> Gram:
        """Return the inner products of rows, float32 or int64 [D] each, relative to a reference
        [D].

        `along(columns)` returns columns of another vector, float64, that replaces z in a = E z and
        q.
        """
        count = len(rows)
        width = min(PIECE_COLUMNS, -(-PIECE_NUMBERS // count))

        def block(columns: slice) -> Gram:
            held_KC = np.empty((count, min(width, columns.stop - columns.start)))
            found = nothing
            for piece in cut(columns.start, columns.stop, width):
                offset_KC = held_KC[:, : piece.stop - piece.start]
                z = reference_D[piece].astype(np.float64)
                for offset, row in zip(offset_KC, rows, strict=True):
                    # separate conversion: numpy's mixed subtraction is 2x slower
                    np.copyto(offset, row[piece])
                    np.subtract(offset, z, out=offset)
                other = z if along is None else along(piece)
                found += Gram(offset_KC @ offset_KC.T, offset_KC @ other, float(other @ other))
            return found

        nothing = total = Gram(np.zeros((count, count)), np.zeros(count), 0.0)
        for found in over(list(cut(0, len(reference_D), THREAD_COLUMNS)), block, release=release):
            total += found
        return total

    def __add__(self, other: Gram) -> Gram:
        """Return the products over both sets of columns."""
        return Gram(
            self.offsets_KK + other.offsets_KK,
            self.along_K + other.along_K,
            self.square + other.square,
        )

    @property
    def products_KK(self) -> Doubles:
        """The inner products of the rows themselves, <x_i, x_j>."""
        return self.offsets_KK + self.along_K[:, None] + self.along_K[None, :] + self.square

    @property
    def norms_K(self) -> Doubles:
        """The norms ||x_i||."""
        return _root(np.diagonal(self.products_KK))

    def cosines_KK(self) -> Doubles:
        """Return <x_i, x_j> / (||x_i|| ||x_j||); a row of zeros has cosine 0 with every row."""
        norms_K = self.norms_K
        return np.clip(_ratio(self.products_KK, np.outer(norms_K, norms_K)), -1.0, 1.0)

    def ratios_KK(self) -> Doubles:
        """Return <x_i, x_j> / (||x_i|| + ||x_j||), as printed in FedCross's texts."""
        norms_K = self.norms_K
        return _ratio(self.products_KK, norms_K[:, None] + norms_K[None, :])

    def apart_KK(self) -> Doubles:
        """Return the Euclidean distances ||x_i - x_j||."""
        squares_K = np.diagonal(self.offsets_KK)
        return _root(squares_K[:, None] + squares_K[None, :] - 2 * self.offsets_KK)

    def distances(self, weights_K: Doubles) -> Doubles:
        """Return ||x_m - X^T w|| for each row m, for weights that sum to 1: C_mm - 2 (C w)_m + w^T
        C w.
        """
        mixed_K = self.offsets_KK @ weights_K
        return _root(np.diagonal(self.offsets_KK) - 2 * mixed_K + weights_K @ mixed_K)

    def spread(self, mixing_KK: Doubles) -> float:
        """Return mean_k ||w_k - mean||^2 / ||mean||^2 of the rows w = W x, for W whose rows sum to
        1.
        """
        mixed_KK = mixing_KK @ self.offsets_KK @ mixing_KK.T
        along_K = mixing_KK @ self.along_K
        centre = float(mixed_KK.mean())
        length = self.square + 2 * float(along_K.mean()) + centre
        apart = max(float(np.trace(mixed_KK)) / len(mixed_KK) - centre, 0.0)
        if length > 0:
            return apart / length
        return 0.0


def manhattan_KK(
    rows: Sequence[npt.NDArray[np.float32]], *, release: Callable[[], None] = lambda: None
) -> Doubles:
    """Return sum_d |x_i[d] - x_j[d]| of rows float32 [D] each, float64 [K, K]; differences are
    taken in float32.
    """
    count = len(rows)

    def block(columns: slice) -> Doubles:
        found = np.zeros((count, count))
        offset_C = np.empty_like(rows[0][columns])
        for i, j in combinations(range(count), 2):
            np.subtract(rows[i][columns], rows[j][columns], out=offset_C)
            found[i, j] = found[j, i] = np.abs(offset_C, out=offset_C).sum(dtype=np.float64)
        return found

    total_KK = np.zeros((count, count))
    for found in over(list(cut(0, len(rows[0]), THREAD_COLUMNS)), block, release=release):
        total_KK += found
    return total_KK


def spread(rows: Sequence[npt.NDArray[np.float32]], mean_D: npt.NDArray[np.float32]) -> float:
    """Return mean_k ||x_k - mean||^2 / ||mean||^2 of rows float32 [D] around their mean, without
    inner products.

    Differences are computed in float32, where they are exact for similar models, and summed over
    blocks in float64.
    """

    def block(columns: slice) -> tuple[float, float]:
        centre_C = mean_D[columns]
        offset_C = np.empty_like(centre_C)
        apart = 0.0
        for row in rows:
            np.subtract(row[columns], centre_C, out=offset_C)
            apart += float(np.dot(offset_C, offset_C))
        return apart, float(np.dot(centre_C, centre_C))

    found = by_block(len(mean_D), block)
    apart, length = (sum(column) for column in zip(*found, strict=True))
    return float(apart / len(rows) / length) if length > 0 else 0.0


def gram_by_entry(
    rows_K: npt.NDArray[np.uint8],
    layout: ModelLayout,
    *,
    release: Callable[[], None] = lambda: None,
) -> list[Gram]:
    """Return the products of each entry of the state, in its order, relative to the first of rows
    [K, row_bytes].
    """
    found = []
    for entry in layout.in_state_order:
        tensors = [_tensor(row, entry, layout) for row in rows_K]
        found.append(Gram.of(tensors, tensors[0], release=release))
    return found


def tensor_distances(rows: Sequence[Row], centre: Row, *, layout: ModelLayout) -> Doubles:
    """Return, for each row, the sum over all entries of ||x - centre||, counters and statistics
    included.

    Plato's form of Tempo's distance, before multiplication by the share of samples.
    """
    total_K = np.zeros(len(rows))
    for entry in layout.entries:
        products = Gram.of(
            [_tensor(row, entry, layout) for row in rows], _tensor(centre, entry, layout)
        )
        total_K += _root(np.diagonal(products.offsets_KK))
    return total_K


def _tensor(row: Row, entry: Entry, layout: ModelLayout) -> Numbers:
    section: Numbers = (
        layout.integers(row) if entry.section is Section.COUNTER else layout.floats(row)
    )
    return section[entry.start : entry.stop]


def _root(squares: Doubles) -> Doubles:
    roots: Doubles = np.sqrt(np.maximum(squares, 0.0))
    return roots


def _ratio(above: Doubles, below: Doubles) -> Doubles:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
