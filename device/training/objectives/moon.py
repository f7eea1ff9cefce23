"""MOON (Li et al. 2021, Algorithm 1): the loss, and a term that draws features to those of the
received model.

    term = -ln( e^(cos(z, z_g)/T) / (e^(cos(z, z_g)/T) + e^(cos(z, z_p)/T)) )
         = softplus((cos(z, z_p) - cos(z, z_g)) / T)

z, z_g, z_p: a sample's features, the inputs of the last linear layer, with the present, the
received and the device's previous parameters. The latter are kept, exact whatever the codec: no
other node has them. Before its first result they are zeros, and the received ones count: then the
term is the constant ln 2. All three passes run in train mode with the statistics of the batch; only
that with the present parameters updates buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from fedstrata.common.methods.mixing import Floats
from fedstrata.common.settings.training import ModelContrast
from fedstrata.device.training.objectives.objective import (
    LocalUpdate,
    Minibatch,
    Objective,
    norms,
    write_gradients,
)

(PREVIOUS,) = ModelContrast.keeps


class ContrastiveObjective(Objective):
    """The loss and mu times the contrastive term. Reported is the loss alone."""

    uses_received = True
    uses_features = True
    keeps = ModelContrast.keeps

    def __init__(self, settings: ModelContrast) -> None:
        self._mu = settings.mu
        self._temperature = settings.temperature

    def backward(self, batch: Minibatch) -> Tensor:
        """Write the gradients of the sum; return the loss."""
        if not self._mu:
            return super().backward(batch)
        logits, features = batch.features(None)
        with torch.no_grad():
            _, received = batch.features(batch.received)
            _, previous = batch.features(batch.vectors[PREVIOUS])
            previous = torch.where(_absent(batch, previous.dim()), received, previous)
        nearer = functional.cosine_similarity(features, received, dim=-1)
        farther = functional.cosine_similarity(features, previous, dim=-1)
        term = batch.mean(functional.softplus((farther - nearer) / self._temperature))
        losses = self.losses(batch, logits)
        write_gradients(losses + self._mu * term)
        return losses.detach()

    def finish(self, update: LocalUpdate) -> Mapping[str, Floats]:
        """Return the trained parameters, which are the previous ones of the next task."""
        return {PREVIOUS: update.trained_D}


def _absent(batch: Minibatch, dimensions: int) -> Tensor:
    """Return whether there are no previous parameters, bool [1, ...] or [A, 1, ...] of so many
    dimensions.
    """
    vector = batch.vectors[PREVIOUS]
    if dimensions <= 2:  # of one model
        vector = [part[None] for part in vector]
    length = norms(vector)
    return (length == 0).view(-1, *[1] * (dimensions - 1))
