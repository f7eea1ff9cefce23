"""Kills at every k-th message of one small lab, for each role in turn."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Final

from fedstrata.common.experiment.reading import parse
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.simulated_broker import Routed
from tests.simulation.drawn import DrawnLab, draw_lab
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.invariants import DISTURBED
from tests.simulation.lab import ScenarioLab
from tests.simulation.monitor import LabRun
from tests.simulation.runs import run_lab

VICTIMS: Final = (CLOUD, "institution-0", "device-0", "device-1")
DOWN_S: Final = 0.4
SMALL: Final = {
    "name": "kills",
    "rounds": 2,
    "topology": {"institutions": 2, "devices": 3},
    "institution": {"rounds": 2},
    "links": {"check": "off"},
    "transfer": {"inline_bytes": 0, "chunk_bytes": 32_768, "keepalive_s": 10, "idle_s": 60.0},
}


def kill_each(step: int, *, seed: int, jobs: int) -> int:
    """Run one lab for every `step`-th message and each role; return 1 if an invariant is violated."""
    messages = _undisturbed(seed).outcome.messages
    cases = [(victim, number) for victim in VICTIMS for number in range(1, messages, step)]
    context = multiprocessing.get_context("forkserver")
    violated = 0
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for (victim, number), wrong in zip(
            cases, pool.map(partial(kill_at, seed), cases, chunksize=4), strict=True
        ):
            if wrong:
                violated += 1
                print(f"kill {victim} after message {number}: {wrong[:600]}", flush=True)
    print(f"{len(cases)} labs, {violated} violate an invariant", file=sys.stdout)
    return int(violated > 0)


def small_lab(seed: int) -> DrawnLab:
    """Return a small lab without faults, with the random durations and links of a seed."""
    drawn = draw_lab(seed)
    return replace(
        drawn, experiment=parse(SMALL), unequal={}, faults=(), model_bytes=80_000, broker_each=False
    )


@cache
def _undisturbed(seed: int) -> LabRun:
    return run_lab(small_lab(seed), seed=seed)


def kill_at(seed: int, case: tuple[str, int]) -> str:
    """Run a lab in which a node is killed when a message is routed; return the violations."""
    victim, number = case
    drawn = small_lab(seed)
    fault = Fault(FaultKind.KILL, 0.0, DOWN_S, victim)

    async def scenario(lab: ScenarioLab) -> None:
        reached = asyncio.Event()
        count = 0

        def hook(message: Routed) -> None:
            nonlocal count
            count += 1
            if count == number:
                reached.set()

        lab.network.hooks.append(hook)
        await reached.wait()
        if lab.alive(victim) and not lab.over:
            lab.kill(victim)
            await asyncio.sleep(DOWN_S)
            if not lab.over and not lab.alive(victim) and victim not in lab.ended:
                lab.start(victim)

    twin = _undisturbed(seed)
    killed = run_lab(drawn, seed=seed, scenario=scenario)
    at_s = killed.outcome.faults[0][0] if killed.outcome.faults else 0.0
    judged = replace(drawn, faults=(replace(fault, at_s=at_s),))
    return "; ".join(
        f"{name}: {wrong}"
        for name, check in DISTURBED.items()
        if (wrong := check(judged, killed, twin))
    )
