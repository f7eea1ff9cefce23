"""What the cloud does besides its rounds: the epochs that devices train, and checkpoints."""

from __future__ import annotations

from typing import Literal

from fedstrata.common.settings.tables import Count, SettingsTable


class EpochControl(SettingsTable):
    """How many epochs devices train in a local round. The first global round has
    `training.epochs`.
    """

    # `fixed`: always `training.epochs`; `tempo`: decided by the cloud
    name: Literal["fixed", "tempo"] = "fixed"
    # Tempo's equation (9), or the form of its public code
    variant: Literal["paper", "plato"] = "paper"
    # Baselines that spend the same number of epochs without regard to the distances: given to the
    # institutions by chance, or their mean for everybody.
    control: Literal["none", "shuffled", "fixed_mean"] = "none"
    per_epoch: bool = False  # divide each distance by the epochs that led to it

    @property
    def acts_from(self) -> int:
        """The first global round with epochs that were decided."""
        if self.name == "fixed":
            return 1
        return 2


class CloudSettings(SettingsTable):
    """What the cloud does besides its rounds: Tempo's epoch control, checkpoints."""

    epoch_control: EpochControl = EpochControl()
    # global rounds between two checkpoints; there is one after the last round, too
    checkpoint_every: Count = 1

    @property
    def rounds_back(self) -> int:
        """How many global rounds a resumed cloud may return: to the checkpoint before the last, if
        that is damaged.
        """
        return 2 * self.checkpoint_every
