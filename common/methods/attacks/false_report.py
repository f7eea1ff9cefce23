"""Wrong samples and losses: the model is honest, its weight is not."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedstrata.common.methods.attack import Attack
from fedstrata.common.settings.tables import Positive


class FalseReport(Attack):
    """So many times the samples and the training loss. A parent refuses more samples than a device
    can have.
    """

    name: Literal["false_report"] = "false_report"  # the attack
    samples_factor: Positive = 2.0  # times the samples; at least one is reported
    loss_factor: Annotated[float, Field(ge=0)] = 1.0  # times the training loss

    def report(self, samples: int, loss: float | None) -> tuple[int, float | None]:
        """Return both."""
        return max(
            1, round(self.samples_factor * samples)
        ), None if loss is None else self.loss_factor * loss
