"""FedProx: the loss and (mu / 2) ||w - w_received||^2 over the parameters (Li et al. 2020,
Algorithm 2).

The term's gradient mu (w - w_received) is added to that of the loss, as in the authors' optimiser.
It is the gradient that autograd gives for the term, without a graph over all parameters in each
step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstrata.common.settings.training import FedProx
from fedstrata.device.training.objectives.objective import Minibatch, Objective, add_to_gradients


class ProximalObjective(Objective):
    """The loss and the proximal term. Reported is the loss alone, as by the other objectives."""

    uses_received = True

    def __init__(self, settings: FedProx) -> None:
        self._mu = settings.mu

    def backward(self, batch: Minibatch) -> Tensor:
        """Write the gradients of the sum of both; return the loss."""
        losses = super().backward(batch)
        with torch.no_grad():
            moves = torch._foreach_sub(list(batch.weights), list(batch.received))
        # a weight without gradient has not moved
        add_to_gradients(batch.weights, (self._mu, moves))
        return losses
