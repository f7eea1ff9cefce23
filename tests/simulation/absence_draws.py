"""Random absences of devices in a drawn lab, from a generator of their own: labs of lower seeds stay what they were."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Final

from common.experiment.availability import Availability
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from tests.simulation.method_draws import BUFFERS_FROM, CLUSTERS_FROM, METHODS_FROM, STATES_FROM

ABSENCES_FROM: Final = 500_000  # the first seed whose devices come and leave by a trace
SHARE: Final = 0.5  # of the devices
TOGETHER: Final = 0.2  # share of the labs all of whose devices leave at the same time
LATE: Final = 0.2  # share of the devices that are away as the run begins


def methods_of(seed: int) -> int:
    """Return the seed that decides which methods a lab may have: its own, or with absences one of any generation."""
    if seed < ABSENCES_FROM:
        return seed
    return random.Random(f"{seed} generation").choice([0, METHODS_FROM, STATES_FROM, CLUSTERS_FROM, BUFFERS_FROM])


def with_absences(rng: random.Random, experiment: Experiment, expected_s: float) -> Experiment:
    """Return a drawn lab in which some devices are away for a while, one at least; all of them return for good."""
    devices = experiment.tree.devices
    if rng.random() < TOGETHER:
        leave_s = rng.uniform(0.0, expected_s)
        away = {name: [0.0, leave_s, leave_s + _away_s(rng, experiment)] for name in devices}
    else:
        away = {name: _changes(rng, experiment, expected_s) for name in devices if rng.random() < SHARE}
        away = away or {rng.choice(devices): _changes(rng, experiment, expected_s)}
    changes = {name: [round(at_s, 3) for at_s in each] for name, each in away.items()}
    return parse(experiment.model_dump(mode="json") | {"availability": {"trace": {"changes": changes}}})


def without_absences(experiment: Experiment) -> Experiment:
    """Return the lab in which every device is always there."""
    return experiment.model_copy(update={"availability": Availability()})


def departures(experiment: Experiment, device: str) -> int:
    """Return how often a device leaves."""
    online = experiment.online(device)
    return 0 if online is None else (len(online.changes) - 1) // 2 + (online.changes[0] > 0)


def last_return_s(experiment: Experiment) -> float:
    """Return when the last device has returned, seconds since time zero; 0 without absences."""
    trace = experiment.availability.trace
    return 0.0 if trace is None else max(changes[-1] for changes in trace.changes.values())


def _changes(rng: random.Random, experiment: Experiment, expected_s: float) -> list[float]:
    late = rng.random() < LATE
    lengths = [_away_s(rng, experiment) if late else 0.0]
    for _ in range(rng.choice([0, 1, 1, 2]) if late else rng.choice([1, 1, 1, 2, 3])):
        lengths += [rng.uniform(0.05, expected_s), _away_s(rng, experiment)]
    return list(accumulate(lengths))


def _away_s(rng: random.Random, experiment: Experiment) -> float:
    """Return the length of an absence: a moment, about a keep-alive, or up to twice `idle_s`; seconds."""
    keepalive_s, idle_s = experiment.transfer.keepalive_s, experiment.transfer.idle_s
    most_s = rng.choice([1.0, 8.0, 8.0, 2.0 * keepalive_s, 2.0 * idle_s])
    return rng.uniform(0.05, most_s)
