"""Parallel runs of many seeds, and the search for the fewest faults that violate an invariant."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from deploy.simulation.drawn import draw_lab
from deploy.simulation.seeds import SeedReport, run_seed


def run_seeds(seeds: Sequence[int], *, jobs: int) -> Iterator[SeedReport]:
    """Run seeds in `jobs` processes and yield their reports in the order of the seeds."""
    if jobs <= 1:
        yield from map(_run, seeds)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_run, seeds, chunksize=4)


def reduce_faults(seed: int) -> frozenset[int]:
    """Return the numbers of a small set of faults that violates an invariant which all faults together violate."""
    needed = set(range(len(draw_lab(seed).faults)))
    violated = _violated(seed, needed)
    for place in sorted(needed, reverse=True):
        if violated and _violated(seed, needed - {place}) & violated:
            needed.discard(place)
    return frozenset(needed)


def _violated(seed: int, only: set[int]) -> set[str]:
    return {name for name, _ in run_seed(seed, only=only).violations}


def _run(seed: int) -> SeedReport:
    try:
        return run_seed(seed)
    except Exception:  # noqa: BLE001 - reported as a violation
        last = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
        return SeedReport(seed, (("simulator works", last),), (), 0, 0.0, 0.0)
