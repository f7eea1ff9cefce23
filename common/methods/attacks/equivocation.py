"""Equivocation: an institution sends different models to its children."""

from __future__ import annotations

from typing import Literal

from fedstrata.common.lazy import np
from fedstrata.common.methods.attack import Attack
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Positive


class Equivocation(Attack):
    """To each child the model, with normal noise of its own."""

    name: Literal["equivocation"] = "equivocation"  # the attack
    std: Positive = 0.1  # standard deviation of the noise on each column

    def dispatch(self, model_D: Floats, chance: np.random.Generator) -> Doubles:
        """Return the model of one child."""
        found: Doubles = model_D + self.std * chance.standard_normal(len(model_D))
        return found
