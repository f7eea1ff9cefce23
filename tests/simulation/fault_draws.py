"""Random choice of a lab's faults: some that pass, or one device that is lost for good where that
matters.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.processes.subprocess_channel import REPLACEMENTS
from fedstrata.common.settings.topology import CLOUD, participants
from fedstrata.deploy.simulation.simulated_lab import BROKER
from fedstrata.device.pool.executors import RETRIES
from tests.simulation.faults import SIDE, Fault, FaultKind
from tests.simulation.interference import CHUNK

CONTROL: Final = (
    "Presence",
    "Task",
    "Progress",
    "Result",
    "Acknowledgement",
    "Ask",
    "Gone",
    "Question",
    "Alive",
    "Preparing",
    "Farewell",
    "Goodbye",
    "Reports",
    "Announcement",
    "chunk",
)
LETHAL: Final = 0.06  # share of the faults that last about as long as `idle_s` or longer
# share of the kills: it returns to its last checkpoint, behind what the others have done
OF_CLOUD: Final = 0.25
KINDS: Final = (
    *(FaultKind.KILL,) * 5,
    *(FaultKind.TERMINATE,) * 3,
    *(FaultKind.STOP,) * 3,
    *(FaultKind.BROKER,) * 3,
    *(FaultKind.PARTITION,) * 2,
    *(FaultKind.MUTE,) * 4,
    FaultKind.LOSS,
    FaultKind.DUPLICATION,
    FaultKind.REORDERING,
    FaultKind.SLOW,
    FaultKind.BLACK_HOLE,
    *(FaultKind.STRANGER,) * 3,
    FaultKind.FLIP,
    FaultKind.FLOOD,
    FaultKind.SEEKERS,
    FaultKind.HANG,
    FaultKind.WRONG,
    FaultKind.REMAINS,
    FaultKind.SECOND,
    FaultKind.RATES,
    *(FaultKind.ONE_WAY,) * 2,
    *(FaultKind.LIES,) * 3,
    FaultKind.UNREAD,
    FaultKind.PACKETS,
    FaultKind.CLOCK,
    *(FaultKind.SLEEP,) * 2,
    FaultKind.DISK,
    FaultKind.EVALUATOR,
    *(FaultKind.WORKER,) * 2,
)

AT_START: Final = (FaultKind.WRONG, FaultKind.REMAINS, FaultKind.PACKETS)
# sent at the end only: lost from the middle of the run to its end
LATE: Final = ("Farewell", "Goodbye", "Reports")
CHAOS: Final = (FaultKind.LOSS, FaultKind.DUPLICATION, FaultKind.REORDERING)
AMOUNTS: Final[Mapping[FaultKind, Sequence[float]]] = {
    **dict.fromkeys(CHAOS, (0.05, 0.3)),
    FaultKind.SLOW: (3e3, 2e4, 1e5),
    FaultKind.BLACK_HOLE: (600, 1500, 10_000),
    FaultKind.KILL: (0.0, 0.0, 0.0, -3600.0, 3600.0),
    FaultKind.TERMINATE: (0.0, 0.0, 0.0, -3600.0, 3600.0),
    FaultKind.FLIP: (0.1, 0.5),
    FaultKind.STRANGER: (0, 10, 30, 60),
    FaultKind.LIES: (0.1, 0.5, 1.0),
    FaultKind.PACKETS: (34_000, 70_000),
    FaultKind.CLOCK: (-3600.0, -5.0, 3600.0),
    FaultKind.EVALUATOR: (1, 2, REPLACEMENTS + 1),
    FaultKind.WORKER: (1, 1, 1, RETRIES + 1),
}
DETAILS: Final[Mapping[FaultKind, Sequence[str]]] = {
    FaultKind.MUTE: CONTROL,
    FaultKind.BROKER: ("empty", "current", "old"),
    FaultKind.ONE_WAY: ("up", "down"),
}
# the permanent faults
LASTING: Final = (FaultKind.HANG, FaultKind.KILL, FaultKind.MUTE, FaultKind.BLACK_HOLE)
# share of the labs with scores that have a member which lies in its side numbers throughout
LYING: Final = 0.3
HANGS_S: Final = (0.05, 0.3)  # a device hangs before its institution can have gathered its devices
HOLE_BYTES: Final = 1500  # of a packet: all messages but chunks are smaller
ROUNDS_LEAST: Final = 3  # rounds that are not the one which pays for the loss
# time for a broker's restart, and for uploads behind a fetch that starves
IDLE_S_LEAST: Final = 60.0
# added to three expected global rounds: only a round that waits for the lost device needs it
DEADLINE_S: Final = 40.0
QUORUM_SHARE: Final = 0.7
OLD_SHARE: Final = 0.5


def draw_faults(
    rng: random.Random, experiment: Experiment, expected_s: float, *, broker_each: bool
) -> tuple[Fault, ...]:
    """Return faults that pass, in the order of their times."""
    parents, devices = experiment.tree.aggregators, experiment.tree.devices
    brokers = [BROKER, *(parents if broker_each else ())]
    faults = []
    for _ in range(rng.choice([1, 1, 2, 2, 3, 3, 4, 5, 6, 10])):
        kind = rng.choice(KINDS)
        node = rng.choice(
            [
                rng.choice(devices),
                rng.choice(parents or [CLOUD]),
                rng.choice([*devices, CLOUD, CLOUD]),
            ]
        )
        faults.append(_fault(rng, kind, node, experiment, expected_s, devices, brokers))
    if experiment.evaluation.on_devices and rng.random() < LYING:
        amount = rng.choice(AMOUNTS[FaultKind.LIES])
        faults.append(
            Fault(FaultKind.LIES, 0.0, round(expected_s, 3), rng.choice(devices), amount, SIDE)
        )
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
    if kind in (FaultKind.KILL, FaultKind.TERMINATE) and rng.random() < OF_CLOUD:
        node = CLOUD
    if (
        kind in (FaultKind.WRONG, FaultKind.HANG, FaultKind.SECOND, FaultKind.WORKER)
        and node not in devices
    ):
        node = rng.choice(devices) if kind is not FaultKind.SECOND or node == CLOUD else node
    if kind in (*CHAOS, FaultKind.MUTE):
        node = rng.choice([node, ""])
    elif kind is FaultKind.BROKER:
        node = rng.choice(brokers)
    if kind in CHAOS:
        for_s *= 3
    elif kind in (FaultKind.STOP, FaultKind.SLEEP) and rng.random() < 0.4:
        for_s = rng.uniform(1.2, 2.2) * keepalive_s
    elif kind in (FaultKind.PARTITION, FaultKind.ONE_WAY) and rng.random() < 0.5:
        for_s = rng.uniform(0.5, 2.5) * keepalive_s
    if kind not in (*AT_START, FaultKind.SECOND) and rng.random() < LETHAL:
        for_s = idle_s * rng.uniform(0.9, 1.6)
    amount, detail = rng.choice(AMOUNTS.get(kind, (0.0,))), rng.choice(DETAILS.get(kind, ("",)))
    if kind is FaultKind.MUTE and detail in LATE:
        at_s, for_s = 0.5 * expected_s, expected_s
        node = rng.choice([node, *experiment.tree.children[CLOUD]])
    return Fault(kind, round(at_s, 3), round(for_s, 3), node, amount, detail, keep, clean)


def draw_permanent_fault(
    rng: random.Random, experiment: Experiment, expected_s: float, *, broker_each: bool
) -> tuple[Experiment, tuple[Fault, ...]]:
    """Return the experiment, changed so that the loss of one device matters, and the faults.

    Besides the permanent fault there is only a broker's restart with a store in which a killed
    device is READY: other faults would excuse too much.
    """
    kind = rng.choice(LASTING)
    home, node = _device(rng, experiment)
    changed = parse(_tree(rng, experiment, kind, round_s=expected_s / experiment.rounds))
    if kind is FaultKind.HANG:
        return changed, (Fault(kind, round(rng.uniform(*HANGS_S), 3), inf, node),)
    at_s = round(rng.uniform(0, 0.5 * expected_s), 3)
    detail, amount = (
        (CHUNK if kind is FaultKind.MUTE else ""),
        (HOLE_BYTES if kind is FaultKind.BLACK_HOLE else 0.0),
    )
    fault = Fault(kind, at_s, inf, node, amount, detail)
    if kind is not FaultKind.KILL or rng.random() >= OLD_SHARE:
        return changed, (fault,)
    broker = home if broker_each else BROKER
    before_s, for_s = (
        round(max(0.0, at_s - rng.uniform(0.1, 0.9)), 3),
        round(rng.uniform(0.2, 3), 3),
    )
    return changed, (Fault(FaultKind.BROKER, before_s, for_s, broker, detail="old"), fault)


def _device(rng: random.Random, experiment: Experiment) -> tuple[str, str]:
    """Return an institution and one of its devices, preferably one with siblings that can continue."""
    children = experiment.tree.children
    devices = [(experiment.tree.parent(device), device) for device in experiment.tree.devices]
    return rng.choice(
        [(home, device) for home, device in devices if len(children[home]) > 1] or devices
    )


def _tree(
    rng: random.Random, experiment: Experiment, kind: FaultKind, *, round_s: float
) -> dict[str, Any]:
    tree = experiment.model_dump(mode="json")
    transfer, institution = tree["transfer"], tree["tiers"][-1]
    tree["rounds"] = max(tree["rounds"], ROUNDS_LEAST)
    transfer["idle_s"] = max(transfer["idle_s"], IDLE_S_LEAST)
    transfer["inline_bytes"] = 0  # an inline model would need no chunk
    transfer["upload_slots"] = rng.choice([1, 1, 2])
    if kind is FaultKind.BLACK_HOLE:
        institution["transfer"] = {}  # a codec may make the model smaller than a packet
    if rng.random() < QUORUM_SHARE and not experiment.tiers[-1].aggregation.buffers:
        most = min(
            participants(size, institution["participation"]) for size in experiment.sizes()[-1]
        )
        quorum = max(1, most - rng.choice([0, 1, 1]))
        deadline_s = round(DEADLINE_S + 3 * round_s, 3)
        institution["closing"] = {"rule": "quorum", "quorum": quorum, "deadline_s": deadline_s}
        # an idle child would not be waited for either
        transfer["idle_s"] = max(transfer["idle_s"], deadline_s)
    return tree
