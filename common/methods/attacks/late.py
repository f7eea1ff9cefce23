"""Late and silent devices, which cost a parent time: only a round that closes without them goes
on.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from fedstrata.common.methods.attack import Attack
from fedstrata.common.settings.tables import Positive


class Late(Attack):
    """An honest result, held back."""

    name: Literal["late"] = "late"  # the attack
    hold_s: Positive = 60.0  # seconds; without a network none pass

    def delay_s(self) -> float:
        """Return them."""
        return self.hold_s


class Silent(Attack):
    """No result at all."""

    name: Literal["silent"] = "silent"  # the attack

    def delay_s(self) -> float:
        """Return the time until its result: it has none."""
        return inf
