"""What experiments have beside each other, and from which global round on it can act.

A method may be the plain mean at first: Tempo's first decision is about the second global round,
FedCDA selects after its warm-up, FedMR recombines after its first stage. A cost until a target that
was reached before shows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.tables import SettingsTable
from fedstrata.common.text import counted


@dataclass(frozen=True, slots=True)
class LatePart:
    """A rule or control that acts from a global round on, later than the first. `key`: its
    table.
    """

    key: str
    name: str
    begins: int

    @property
    def text(self) -> str:
        """Its key and value, and when it begins."""
        return f"{self.key} = {self.name} acts from global round {self.begins} on"


def rounds_acted(begins: int, rounds: float) -> float:
    """Return in how many of the first global rounds acts what begins in one of them."""
    return max(0.0, rounds - begins + 1)


def unacted(parts: Sequence[LatePart], rounds: Sequence[float]) -> list[str]:
    """Return a text for each part that did not act in some runs, of which `rounds` is the number of
    global rounds.
    """
    found = []
    for part in parts:
        if idle := sum(count < part.begins for count in rounds):
            found.append(f"{part.text}; it did not act in {idle} of {counted(len(rounds), 'runs')}")
    return found


def late_parts(experiment: Experiment, others: Sequence[Experiment]) -> list[LatePart]:
    """Return the late parts of an experiment that at least one of the others has not."""
    theirs: dict[str, list[SettingsTable]] = {}
    for other in others:
        for settings, part in _tables(other):
            theirs.setdefault(part.key, []).append(settings)
    found = []
    for settings, part in _tables(experiment):
        same = theirs.get(part.key, []).count(settings) == len(others)
        if part.begins > 1 and not same:
            found.append(part)
    return found


def _tables(experiment: Experiment) -> Iterator[tuple[SettingsTable, LatePart]]:
    """Yield the settings of what may act late, with from which global round on it can."""
    control = experiment.cloud.epoch_control
    yield control, LatePart("cloud.epoch_control", control.name, control.acts_from)
    for depth, tier in enumerate(experiment.tiers):
        rule = tier.aggregation
        begins = ceil(rule.acts_from / experiment.rounds_of(depth))
        yield rule, LatePart(f"{experiment.key(tier)}.aggregation", rule.name, begins)
