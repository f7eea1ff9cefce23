"""What a run's releases have cost each unit so far: a count for each child of a private tier, and
epsilon of the worst.

A unit's releases are counted from the selections: those of the cloud, and those that other nodes
report with their results. Where no report came, each child counts as selected in each round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.private import check_covered
from fedstrata.common.methods.selection import TAKING_PART
from fedstrata.common.metrics import Metrics, NodeLabels
from fedstrata.common.model.layout import ModelLayout

Plans = Mapping[str, Sequence[Mapping[str, Any]]]


class PrivacyLedger:
    """The releases of a run's units by tier and child; a device's of its samples."""

    def __init__(self, experiment: Experiment, layout: ModelLayout) -> None:
        """Check that the model has nothing that would be sent without noise. Raises
        InvalidExperiment.
        """
        for tier in experiment.tiers:
            check_covered(f"{experiment.key(tier)}.privacy", tier.privacy, layout)
        self._experiment = experiment
        self.settings = {
            tier.name: tier.privacy for tier in experiment.tiers if tier.privacy.accounted
        }
        self._counts = {name: Counter[str]() for name in self.settings}

    def take(self, selected: Sequence[str], plans: Plans, epochs: Mapping[str, int]) -> None:
        """Count a global round: the cloud's selection, the other nodes' plans, and the epochs below
        each child.
        """
        experiment = self._experiment
        children = experiment.tree.children
        for top in selected:
            times = Counter({top: 1})  # tasks of the nodes at a depth
            for place, tier in enumerate(experiment.tiers):
                if place:
                    below = Counter[str]()
                    for node, tasks in times.items():
                        rounds = tasks * tier.rounds
                        part = _taking_part(plans.get(node, ()), children[node], rounds=rounds)
                        below.update(part)
                    times = below
                if tier.name in self._counts:
                    releases = tier.privacy.releases(epochs[top])
                    for child, tasks in times.items():
                        self._counts[tier.name][child] += tasks * releases

    @property
    def epsilons(self) -> dict[str, float]:
        """Epsilon of the worst unit by tier; infinite without noise."""
        return {
            name: settings.epsilon(self._worst(name)) for name, settings in self.settings.items()
        }

    def spent(self, epochs: Mapping[str, int]) -> str:
        """Return the tier whose budget the next global round could exceed; empty if there is
        none.
        """
        for place, tier in enumerate(self._experiment.tiers):
            if tier.name in self._counts:
                releases = tier.privacy.releases(max(epochs.values()))
                once = self._experiment.rounds_of(place) * releases
                if not tier.privacy.affords(self._worst(tier.name) + once):
                    return tier.name
        return ""

    def export(self, metrics: Metrics, labels: NodeLabels) -> None:
        """Export epsilon of each tier."""
        for tier, epsilon in self.epsilons.items():
            metrics.privacy_epsilon.labels(*labels, tier, self.settings[tier].unit).set(epsilon)

    def save(self) -> dict[str, dict[str, int]]:
        """Return the counts, in a form that JSON can hold."""
        return {name: dict(counts) for name, counts in self._counts.items()}

    def restore(self, found: Mapping[str, Mapping[str, int]]) -> None:
        """Restore what `save` returned; {}, before the first checkpoint, is no count."""
        self._counts = {name: Counter(found.get(name, {})) for name in self._counts}

    def _worst(self, tier: str) -> int:
        return max(self._counts[tier].values(), default=0)


def _taking_part(
    plans: Sequence[Mapping[str, Any]], children: Sequence[str], *, rounds: int
) -> Counter[str]:
    """Return how often each child was selected in so many rounds of its parent: by the plans, if
    they are complete.
    """
    if len(plans) != rounds:
        return Counter(dict.fromkeys(children, rounds))
    found = Counter[str]()
    known = set(children)
    for plan in plans:
        chosen = plan.get(TAKING_PART)
        listed = isinstance(chosen, Collection) and all(isinstance(each, str) for each in chosen)
        took_part = known.intersection(chosen) if listed and chosen else known
        found.update(took_part)
    return found
