"""SCAFFOLD at a device (Karimireddy et al. 2020, Algorithm 1, option II).

    g    = gradient of the loss - c_k + c                              in each of S steps with
    learning rate eta
    c_k+ = c_k - c + (x - y_k) / (a eta)                       x: received, y_k: trained parameters;
    a = S

c comes with the model, c_k is kept, and c_k+ - c_k is returned. The correction is of the gradient,
before momentum, weight decay and clipping. With momentum m the path is longer: a is the sum of the
weights that its gradients got, as in FedNova (`common/methods/fednova.py`). With a = S the estimate
would be 1 / (1 - m) times too long, and training diverges at m = 0.9. y_k is exact whatever the
codec, for c_k is a mean gradient, and its change is returned as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fedstrata.common.methods.mixing import Floats
from fedstrata.common.settings.training import ScaffoldCorrection
from fedstrata.device.training.objectives.objective import (
    LocalUpdate,
    Minibatch,
    Objective,
    add_to_gradients,
)

CONTROL = "control"
CHANGE = "control_change"
(OWN,) = ScaffoldCorrection.keeps


class ControlledObjective(Objective):
    """The loss, whose gradients are corrected. Reported is the loss."""

    keeps = ScaffoldCorrection.keeps
    receives = (CONTROL,)
    returns = (CHANGE,)

    def __init__(self, settings: ScaffoldCorrection) -> None:
        """Take the settings, which have no key."""

    def backward(self, batch: Minibatch) -> Tensor:
        """Write the corrected gradients; return the loss."""
        losses = super().backward(batch)
        add_to_gradients(batch.weights, (-1.0, batch.vectors[OWN]), (1.0, batch.vectors[CONTROL]))
        return losses

    def finish(self, update: LocalUpdate) -> Mapping[str, Floats]:
        """Return c_k+, and its difference to c_k."""
        control = update.vectors[CONTROL]
        own = update.vectors[OWN]
        taken = update.gradient_weight * update.learning_rate
        gradient = (update.received_D.astype(np.float64) - update.trained_D) / taken
        after = (own - control.astype(np.float64) + gradient).astype(np.float32)
        return {OWN: after, CHANGE: after - own}
