"""Adversaries in drawn labs: devices that lie, alone or together, late ones, institutions that lie
to both sides, and links on which models are changed.

Lies depend on the seed, the name and the round alone, so a disturbed lab has the model of its
undisturbed twin, and no lie ends an honest node. Silent ones are left out: a lab with them depends
on time.
"""

from __future__ import annotations

import random
from typing import Any, Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment

ATTACKED: Final = 10**9  # the least seed of the labs with adversaries
BY_DEVICES: Final[tuple[dict[str, Any], ...]] = (
    {"name": "sign_flip"},
    {"name": "scaled", "factor": 2.0},
    {"name": "gaussian", "std": 0.1},
    {"name": "free_rider", "std": 0.01},
    {"name": "false_report", "samples_factor": 0.5, "loss_factor": 2.0},
    {"name": "late", "hold_s": 0.7},
)
BY_INSTITUTIONS: Final[tuple[dict[str, Any], ...]] = (
    {"name": "sign_flip"},
    {"name": "gaussian", "std": 0.1},
    {"name": "equivocation", "std": 0.1},
)
ON_LINKS: Final[tuple[dict[str, Any], ...]] = (
    {"name": "sign_flip"},
    {"name": "gaussian", "std": 0.1},
    {"name": "free_rider"},
    {"name": "equivocation", "std": 0.1},
    {"name": "equivocation", "std": 0.1},
)
TOGETHER: Final = ("lie", "min_max", "min_sum")
TRIES: Final = 5


def attacked(seed: int, experiment: Experiment) -> Experiment:
    """Return a lab with adversaries; as it is, if it cannot have those that are drawn."""
    rng = random.Random(f"{seed} adversaries")
    for _ in range(TRIES):
        tables: list[dict[str, Any]] = []
        devices, institutions = list(experiment.tree.devices), experiment.tree.aggregators
        rng.shuffle(devices)
        if institutions and rng.random() < 0.4:
            tables.append(
                {"attack": dict(rng.choice(BY_INSTITUTIONS)), "nodes": [rng.choice(institutions)]}
            )
        if len(devices) > 2 and rng.random() < 0.4:
            some = [devices.pop() for _ in range(rng.randint(1, len(devices) // 2))]
            attack = {"name": rng.choice(TOGETHER)}
            tables.append(
                {"attack": attack, "nodes": some, "knows": rng.choice(["colluders", "siblings"])}
            )
        if not tables or rng.random() < 0.5:
            tables.append({"attack": dict(rng.choice(BY_DEVICES)), "nodes": [devices.pop()]})
        taken = {name for table in tables for name in table["nodes"]}
        honest = [name for name in experiment.tree.nodes if name not in taken]
        if honest and rng.random() < 0.4:
            tables.append({"attack": dict(rng.choice(ON_LINKS)), "links": [rng.choice(honest)]})
        for table in tables:
            table |= {"probability": rng.choice([1.0, 0.5]), "from_round": rng.choice([1, 1, 2])}
        try:
            return parse(experiment.model_dump(mode="json") | {"adversaries": tables})
        except InvalidExperiment:  # of a rule that has uploads of several rounds
            continue
    return experiment
