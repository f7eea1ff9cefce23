"""A model with parameters of unusual shapes. Imported as own code is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Shaped(nn.Module):
    """A layer, a number that scales it, no numbers at all, and a second name for the layer's
    weight.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.first, self.again = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        found = torch.tanh(self.first(x.flatten(1)) * self.scale)
        logits: Tensor = self.last(torch.tanh(self.again(found)) + self.nothing.sum())
        return logits
