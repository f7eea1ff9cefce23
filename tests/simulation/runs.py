"""A drawn lab with its faults, beside its undisturbed twin, checked against the invariants; and
many of them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.simulated_lab import BROKER
from fedstrata.deploy.simulation.simulated_machines import MessageCosts, Placement
from tests.simulation.drawn import DrawnLab, draw_lab
from tests.simulation.fault_injection import inject_faults, set_links, supervise
from tests.simulation.frozen import FrozenWorkload
from tests.simulation.invariants import DISTURBED, UNDISTURBED, gap_and_bound
from tests.simulation.lab import Scenario, ScenarioLab
from tests.simulation.labs import read_lab
from tests.simulation.monitor import LabRun, Monitor
from tests.simulation.secured import shares_noted
from tests.simulation.trainer import TrainerComputing

TWIN_SEED: Final = 1_000_000_007
TIME_FACTOR: Final = 30.0  # a lab's time limit, in multiples of the expected time
TIME_SPARE_S: Final = 1500.0
# added to twice `idle_s` and the longest fault: time for nodes whose parent is gone at the end
GRACE_S: Final = 60.0

Watch = Callable[[ScenarioLab], None]
Source = int | Path  # of a lab: the seed of its draw, or its file


@dataclass(frozen=True, slots=True)
class LabReport:
    """What came of a drawn lab. `violations`: (invariant, problem); `gap_s`: from the last fault to
    a closing.

    `lies`: what its members have lied about.
    """

    drawn: DrawnLab
    violations: tuple[tuple[str, str], ...]
    labs: int = 2
    virtual_s: float = 0.0
    real_s: float = 0.0
    failed: bool = False
    gap_s: float = 0.0
    bound_s: float = 0.0
    lies: frozenset[str] = frozenset()


def lab_of(source: Source) -> DrawnLab:
    """Return the lab of a seed or a file."""
    return draw_lab(source) if isinstance(source, int) else read_lab(source)


def check_lab(drawn: DrawnLab, *, watch: Watch | None = None) -> LabReport:
    """Run a lab with its faults beside its twin. `watch` is called with the faulty lab at its
    start.
    """
    begun = time.perf_counter()
    undisturbed = replace(drawn.without_absences(), faults=())
    twin = run_lab(undisturbed, seed=drawn.seed + TWIN_SEED)
    violations = [
        (name, wrong) for name, check in UNDISTURBED.items() if (wrong := check(undisturbed, twin))
    ]
    faulty = run_lab(drawn, seed=drawn.seed, watch=watch)
    gap_s, bound_s = gap_and_bound(drawn, faulty, twin)
    if not violations:
        for name, check in DISTURBED.items():
            if wrong := check(drawn, faulty, twin):
                violations.append((name, wrong))
    return LabReport(
        drawn,
        tuple(violations),
        virtual_s=twin.outcome.virtual_s + faulty.outcome.virtual_s,
        real_s=time.perf_counter() - begun,
        failed=not faulty.outcome.ok,
        gap_s=gap_s,
        bound_s=bound_s,
        lies=faulty.outcome.lies,
    )


def run_lab(
    drawn: DrawnLab, *, seed: int, watch: Watch | None = None, scenario: Scenario | None = None
) -> LabRun:
    """Run a lab once, with its faults."""
    monitor = Monitor()

    async def disturb(lab: ScenarioLab) -> None:
        monitor.lab = lab
        lab.network.hooks.append(monitor.answered)
        if not drawn.faults:
            lab.network.hooks.append(monitor.routed)
        set_links(lab, drawn.unequal)
        if watch is not None:
            watch(lab)
        beside = [asyncio.create_task(supervise(lab))]
        beside += [asyncio.create_task(monitor.sample())] if drawn.faults else []
        try:
            await inject_faults(lab, drawn.faults)
            if scenario is not None:
                await scenario(lab)
            await asyncio.get_running_loop().create_future()
        finally:
            for task in beside:
                task.cancel()

    idle_s, absent_s = drawn.experiment.transfer.idle_s, drawn.last_return_s
    longest_s = max((fault.for_s for fault in drawn.faults if not fault.permanent), default=0.0)
    lab = ScenarioLab(
        drawn.experiment,
        seed=seed,
        scenario=disturb,
        workload=FrozenWorkload(drawn.model_bytes, drawn.frozen_bytes)
        if drawn.frozen_bytes
        else None,
        model_bytes=drawn.model_bytes,
        durations=drawn.durations,
        conditions=drawn.conditions,
        broker_each=drawn.broker_each,
        spool=drawn.spool,
        placement=_placement(drawn) if drawn.byte_s else None,
        runs=drawn.runs,
        executor_delay_s=drawn.executor_delay_s,
        time_limit_s=TIME_FACTOR * drawn.expected_s
        + TIME_SPARE_S
        + 4 * idle_s
        + absent_s
        + drawn.waits_s,
        grace_s=2 * idle_s + GRACE_S + absent_s + longest_s,
        observe=monitor.observe,
        at_end=monitor.end,
    )
    if not drawn.experiment.training.trainer.learns_module:
        lab.agents = replace(lab.agents, hardware=TrainerComputing(lab.hardware))
    with shares_noted(monitor.evidence):
        return LabRun(lab.run(), monitor.evidence)


def _placement(drawn: DrawnLab) -> Placement:
    """Return a machine with one core for each node and broker, which is busy with each byte."""
    nodes, cost = drawn.experiment.tree.nodes, drawn.byte_s
    return Placement(
        cores=1,
        hosts={name: name for node in (CLOUD, *nodes) for name in (node, f"second {node}")},
        brokers={name: f"broker {name}" for name in (BROKER, *drawn.experiment.tree.aggregators)},
        costs=MessageCosts(agent_byte_s=cost, broker_byte_s=cost),
        interface=None,
        work_s=cpu_free,
    )


def cpu_free(begin: Callable[[], None], host: str) -> float:
    """Call a function that takes no time of its core."""
    begin()
    return 0.0


def check_many(sources: Sequence[Source], *, jobs: int) -> Iterator[LabReport]:
    """Check labs in `jobs` processes and yield their reports in order."""
    if jobs <= 1:
        yield from map(_check, sources)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_check, sources, chunksize=4)


def with_only(drawn: DrawnLab, places: Collection[int]) -> DrawnLab:
    """Return a lab with some of its faults, by their numbers."""
    return replace(
        drawn, faults=tuple(fault for place, fault in enumerate(drawn.faults) if place in places)
    )


def reduce_faults(drawn: DrawnLab) -> frozenset[int]:
    """Return the numbers of a small set of faults that violates an invariant which all faults
    together violate.
    """
    needed = set(range(len(drawn.faults)))
    violated = _violated(drawn)
    for place in sorted(needed, reverse=True):
        if violated and _violated(with_only(drawn, needed - {place})) & violated:
            needed.discard(place)
    return frozenset(needed)


def _violated(drawn: DrawnLab) -> set[str]:
    return {name for name, _ in check_lab(drawn).violations}


def _check(source: Source) -> LabReport:
    drawn = lab_of(source)
    try:
        return check_lab(drawn)
    except Exception:  # noqa: BLE001 - reported as a violation
        last = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
        return LabReport(drawn, (("simulator works", last),), labs=0)
