"""Columns cut into fixed blocks, worked on by a few threads (numpy lets go of the interpreter's lock).

The cut depends on the columns alone and results come back in the order of the columns, so no number depends on how
many threads there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, TypeVar

THREADS_MOST: Final = 4  # what more would gain, the memory bus does not have
COLUMNS: Final = 32_768  # of a block: its pieces of three rows in float64 fit a core's second cache
RELEASE_BLOCKS: Final = 8

Result = TypeVar("Result")


def cut(start: int, stop: int, width: int = COLUMNS) -> Iterator[slice]:
    """Return the columns start .. stop as blocks of `width`, the last one shorter."""
    return (slice(at, min(at + width, stop)) for at in range(start, stop, width))


def over(
    blocks: Sequence[slice], work: Callable[[slice], Result], *, release: Callable[[], None] = lambda: None
) -> list[Result]:
    """Return what `work` returns for each block, in order; `release` is called every few blocks."""
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
