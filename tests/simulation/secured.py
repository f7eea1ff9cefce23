"""Secure sums in drawn labs, on one tier or more, whose rules are then means."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.protocol.messages import Key, RoundTurn
from fedstrata.common.secure.member import SecureMember
from fedstrata.common.secure.records import Opened, Present, read
from tests.simulation.monitor import Evidence

SECURED: Final = 2 * 10**9  # the least seed of the labs with secure sums
MEANS: Final[tuple[dict[str, Any], ...]] = (
    {"name": "fedavg"},
    {"name": "fedavg", "weights": "uniform"},
    {"name": "fedadam", "learning_rate": 0.1},
)


def secured(seed: int, experiment: Experiment) -> Experiment:
    """Return a lab with secure sums where it can have them; as it is, if it can nowhere."""
    rng = random.Random(f"{seed} secure")
    found = experiment
    places = list(range(len(experiment.tiers)))
    rng.shuffle(places)
    for place in places:
        if found is not experiment and rng.random() < 0.5:
            continue
        tree = found.model_dump(mode="json")
        tier = tree["tiers"][place]
        tier["secure"] = {
            "threshold": rng.choice([0.51, 0.7, 1.0]),
            "bits": rng.choice([8, 24, 30]),
            "clip": 1000.0,
            "neighbours": rng.choice([3, 50]),
        }
        tier["aggregation"] = dict(rng.choice(MEANS))
        tier["selection"] = {"name": "fraction"}
        tier["norm_bound"] = {}
        tier["transfer"]["up"] = {"name": "fp32"}
        if tier["privacy"].get("noise_by") == "parent":
            tier["privacy"] = {}
        if place == 0:
            tree["cloud"]["epoch_control"] = {"name": "fixed"}
        if place == len(tree["tiers"]) - 1:
            tree["evaluation"] = {}
            tree["model"]["personal"] = []
        try:
            found = parse(tree)
        except InvalidExperiment:  # a parent has one child
            continue
    return found


@contextmanager
def shares_noted(evidence: Evidence) -> Iterator[None]:
    """Note inside the `with` block which secrets the answers of children open."""
    answer = SecureMember.answer

    def noted(member: SecureMember, key: Key, question: bytes | memoryview) -> bytes:
        found = answer(member, key, question)
        if key.turn == RoundTurn.UNMASK:
            exchange = read(Present, question).exchange
            for share in read(Opened, found).shares:
                evidence.opened[exchange, share.name].add(share.present)
        return found

    with patch.object(SecureMember, "answer", noted):
        yield
