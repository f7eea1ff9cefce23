"""Scaled update: model replacement (Bagdasaryan et al. 2020, eq. 3)."""

from __future__ import annotations

from typing import Literal

from fedstrata.common.methods.attack import Attack, AttackedUpload, moved
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Positive


class ScaledUpdate(Attack):
    """The step of honest work, so many times as long: with K equal uploads a factor K replaces
    their mean.
    """

    name: Literal["scaled"] = "scaled"  # the attack
    factor: Positive = 10.0  # times the honest step

    def upload(self, now: AttackedUpload) -> Doubles:
        """Return z + factor (v - z)."""
        return moved(now, self.factor)
