"""Random choice of a permanent fault: one device is lost for good, in a lab whose settings make that matter."""

from __future__ import annotations

import random
from math import inf
from typing import Any, Final

from common.experiment.reading import parse
from common.experiment.rounds import participants
from common.experiment.schema import Experiment
from deploy.simulation.agents import BROKER
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.interference import CHUNK

EVERY: Final = 5  # of so many seeds the last has a permanent fault; none of FOUND in tests/test_seeds.py is one
KINDS: Final = (FaultKind.HANG, FaultKind.KILL, FaultKind.MUTE, FaultKind.BLACK_HOLE)
START_S: Final = (0.05, 0.3)  # a device hangs before its institution can have gathered its devices
HOLE_BYTES: Final = 1500  # of a packet: all messages but chunks are smaller
MODEL_BYTES_LEAST: Final = 10_000  # several such packets
ROUNDS_LEAST: Final = 3  # rounds that are not the one which pays for the loss
IDLE_S_LEAST: Final = 60.0  # time for a broker's restart, and for uploads behind a fetch that starves
DEADLINE_S: Final = 40.0  # added to three expected global rounds: only a round that waits for the lost device needs it
QUORUM_SHARE: Final = 0.7
OLD_SHARE: Final = 0.5


def has_permanent_fault(seed: int) -> bool:
    """Return whether a seed's lab has a permanent fault; all other labs are drawn without regard to it."""
    return seed % EVERY == EVERY - 1


def draw_permanent_fault(
    rng: random.Random, experiment: Experiment, expected_s: float, *, broker_each: bool
) -> tuple[Experiment, tuple[Fault, ...]]:
    """Return the experiment, changed so that the loss of one device matters, and the faults.

    Besides the permanent fault there is only a broker's restart with a store in which a killed device is READY: other
    faults would excuse too much.
    """
    kind = rng.choice(KINDS)
    home, node = _device(rng, experiment)
    changed = parse(_tree(rng, experiment, kind, round_s=expected_s / experiment.rounds))
    if kind is FaultKind.HANG:
        return changed, (Fault(kind, round(rng.uniform(*START_S), 3), inf, node),)
    at_s = round(rng.uniform(0, 0.5 * expected_s), 3)
    detail, amount = (CHUNK if kind is FaultKind.MUTE else ""), (HOLE_BYTES if kind is FaultKind.BLACK_HOLE else 0.0)
    fault = Fault(kind, at_s, inf, node, amount, detail)
    if kind is not FaultKind.KILL or rng.random() >= OLD_SHARE:
        return changed, (fault,)
    broker = home if broker_each else BROKER
    before_s, for_s = round(max(0.0, at_s - rng.uniform(0.1, 0.9)), 3), round(rng.uniform(0.2, 3), 3)
    return changed, (Fault(FaultKind.BROKER, before_s, for_s, broker, detail="old"), fault)


def _device(rng: random.Random, experiment: Experiment) -> tuple[str, str]:
    """Return an institution and one of its devices, preferably one with siblings that can continue."""
    children = experiment.topology.homes()
    devices = [(home, device) for home, names in children.items() for device in names]
    return rng.choice([(home, device) for home, device in devices if len(children[home]) > 1] or devices)


def _tree(rng: random.Random, experiment: Experiment, kind: FaultKind, *, round_s: float) -> dict[str, Any]:
    tree = experiment.model_dump(mode="json")
    transfer, institution = tree["transfer"], tree["institution"]
    tree["rounds"] = max(tree["rounds"], ROUNDS_LEAST)
    transfer["idle_s"] = max(transfer["idle_s"], IDLE_S_LEAST)
    transfer["inline_bytes"] = 0  # an inline model would need no chunk
    transfer["upload_slots"] = rng.choice([1, 1, 2])
    if kind is FaultKind.BLACK_HOLE:
        transfer["lan"] = {}  # a codec may make the model smaller than a packet
    if rng.random() < QUORUM_SHARE and not experiment.institution.aggregation.buffers:
        most = min(participants(size, institution["participation"]) for size in experiment.sizes()[-1])
        quorum = max(1, most - rng.choice([0, 1, 1]))
        deadline_s = round(DEADLINE_S + 3 * round_s, 3)
        institution["closing"] = {"rule": "quorum", "quorum": quorum, "deadline_s": deadline_s}
        transfer["idle_s"] = max(transfer["idle_s"], deadline_s)  # an idle child would not be waited for either
    return tree
