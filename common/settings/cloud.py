"""What the cloud does besides its rounds: the epochs that devices train, and checkpoints."""

from __future__ import annotations

from typing import Literal

from fedstrata.common.settings.tables import Count, SettingsTable


class EpochControl(SettingsTable):
    """How many epochs devices train in a local round. The first global round has `training.epochs`."""

    name: Literal["fixed", "tempo"] = "fixed"  # `fixed`: always `training.epochs`; `tempo`: decided by the cloud
    variant: Literal["paper", "plato"] = "paper"  # Tempo's equation (9), or the form of its public code
    # Baselines that spend the same number of epochs without regard to the distances: given to the institutions by
    # chance, or their mean for everybody.
    control: Literal["none", "shuffled", "fixed_mean"] = "none"
    per_epoch: bool = False  # divide each distance by the epochs that led to it

    @property
    def acts_from(self) -> int:
        """The first global round with epochs that were decided."""
        return 1 if self.name == "fixed" else 2


class CloudSettings(SettingsTable):
    """What the cloud does besides its rounds: Tempo's epoch control, checkpoints."""

    epoch_control: EpochControl = EpochControl()
    checkpoint_every: Count = 1  # global rounds between two checkpoints; there is one after the last round, too

    @property
    def rounds_back(self) -> int:
        """How many global rounds a resumed cloud may return: to the checkpoint before the last, if that is damaged."""
        return 2 * self.checkpoint_every
