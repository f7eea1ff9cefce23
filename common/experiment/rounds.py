"""The rounds of the cloud and of institutions: who takes part, the rule, when a round closes, and Tempo's epochs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment.aggregation import Aggregation, FedAvg
from common.experiment.tables import Count, Positive, SettingsTable

Share = Annotated[float, Field(le=1)]


class Closing(SettingsTable):
    """When a round closes: on all results, or on `quorum` of them once `deadline_s` has passed."""

    rule: Literal["all", "quorum"] = "all"
    quorum: Count | None = None
    deadline_s: Positive | None = None


class EpochControl(SettingsTable):
    """How many epochs devices train: always `training.epochs`, or as Tempo decides from that start.

    `plato` is the form of Tempo's public code; `shuffled` and `fixed_mean` are controls that spend the same epochs
    without regard to distances; `per_epoch` divides each distance by the epochs that led to it.
    """

    name: Literal["fixed", "tempo"] = "fixed"
    variant: Literal["paper", "plato"] = "paper"
    control: Literal["none", "shuffled", "fixed_mean"] = "none"
    per_epoch: bool = False


class Cloud(SettingsTable):
    """The cloud's rounds: global rounds over the institutions drawn."""

    participation: Share = 1.0
    aggregation: Aggregation = FedAvg()
    closing: Closing = Closing()
    epoch_control: EpochControl = EpochControl()
    evaluate_every: Count = 1
    checkpoint_every: Count = 1


class Institution(SettingsTable):
    """An institution's rounds: `rounds` (tau_i) per global round over the devices drawn."""

    rounds: Count = 1
    participation: Share = 1.0
    aggregation: Aggregation = FedAvg()
    closing: Closing = Closing()


def participants(children: int, fraction: float) -> int:
    """Return K = max(1, floor(fraction * children + 1e-9)), the children that take part in a round."""
    return max(1, int(fraction * children + 1e-9))


def check_closing(key: str, closing: Closing, children: int) -> None:
    """Check that a round of so many children can close. Raises InvalidExperiment."""
    if closing.rule == "all":
        return
    if closing.quorum is None or closing.deadline_s is None:
        missing = "quorum" if closing.quorum is None else "deadline_s"
        raise InvalidExperiment(f"{key}.{missing}", None, "rule 'quorum' needs it", f"Set {key}.{missing}.")
    if closing.quorum > children:
        raise InvalidExperiment(
            f"{key}.quorum",
            closing.quorum,
            f"above the number of children that take part ({children})",
            f"Give at most {children}.",
        )
