"""FedSAM: the gradient at w + rho g / ||g||, g being the gradient at w (Qu et al. 2022, Algorithm
1).

The norm is over all parameters. Both gradients are of the same batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstrata.common.settings.training import FedSAM
from fedstrata.device.training.objectives.objective import Minibatch, Objective, norms, scale

SMALLEST_NORM = 1e-16  # added to a norm, as in the code of Caldarola et al. 2022


class SharpnessAwareObjective(Objective):
    """The loss at parameters moved up its slope. Reported is that at the parameters themselves."""

    def __init__(self, settings: FedSAM) -> None:
        self._rho = settings.rho

    def backward(self, batch: Minibatch) -> Tensor:
        """Write the gradients at the moved parameters; return the loss at the present ones."""
        losses = super().backward(batch)
        if not self._rho:
            return losses
        with torch.no_grad():
            moved = [weight for weight in batch.weights if weight.grad is not None]
            moves = [grad for weight in moved if (grad := weight.grad) is not None]
            alone = not losses.dim()
            models = [move[None] for move in moves] if alone else moves
            scale(models, self._rho / (norms(models) + SMALLEST_NORM))
            before = [weight.clone() for weight in moved]
            for weight in moved:
                weight.grad = None
        try:
            with torch.no_grad():
                torch._foreach_add_(moved, moves)
            super().backward(batch)
        finally:  # also if memory runs out: a step that fails has changed nothing
            with torch.no_grad():
                torch._foreach_copy_(moved, before)
        return losses
