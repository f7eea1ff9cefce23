"""FedDyn at a device (Acar et al. 2021, Algorithm 1): a linear and a quadratic term beside the
loss.

    total = loss - <h_k, w> + (alpha / 2) ||w - z||^2           z: the received parameters
    h_k  = h_k - alpha (w_k - z)                                        after training

h_k is kept. Its w_k is the upload as the node decodes it, so that h is the mean of the h_k. Both
terms' gradients are added to that of the loss, as FedProx does it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fedstrata.common.methods.mixing import Floats
from fedstrata.common.settings.training import DynamicRegulariser, FedProx
from fedstrata.device.training.objectives.fedprox import ProximalObjective
from fedstrata.device.training.objectives.objective import LocalUpdate, Minibatch, add_to_gradients

(OWN,) = DynamicRegulariser.keeps


class DynamicObjective(ProximalObjective):
    """The proximal objective and the linear term. Reported is the loss alone."""

    keeps = DynamicRegulariser.keeps

    def __init__(self, settings: DynamicRegulariser) -> None:
        super().__init__(FedProx(mu=settings.alpha))
        self._alpha = settings.alpha

    def backward(self, batch: Minibatch) -> Tensor:
        """Write the gradients of the sum; return the loss."""
        losses = super().backward(batch)
        add_to_gradients(batch.weights, (-1.0, batch.vectors[OWN]))
        return losses

    def finish(self, update: LocalUpdate) -> Mapping[str, Floats]:
        """Return h_k after the training."""
        step = update.uploaded_D.astype(np.float64) - update.received_D
        return {OWN: (update.vectors[OWN] - self._alpha * step).astype(np.float32)}
