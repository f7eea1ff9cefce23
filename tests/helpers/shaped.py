"""Models with parameters of unusual shapes, and twins with usual ones that train alike. Imported as
own code is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Shaped(nn.Module):
    """A layer, a number that scales it, no numbers at all, and a second use of the layer's weight.

    `number`: the shape of the number. `empty`: it has a parameter without numbers. `tied`: the
    second use has a name of its own.
    """

    def __init__(self, *, number: tuple[int, ...], empty: bool, tied: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(number, 0.7))
        if empty:
            self.nothing = nn.Parameter(torch.empty(0, 3))
        self.first = nn.Linear(64, 64)
        again = nn.Linear(64, 64, bias=False)  # both draw the same numbers
        again.weight = self.first.weight
        if tied:
            self.again = again
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.first(x.flatten(1)) * self.scale)
        again = self.again if hasattr(self, "again") else self._again
        found = torch.tanh(again(found))
        if hasattr(self, "nothing"):
            found = found + self.nothing.sum()
        logits: Tensor = self.last(found)
        return logits

    def _again(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.first.weight)


def _model(
    number: tuple[int, ...] = (1,), *, empty: bool = False, tied: bool = False
) -> Callable[..., nn.Module]:
    return lambda **_: Shaped(number=number, empty=empty, tied=tied)


plain = _model()
number = _model(())
empty = _model(empty=True)
tied = _model(tied=True)
everything = _model((), empty=True, tied=True)
