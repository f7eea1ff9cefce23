"""Work on blocks of columns by a few threads; numpy releases the interpreter's lock.

The blocks depend only on the columns, and results are returned in their order. So no number depends on the number of
threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, TypeVar

THREADS_MOST: Final = 4  # more threads are limited by the memory bus
COLUMNS: Final = 32_768  # per block: the pieces of three rows in float64 fit into a core's second-level cache
RELEASE_BLOCKS: Final = 8

Result = TypeVar("Result")


def cut(start: int, stop: int, width: int = COLUMNS) -> Iterator[slice]:
    """Return the columns start .. stop as blocks of `width`, the last one shorter."""
    return (slice(at, min(at + width, stop)) for at in range(start, stop, width))


def over(
    blocks: Sequence[slice], work: Callable[[slice], Result], *, release: Callable[[], None] = lambda: None
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
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(THREADS_MOST, available)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "mixing")
