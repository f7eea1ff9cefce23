"""Random choice of a seed's faults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from deploy.simulation.agents import BROKER
from tests.simulation.faults import Fault, FaultKind

CONTROL: Final = (
    "Presence", "Task", "Progress", "Result", "Acknowledgement", "Ask", "Gone", "WhoIsThere", "Alive", "Preparing",
    "Farewell", "Goodbye", "Reports", "Announcement", "chunk",
)  # fmt: skip
LETHAL: Final = 0.06  # share of the faults that last about as long as `idle_s` or longer
KINDS: Final = (
    *(FaultKind.KILL,) * 5, *(FaultKind.TERMINATE,) * 3, *(FaultKind.STOP,) * 3, *(FaultKind.BROKER,) * 3,
    *(FaultKind.PARTITION,) * 2, *(FaultKind.MUTE,) * 4, FaultKind.LOSS, FaultKind.DUPLICATION, FaultKind.REORDERING,
    FaultKind.SLOW, FaultKind.BLACK_HOLE, FaultKind.STRANGER, FaultKind.FLIP, FaultKind.FLOOD, FaultKind.SEEKERS,
    FaultKind.HANG, FaultKind.WRONG, FaultKind.REMAINS, FaultKind.SECOND,
)  # fmt: skip

AT_START: Final = (FaultKind.WRONG, FaultKind.REMAINS)
CHAOS: Final = (FaultKind.LOSS, FaultKind.DUPLICATION, FaultKind.REORDERING)
AMOUNTS: Final[Mapping[FaultKind, Sequence[float]]] = {
    **dict.fromkeys(CHAOS, (0.05, 0.3)),
    FaultKind.SLOW: (3e3, 2e4, 1e5),
    FaultKind.BLACK_HOLE: (600, 1500, 10_000),
    FaultKind.KILL: (0.0, 0.0, 0.0, -3600.0, 3600.0),
    FaultKind.TERMINATE: (0.0, 0.0, 0.0, -3600.0, 3600.0),
    FaultKind.FLIP: (0.1, 0.5),
}
DETAILS: Final[Mapping[FaultKind, Sequence[str]]] = {
    FaultKind.MUTE: CONTROL,
    FaultKind.BROKER: ("empty", "current", "old"),
}


def draw_faults(
    rng: random.Random, experiment: Experiment, expected_s: float, *, broker_each: bool
) -> tuple[Fault, ...]:
    """Return the faults of a seed, in the order of their times."""
    parents, devices = experiment.tree.aggregators, experiment.tree.devices
    brokers = [BROKER, *(parents if broker_each else ())]
    faults = []
    for _ in range(rng.choice([1, 1, 2, 2, 3, 3, 4, 5, 6, 10])):
        kind = rng.choice(KINDS)
        node = rng.choice([rng.choice(devices), rng.choice(parents or [CLOUD]), rng.choice([*devices, CLOUD])])
        faults.append(_fault(rng, kind, node, experiment, expected_s, devices, brokers))
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.kind)))


def _fault(
    rng: random.Random,
    kind: FaultKind,
    node: str,
    experiment: Experiment,
    expected_s: float,
    devices: list[str],
    brokers: list[str],
) -> Fault:
    keepalive_s, idle_s = experiment.transfer.keepalive_s, experiment.transfer.idle_s
    at_s = 0.0 if kind in AT_START else rng.uniform(0, 1.1 * expected_s)
    for_s = rng.choice([rng.uniform(0, 0.5), rng.uniform(0, 3), rng.uniform(0, 8)])
    keep, clean = rng.random() < 0.7, rng.random() < 0.5
    if kind in (FaultKind.WRONG, FaultKind.HANG, FaultKind.SECOND) and node not in devices:
        node = rng.choice(devices) if kind is not FaultKind.SECOND or node == CLOUD else node
    if kind in (*CHAOS, FaultKind.MUTE):
        node = rng.choice([node, ""])
    elif kind is FaultKind.BROKER:
        node = rng.choice(brokers)
    if kind in CHAOS:
        for_s *= 3
    elif kind is FaultKind.STOP and rng.random() < 0.4:
        for_s = rng.uniform(1.2, 2.2) * keepalive_s
    elif kind is FaultKind.PARTITION and rng.random() < 0.5:
        for_s = rng.uniform(0.5, 2.5) * keepalive_s
    if kind not in (*AT_START, FaultKind.SECOND) and rng.random() < LETHAL:
        for_s = idle_s * rng.uniform(0.9, 1.6)
    amount, detail = rng.choice(AMOUNTS.get(kind, (0.0,))), rng.choice(DETAILS.get(kind, ("",)))
    return Fault(kind, round(at_s, 3), round(for_s, 3), node, amount, detail, keep, clean)
