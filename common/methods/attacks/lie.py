"""LIE: "A Little Is Enough" (Baruch et al. 2019, algorithm 3): as far from the mean as a majority
hides.

    s = floor(n / 2 + 1) - m        z = Phi^-1((n - m - s) / (n - m))        mu_j - z sigma_j in
    each column

of n uploads, m of them the colluders'; mu and sigma are of the uploads that they know. The paper
adds z sigma to gradients, and a model moves against them.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstrata.common.lazy import np
from fedstrata.common.methods.attack import Attack, AttackedUpload
from fedstrata.common.methods.statistics import Doubles


class LittleIsEnough(Attack):
    """The mean of the known uploads, shifted by some of their standard deviations."""

    colludes: ClassVar[bool] = True

    name: Literal["lie"] = "lie"  # the attack
    # Standard deviations from the mean; omitted: those of the formula, 0 below 3 uploads and for a
    # majority.
    z: Annotated[float, Field(ge=0)] | None = None

    def upload(self, now: AttackedUpload) -> Doubles:
        """Return mu - z sigma."""
        known_KD = np.stack(now.known or [now.trained_D]).astype(np.float64)
        z = z_of(now.children, now.colluders) if self.z is None else self.z
        found: Doubles = known_KD.mean(axis=0) - z * known_KD.std(axis=0)
        return found


def z_of(uploads: int, colluders: int) -> float:
    """Return z for n uploads and m colluders; where it has no value there is nothing to hide
    behind: 0.
    """
    supporters = uploads // 2 + 1 - colluders
    honest = uploads - colluders
    if uploads < 3 or supporters <= 0:
        return 0.0
    return NormalDist().inv_cdf((honest - supporters) / honest)
