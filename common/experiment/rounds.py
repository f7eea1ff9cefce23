"""The `cloud` and `institution` tables: participation, the rule, when a round closes, and Tempo's epoch control."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment.methods import Aggregation, NormBound, Selection, fedavg, fraction
from common.experiment.tables import AcceleratorName, Count, Positive, SettingsTable

Share = Annotated[float, Field(le=1)]


class Closing(SettingsTable):
    """When a round closes: with all results, or with `quorum` of them once `deadline_s` has passed."""

    # `all` waits for every child that takes part; `quorum` needs the two keys below.
    rule: Literal["all", "quorum"] = "all"
    quorum: Count | None = None  # results that are enough
    deadline_s: Positive | None = None  # seconds since the round opened; before that the round waits for all

    def among(self, children: int) -> Closing:
        """Return the rule of a round with so many children: a larger quorum is all of them."""
        return self if (self.quorum or 0) <= children else self.model_copy(update={"quorum": children})

    def uploads_of(self, children: int) -> int:
        """Return how many uploads of so many children close a round."""
        return children if self.rule == "all" else min(self.quorum or children, children)


class EpochControl(SettingsTable):
    """How many epochs devices train in a local round. The first global round has `training.epochs`."""

    name: Literal["fixed", "tempo"] = "fixed"  # `fixed`: always `training.epochs`; `tempo`: decided by the cloud
    variant: Literal["paper", "plato"] = "paper"  # Tempo's equation (9), or the form of its public code
    # Baselines that spend the same number of epochs without regard to the distances: given to the institutions by
    # chance, or their mean for everybody.
    control: Literal["none", "shuffled", "fixed_mean"] = "none"
    per_epoch: bool = False  # divide each distance by the epochs that led to it


class Cloud(SettingsTable):
    """The cloud's global rounds over the institutions selected."""

    participation: Share = 1.0  # share of the institutions in a global round, above 0: max(1, floor(share * number))
    selection: Selection = Field(default_factory=fraction)
    aggregation: Aggregation = Field(default_factory=fedavg)
    norm_bound: NormBound = NormBound()
    closing: Closing = Closing()
    epoch_control: EpochControl = EpochControl()
    evaluate_every: Count = 1  # evaluate after every so many global rounds, and after the last one
    # Where the cloud evaluates: `cpu`, `cuda`, `cuda:1` (a GPU's number), or `auto`, a GPU if its machine has one. It
    # evaluates in fp32 everywhere. A GPU's scores and losses differ from a CPU's by rounding.
    evaluate_on: AcceleratorName = "cpu"
    checkpoint_every: Count = 1  # save a checkpoint after every so many global rounds, and after the last one

    @property
    def rounds_back(self) -> int:
        """How many global rounds a resumed cloud may return: to the checkpoint before the last, if that is damaged."""
        return 2 * self.checkpoint_every


class Institution(SettingsTable):
    """An institution's local rounds over the devices selected."""

    rounds: Count = 1  # local rounds in each global round (tau_i)
    participation: Share = 1.0  # share of the institution's devices in a local round, above 0
    selection: Selection = Field(default_factory=fraction)
    aggregation: Aggregation = Field(default_factory=fedavg)
    norm_bound: NormBound = NormBound()
    closing: Closing = Closing()


def share_of(count: int, fraction: float) -> int:
    """Return floor(fraction * count + 1e-9): 0.29 of 100 is 29, where the product of the floats lies below."""
    return int(fraction * count + 1e-9)


def participants(children: int, fraction: float) -> int:
    """Return K = max(1, floor(fraction * children)), the number of children that take part in a round."""
    return max(1, share_of(children, fraction))


def check_closing(key: str, closing: Closing, children: int) -> None:
    """Check that a round with this number of children can close. Raises InvalidExperiment."""
    if closing.rule == "all":
        return
    if closing.quorum is None or closing.deadline_s is None:
        missing = "quorum" if closing.quorum is None else "deadline_s"
        raise InvalidExperiment(f"{key}.{missing}", None, "rule 'quorum' needs it", f"Set {key}.{missing}.")
    if closing.quorum > children:
        raise InvalidExperiment(
            f"{key}.quorum",
            closing.quorum,
            f"more than the children that take part ({children})",
            f"Give at most {children}.",
        )
