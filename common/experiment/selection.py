"""The `selection` tables of an experiment: one per selector, selected by `name`.

A tier's `participation` gives the number of children in a round, K; the selector chooses them. The formulas and their
sources are in `common/methods/selection/`, one file per selector.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment.own import OwnName, OwnSettings
from common.experiment.tables import Count, Fraction, Positive, Selected, SettingsTable


class SelectionSettings(SettingsTable):
    """The settings of a selector."""

    name: str  # the selector

    @property
    def remembers(self) -> bool:
        """Whether it reads what earlier rounds reported, so that its state persists."""
        return True

    def check(self, key: str, children: int, taking_part: int) -> None:
        """Check the settings against a parent's children and how many take part. Raises InvalidExperiment."""


class FractionSelection(SelectionSettings):
    """K children by chance, each with the same probability."""

    name: Literal["fraction"] = "fraction"  # the selector

    @property
    def remembers(self) -> bool:
        """Whether it reads earlier rounds: no."""
        return False


class RoundRobin(SelectionSettings):
    """K children in turn, in an order drawn once for the run."""

    name: Literal["round_robin"] = "round_robin"  # the selector

    @property
    def remembers(self) -> bool:
        """Whether it reads earlier rounds: no."""
        return False


class FedCluster(SelectionSettings):
    """K children of one cluster: the clusters take turns, in another order in each cycle."""

    name: Literal["fedcluster"] = "fedcluster"  # the selector
    clusters: Count | None = None  # clusters of a parent's children (G), each of at least K; not set: N / K

    @property
    def remembers(self) -> bool:
        """Whether it reads earlier rounds: no."""
        return False

    def check(self, key: str, children: int, taking_part: int) -> None:
        """Check that each cluster has enough children. Raises InvalidExperiment."""
        if self.clusters is not None and self.clusters > (most := children // taking_part):
            problem = f"{taking_part} of {children} children take part, all of one cluster"
            raise InvalidExperiment(f"{key}.clusters", self.clusters, problem, f"Use 1 to {most}.")


class PowerOfChoice(SelectionSettings):
    """Candidates by their samples, and of these the K with the highest last training loss."""

    name: Literal["power_of_choice"] = "power_of_choice"  # the selector
    candidates: Count | None = None  # children among which the losses decide (d), at least K; not set: 2 K

    def check(self, key: str, children: int, taking_part: int) -> None:
        """Check that there are as many candidates as take part, and not more than children."""
        d = self.candidates
        if d is not None and not taking_part <= d <= children:
            problem = f"{taking_part} of {children} children take part, and are chosen among the candidates"
            remedy = f"Use {taking_part} to {children}."
            raise InvalidExperiment(f"{key}.candidates", d, problem, remedy)


class Oort(SelectionSettings):
    """Children whose losses are high and who are quick, and some that were never selected."""

    name: Literal["oort"] = "oort"  # the selector
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.9  # share of unseen children in the first round
    exploration_decay: Fraction = 0.98  # factor of that share from round to round
    exploration_least: Annotated[float, Field(ge=0, le=1)] = 0.2  # it does not fall below
    duration_share: Fraction = 0.8  # share of the children seen that are quick enough: the others pay the penalty
    penalty: Annotated[float, Field(ge=0)] = 2.0  # exponent of (T / t) for a child that takes t > T seconds
    cut_off: Fraction = 0.95  # of the K-th best score: children above it are drawn by their scores
    staleness: Positive = 0.1  # weight of the bonus for children that were not selected for long


class OwnSelection(SelectionSettings, OwnSettings):
    """A selector of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`


SELECTIONS: Final[Mapping[str, type[SelectionSettings]]] = MappingProxyType(
    {
        table.model_fields["name"].default: table
        for table in (FractionSelection, RoundRobin, FedCluster, PowerOfChoice, Oort)
    }
)

Selection = Annotated[SelectionSettings, Selected(SELECTIONS, "common.experiment.selection:OwnSelection")]
