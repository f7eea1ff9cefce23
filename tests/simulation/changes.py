"""Random choice of what changes in a lab while it runs: absent nodes, devices that enter, and
devices that move.
"""

from __future__ import annotations

import random
from typing import Any, Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from tests.simulation.faults import Fault, FaultKind

MINIMA: Final = 0.3  # share of the labs that begin and go on without some of their nodes,
MINIMUM: Final = 0.7  # and of their tiers
# share of the labs whose devices may be absent into which devices enter, or in which they move
CHANGING: Final = 0.6
NEW: Final = 900  # number of the first device that enters
# share of these labs into which more devices enter, and leave, than have places at a time
VISITED: Final = 0.4
VISITOR: Final = 950  # number of the first of these
STAY_S: Final = (0.3, 2.0, 8.0)


def with_minima(rng: random.Random, experiment: Experiment) -> Experiment:
    """Return a lab some of whose parents need not have all children, if its rules allow it and
    chance will.
    """
    if rng.random() >= MINIMA:
        return experiment
    tree = experiment.model_dump(mode="json")
    for tier in tree["tiers"]:
        if rng.random() < MINIMUM:
            tier |= {
                "min_available": rng.choice([1, 0.5, 0.8]),
                "start_wait_s": rng.choice([0.0, 2.0, 20.0]),
            }
    try:
        return parse(tree)
    except InvalidExperiment:  # of a rule that needs more uploads
        return experiment


def with_changes(
    rng: random.Random, experiment: Experiment, expected_s: float
) -> tuple[Experiment, list[Fault]]:
    """Return a lab in which devices may move, and those that enter, if its devices may be absent
    and chance will.
    """
    if experiment.tiers[-1].min_available is None or rng.random() >= CHANGING:
        return experiment, []
    tree, parents, devices = (
        experiment.model_dump(mode="json"),
        experiment.tree.parents,
        experiment.tree.devices,
    )
    tree["tiers"][-1] |= {
        "entering": rng.choice([1, 2, 8]),
        "move_after_s": rng.choice([None, 3.0, 10.0]),
    }
    if len(parents) > 1:
        moving = rng.sample(devices, min(rng.choice([0, 1, 1, 2, 3]), len(devices)))
        tree["availability"] = {
            "moves": {device: _moves(rng, parents, expected_s) for device in moving}
        }
    try:
        changed = parse(tree)
    except InvalidExperiment:  # of a rule, or with privacy
        return experiment, []
    entries = [
        _entry(rng, NEW + number, parents, expected_s)
        for number in range(rng.choice([0, 1, 1, 2, 3]))
    ]
    visitors = rng.choice([4, 10]) if rng.random() < VISITED else 0
    return changed, entries + [
        _visit(rng, VISITOR + number, parents, expected_s) for number in range(visitors)
    ]


def _entry(rng: random.Random, number: int, parents: list[str], expected_s: float) -> Fault:
    at_s, for_s = round(rng.uniform(0, expected_s), 3), rng.choice([0.5, 3.0, 30.0])
    return Fault(FaultKind.ENTRY, at_s, for_s, f"device-{number}", detail=rng.choice(parents))


def _visit(rng: random.Random, number: int, parents: list[str], expected_s: float) -> Fault:
    at_s, for_s, clean = (
        round(rng.uniform(0, expected_s), 3),
        rng.choice(STAY_S),
        rng.random() < 0.5,
    )
    return Fault(
        FaultKind.VISIT, at_s, for_s, f"device-{number}", detail=rng.choice(parents), clean=clean
    )


def _moves(rng: random.Random, parents: list[str], expected_s: float) -> list[dict[str, Any]]:
    times = sorted({round(rng.uniform(0, expected_s), 3) for _ in range(rng.choice([1, 1, 2, 4]))})
    return [{"at_s": at_s, "parent": rng.choice(parents)} for at_s in times]
