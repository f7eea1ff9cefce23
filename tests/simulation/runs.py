"""A drawn lab with its faults, beside its undisturbed twin, checked against the invariants; and many of them."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from deploy.simulation.lab import Scenario, SimulatedLab
from tests.simulation.absence_draws import last_return_s, without_absences
from tests.simulation.drawn import DrawnLab, draw_lab
from tests.simulation.fault_injection import inject_faults, set_links, supervise
from tests.simulation.faults import Fault
from tests.simulation.invariants import DISTURBED, UNDISTURBED, gap_and_bound
from tests.simulation.monitor import LabRun, Monitor

TWIN_SEED: Final = 1_000_000_007
TIME_FACTOR: Final = 30.0  # a lab's time limit, in multiples of the expected time
TIME_SPARE_S: Final = 1500.0
GRACE_S: Final = 60.0  # added to twice `idle_s` and the longest fault: time for nodes whose parent is gone at the end

Watch = Callable[[SimulatedLab], None]


@dataclass(frozen=True, slots=True)
class SeedReport:
    """Result of a seed. `violations`: (invariant, problem); `gap_s`: time from the last fault to the next closing."""

    seed: int
    violations: tuple[tuple[str, str], ...]
    faults: tuple[Fault, ...]
    labs: int
    virtual_s: float
    real_s: float
    failed: bool = False
    gap_s: float = 0.0
    bound_s: float = 0.0
    notes: tuple[str, ...] = field(default=())


def run_seed(seed: int, *, only: Collection[int] | None = None, watch: Watch | None = None) -> SeedReport:
    """Run one seed. `only`: the numbers of the faults to inject; `watch` is called with the faulty lab at its start."""
    begun = time.perf_counter()
    drawn = draw_lab(seed)
    if only is not None:
        drawn = replace(drawn, faults=tuple(fault for place, fault in enumerate(drawn.faults) if place in only))
    undisturbed = replace(drawn, experiment=without_absences(drawn.experiment))
    twin = run_lab(undisturbed, seed=seed + TWIN_SEED, faults=())
    violations = [(name, wrong) for name, check in UNDISTURBED.items() if (wrong := check(undisturbed, twin))]
    faulty = run_lab(drawn, seed=seed, faults=drawn.faults, watch=watch)
    gap_s, bound_s = gap_and_bound(drawn, faulty, twin)
    if not violations:
        for name, check in DISTURBED.items():
            if wrong := check(drawn, faulty, twin):
                violations.append((name, wrong))
    return SeedReport(
        seed=seed,
        violations=tuple(violations),
        faults=drawn.faults,
        labs=2,
        virtual_s=twin.outcome.virtual_s + faulty.outcome.virtual_s,
        real_s=time.perf_counter() - begun,
        failed=not faulty.outcome.ok,
        gap_s=gap_s,
        bound_s=bound_s,
    )


def run_lab(
    drawn: DrawnLab,
    *,
    seed: int,
    faults: tuple[Fault, ...],
    watch: Watch | None = None,
    scenario: Scenario | None = None,
) -> LabRun:
    """Run a random lab once."""
    monitor = Monitor()

    async def disturb(lab: SimulatedLab) -> None:
        monitor.lab = lab
        lab.network.hooks.append(monitor.answered)
        if not faults:
            lab.network.hooks.append(monitor.routed)
        set_links(lab, drawn.unequal)
        if watch is not None:
            watch(lab)
        beside = [asyncio.create_task(supervise(lab)), *([asyncio.create_task(monitor.sample())] if faults else ())]
        try:
            await inject_faults(lab, faults)
            if scenario is not None:
                await scenario(lab)
            await asyncio.get_running_loop().create_future()
        finally:
            for task in beside:
                task.cancel()

    idle_s, absent_s = drawn.experiment.transfer.idle_s, last_return_s(drawn.experiment)
    lab = SimulatedLab(
        drawn.experiment,
        seed=seed,
        scenario=disturb,
        model_bytes=drawn.model_bytes,
        durations=drawn.durations,
        conditions=drawn.conditions,
        broker_each=drawn.broker_each,
        spool=drawn.spool,
        executor_delay_s=drawn.executor_delay_s,
        time_limit_s=TIME_FACTOR * drawn.expected_s + TIME_SPARE_S + 4 * idle_s + absent_s,
        grace_s=2 * idle_s + GRACE_S + absent_s + max((f.for_s for f in drawn.faults if not f.permanent), default=0.0),
        observe=monitor.observe,
        at_end=monitor.end,
    )
    return LabRun(lab.run(), monitor.evidence)


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
