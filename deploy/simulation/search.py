"""Many seeds, on all cores, and the fewest faults of one that violate an invariant."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from deploy.simulation.drawn import draw_lab
from deploy.simulation.seeds import SeedReport, play_seed


def play_seeds(seeds: Sequence[int], *, jobs: int) -> Iterator[SeedReport]:
    """Play seeds in processes of their own and yield each report, in the seeds' order."""
    if jobs <= 1:
        yield from map(_play, seeds)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_play, seeds, chunksize=4)


def reduce_faults(seed: int) -> frozenset[int]:
    """Return the numbers of the fewest faults found that violate what all of them do."""
    needed = set(range(len(draw_lab(seed).faults)))
    violated = _violated(seed, needed)
    for place in sorted(needed, reverse=True):
        if violated and _violated(seed, needed - {place}) & violated:
            needed.discard(place)
    return frozenset(needed)


def _violated(seed: int, only: set[int]) -> set[str]:
    return {name for name, _ in play_seed(seed, only=only).violations}


def _play(seed: int) -> SeedReport:
    try:
        return play_seed(seed)
    except Exception:  # noqa: BLE001 - the report says it
        last = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
        return SeedReport(seed, (("simulator works", last),), (), 0, 0.0, 0.0)
