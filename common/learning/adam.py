"""Adam (Kingma & Ba 2015), as in torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

import torch
from torch import Tensor

BETA_1: Final = 0.9
BETA_2: Final = 0.999
EPSILON: Final = 1e-8


class Adam:
    """torch.optim.Adam on weights with gradients, which it removes; an Optimizer would import torch's compiler."""

    def __init__(self, weights: Sequence[Tensor], *, weight_decay: float = 0.0) -> None:
        self._weights = weights
        self._decay = weight_decay
        self._first, self._second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
        self._steps = 0

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Take one step."""
        self._steps += 1
        size, root = learning_rate / (1 - BETA_1**self._steps), sqrt(1 - BETA_2**self._steps)
        for weight, first, second in zip(self._weights, self._first, self._second, strict=True):
            if weight.grad is not None:  # a layer that is never called has none
                gradient = weight.grad.add(weight, alpha=self._decay) if self._decay else weight.grad
                first.lerp_(gradient, 1 - BETA_1)
                second.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
                weight.addcdiv_(first, (second.sqrt() / root).add_(EPSILON), value=-size)
                weight.grad = None
