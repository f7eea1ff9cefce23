"""Sign flip: the update goes in the opposite direction (Li et al. 2019, RSA)."""

from __future__ import annotations

from typing import Literal

from fedstrata.common.methods.attack import Attack, AttackedUpload, moved
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Positive


class SignFlip(Attack):
    """The model received minus the step of honest work."""

    name: Literal["sign_flip"] = "sign_flip"  # the attack
    factor: Positive = 1.0  # times the honest step

    def upload(self, now: AttackedUpload) -> Doubles:
        """Return z - factor (v - z)."""
        return moved(now, -self.factor)
