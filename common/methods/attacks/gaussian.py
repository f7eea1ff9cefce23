"""Gaussian noise in place of knowledge (Blanchard et al. 2017, section 5)."""

from __future__ import annotations

from typing import Literal

from fedstrata.common.methods.attack import Attack, AttackedUpload
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Positive


class GaussianNoise(Attack):
    """Honest work, and normal noise on each column."""

    name: Literal["gaussian"] = "gaussian"  # the attack
    std: Positive = 1.0  # standard deviation of the noise

    def upload(self, now: AttackedUpload) -> Doubles:
        """Return v + N(0, std^2)."""
        found: Doubles = now.trained_D + self.std * now.chance.standard_normal(len(now.trained_D))
        return found
