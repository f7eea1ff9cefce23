"""Random choice of what must come together: a trainer of a user's own with its state, absences, and
deaths.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.settings.training import OF_MODULES
from tests.simulation import trainer
from tests.simulation.faults import Fault, FaultKind

SILENT: Final = 0.5  # share of the trainers some of whose devices know no loss
# keys of the evaluation by a trainer
KEPT: Final = ("at", "every", "participation", "personalised")
DEATHS: Final = (
    FaultKind.KILL,
    FaultKind.KILL,
    FaultKind.KILL,
    FaultKind.TERMINATE,
    FaultKind.EVALUATOR,
)


def trained_by_own(
    rng: random.Random, experiment: Experiment, *, model_bytes: int, plainly: bool = False
) -> Experiment:
    """Return a lab with a trainer of a user's own, whose model has a buffer; as it is, if it cannot
    have one.

    `plainly`: a rule that cannot have one gives way to FedAvg, and privacy goes.
    """
    silent = rng.random() < SILENT and not experiment.compares_losses
    own = trainer.settings(model_bytes // 4, silent=silent)
    # the model has a buffer, which has no noise
    private = any(tier.privacy.acts for tier in experiment.tiers)
    choices = [] if private else [_tiers(experiment)]
    choices += [_plain_tiers(experiment)] if plainly else []
    for tiers in choices:
        try:
            return parse(_tree(experiment, own) | {"tiers": tiers})
        except InvalidExperiment:  # of a rule that needs fedstrata's training
            continue
    return experiment


def deaths(rng: random.Random, experiment: Experiment, expected_s: float) -> tuple[Fault, ...]:
    """Return faults that end processes, mostly of devices while they train, and of their workers."""
    devices, above = experiment.tree.devices, [*experiment.tree.aggregators, CLOUD]
    trained = rng.sample(devices, min(len(devices), rng.choice([1, 1, 2])))
    found = [
        Fault(FaultKind.WORKER, round(rng.uniform(0, expected_s), 3), 0.0, node, 1.0)
        for node in trained
    ]
    for _ in range(rng.choice([1, 2, 3])):
        kind = rng.choice(DEATHS)
        node = rng.choice([rng.choice(devices), rng.choice(devices), rng.choice(above)])
        at_s, for_s = round(rng.uniform(0, expected_s), 3), round(rng.uniform(0, 3), 3)
        amount = 1.0 if kind is FaultKind.EVALUATOR else 0.0
        found.append(Fault(kind, at_s, for_s, node, amount))
    return tuple(found)


def in_order(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Return faults in the order of their times."""
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.kind)))


def _tiers(experiment: Experiment) -> list[dict[str, Any]]:
    tiers: list[dict[str, Any]] = experiment.model_dump(mode="json")["tiers"]
    return tiers


def _plain_tiers(experiment: Experiment) -> list[dict[str, Any]]:
    return [
        tier | {"aggregation": {"name": "fedavg"}, "privacy": {}} for tier in _tiers(experiment)
    ]


def _tree(experiment: Experiment, own: dict[str, Any]) -> dict[str, Any]:
    tree = experiment.model_dump(mode="json")
    training = {key: value for key, value in tree["training"].items() if key not in OF_MODULES}
    evaluation = {key: value for key, value in tree["evaluation"].items() if key in KEPT}
    return tree | {
        "data": {},
        "model": {},
        "training": training | {"trainer": own},
        "evaluation": evaluation,
    }
