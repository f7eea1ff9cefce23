"""Free rider: the model comes back as it went (Fraboni et al. 2021).

The device trains nevertheless, and reports samples, loss and seconds of that: only what it sends is
not its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedstrata.common.methods.attack import Attack, AttackedUpload
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.statistics import Doubles


class FreeRider(Attack):
    """The model received, which noise may disguise."""

    name: Literal["free_rider"] = "free_rider"  # the attack
    std: Annotated[float, Field(ge=0)] = 0.0  # standard deviation of the noise on each column

    def upload(self, now: AttackedUpload) -> Floats | Doubles:
        """Return z + N(0, std^2)."""
        if not self.std:
            return now.received_D
        found: Doubles = now.received_D + self.std * now.chance.standard_normal(len(now.received_D))
        return found
