"""The mixing kernel: out = W @ X, one block of columns after another, by a few threads.

W is stored as (index, weight) lists, one `Mixture` per output row. Zero weights are skipped and
never multiplied (0 * NaN = NaN: one diverged model must not affect the others). A plan is one W for
all columns, or one for each `MixedColumns`.

numpy releases the interpreter's lock. The blocks depend only on the columns, and results are
returned in their order. So no number depends on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, TypeAlias, TypeVar

from fedstrata.common.lazy import np, npt
from fedstrata.common.model.layout import Entry, ModelLayout, Row, Section

Floats: TypeAlias = "npt.NDArray[np.float32]"
Result = TypeVar("Result")

FLOAT32_TERMS: Final = 3
THREADS_MOST: Final = 4  # more threads are limited by the memory bus
# per block: the pieces of three rows in float64 fit into a core's second-level cache
BLOCK_COLUMNS: Final = 32_768
RELEASE_BLOCKS: Final = 8


@dataclass(frozen=True, slots=True)
class Mixture:
    """One output row: the indices of its input rows, ascending, and their nonzero weights."""

    indices: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, weights_K: Sequence[float] | npt.NDArray[np.float64]) -> Mixture:
        """Return the mixture with one weight per input row."""
        kept = [(k, float(weight)) for k, weight in enumerate(weights_K) if weight != 0.0]
        return cls(tuple(k for k, _ in kept), tuple(weight for _, weight in kept))

    @classmethod
    def copy(cls, index: int) -> Mixture:
        """Return the mixture that copies one input row bit for bit."""
        return cls((index,), (1.0,))

    @property
    def heaviest(self) -> int:
        """The input row with the largest weight, the lowest index on ties."""
        return self.indices[self.weights.index(max(self.weights))]

    def dense(self, count: int) -> npt.NDArray[np.float64]:
        """Return one weight for each of `count` input rows, zeros included."""
        weights_K = np.zeros(count)
        weights_K[list(self.indices)] = self.weights
        return weights_K


Mixtures = tuple[Mixture, ...]


@dataclass(frozen=True, slots=True)
class MixedColumns:
    """Some columns of floats and of counters, and the mixture of each output row in them."""

    mixtures: Mixtures
    columns: tuple[slice, ...]
    counters: tuple[slice, ...]

    @classmethod
    def of(cls, mixtures: Mixtures, entries: Sequence[Entry]) -> MixedColumns:
        """Return the columns of these entries of the state."""
        columns: list[slice] = []
        counters: list[slice] = []
        for entry in entries:
            found = counters if entry.section is Section.COUNTER else columns
            found.append(slice(entry.start, entry.stop))
        return cls(mixtures, tuple(columns), tuple(counters))

    def with_first(self, mixture: Mixture) -> MixedColumns:
        """Return the same columns with one more output row, before the others."""
        return replace(self, mixtures=(mixture, *self.mixtures))


def whole(layout: ModelLayout, mixtures: Sequence[Mixture]) -> tuple[MixedColumns, ...]:
    """Return the plan that mixes all columns in the same way."""
    counters = slice(0, layout.counters)
    return (MixedColumns(tuple(mixtures), (slice(0, layout.columns),), (counters,)),)


def apply(
    plan: Sequence[MixedColumns],
    rows_K: npt.NDArray[np.uint8],
    *,
    layout: ModelLayout,
    out: Sequence[Row],
    release: Callable[[], None] = lambda: None,
) -> None:
    """Write each mixture of whole rows, uint8 [K, row_bytes], into its row of `out`, which may be
    rows of `rows_K`.

    Float columns: up to three terms are summed in float32, more terms in float64 and rounded once,
    always in row order. A single weight of 1 copies the row bit for bit. Counters are never
    averaged: they are copied from the input row with the largest weight. A block is read for all
    rows before it is written. `release` is called every few blocks; the pages that were read may
    leave memory then.
    """
    models_KF = layout.floats(rows_K)
    targets = [layout.floats(row) for row in out]
    in_place = any(np.may_share_memory(target, models_KF) for target in targets)
    for part in plan:
        _mix_counters(part, rows_K, layout, out)
        for span in part.columns:

            def mix(columns: slice, mixtures: Mixtures = part.mixtures) -> None:
                into = [target[columns] for target in targets]
                _mix_block(mixtures, models_KF[:, columns], into, in_place)

            over(list(cut(span.start, span.stop)), mix, release=release)


def _mix_counters(
    part: MixedColumns, rows_K: npt.NDArray[np.uint8], layout: ModelLayout, out: Sequence[Row]
) -> None:
    for span in part.counters:
        counters = (layout.integers(rows_K[mixture.heaviest]) for mixture in part.mixtures)
        found = [values[span].copy() for values in counters]
        for row, values in zip(out, found, strict=True):
            layout.integers(row)[span] = values


def _mix_block(mixtures: Mixtures, block_KC: Floats, out: Sequence[Floats], in_place: bool) -> None:
    if in_place:
        block_KC = block_KC.copy()
    term = np.empty(block_KC.shape[1], np.float32)
    total = np.empty(block_KC.shape[1])
    for mixture, target in zip(mixtures, out, strict=True):
        if mixture.weights == (1.0,):
            target[:] = block_KC[mixture.indices[0]]
        elif len(mixture.indices) <= FLOAT32_TERMS:
            into = target
            for index, weight in zip(mixture.indices, mixture.weights, strict=True):
                np.multiply(block_KC[index], np.float32(weight), out=into)
                if into is term:
                    np.add(target, term, out=target)
                into = term
        else:
            chosen_KC = block_KC
            if len(mixture.indices) < len(block_KC):
                chosen_KC = block_KC[list(mixture.indices)]
            np.einsum("k,kc->c", mixture.weights, chosen_KC, dtype=np.float64, out=total)
            target[:] = total


def recentre(rows: Sequence[Row], received: Row, *, layout: ModelLayout) -> None:
    """Move rows so that their mean is the received model: w_k <- received + (w_k - mean_j w_j), in
    place.

    Applies to parameters; buffers and counters take the received values. Equal rows become exactly
    the received model.
    """
    parameters = layout.parameters
    target = layout.floats(received)
    models = [layout.floats(row) for row in rows]

    def move(columns: slice) -> None:
        mean = np.zeros(columns.stop - columns.start)
        offset = np.empty(columns.stop - columns.start)
        for model in models:
            mean += model[columns]
        mean /= len(models)
        for model in models:
            # first: exactly 0 where the rows are equal
            np.subtract(model[columns], mean, out=offset)
            offset += target[columns]
            model[columns] = offset

    by_block(parameters, move)
    for row, model in zip(rows, models, strict=True):
        model[parameters:] = target[parameters:]
        layout.integers(row)[:] = layout.integers(received)


def cut(start: int, stop: int, width: int = BLOCK_COLUMNS) -> Iterator[slice]:
    """Return the columns start .. stop as blocks of `width`, the last one shorter."""
    return (slice(at, min(at + width, stop)) for at in range(start, stop, width))


def by_block(
    columns: int, work: Callable[[slice], Result], *, release: Callable[[], None] = lambda: None
) -> list[Result]:
    """Return the results of `work` for each block of the columns 0 .. `columns`, in order; threads
    share the blocks.

    `work` reads and writes its own columns alone. `release` is called every few blocks: see
    `Uploads.release`.
    """
    return over(list(cut(0, columns)), work, release=release)


def over(
    blocks: Sequence[slice],
    work: Callable[[slice], Result],
    *,
    release: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Return the results of `work` for each block, in order; call `release` every few blocks."""
    if len(blocks) < 2 or _threads() < 2:
        return list(_released(map(work, blocks), release))
    return list(_released(_pool().map(work, blocks), release))


def _released(results: Iterator[Result], release: Callable[[], None]) -> Iterator[Result]:
    for place, result in enumerate(results):
        if place % RELEASE_BLOCKS == RELEASE_BLOCKS - 1:
            release()
        yield result
    release()


@cache
def _threads() -> int:
    available = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    return min(THREADS_MOST, available)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "mixing")
