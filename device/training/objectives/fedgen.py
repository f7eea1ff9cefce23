"""FedGen at a device (Zhu et al. 2021, Algorithm 1): cross-entropy, and two terms of generated
features.

    loss = CE(x, y) + alpha CE(head(G(y', e')), y') + beta KL(softmax(head(G(y, e))) ||
    softmax(model(x)))

G is the parent's generator (`common/methods/baselines/fedgen.py`), y' are random labels, e and e'
uniform noise, new ones for each sample in each step. The target of the divergence is constant.
Before the parent has a generator it is zeros, and both terms count as zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedstrata.common.methods.baselines.fedgen import FEATURES, HIDDEN, LABEL_COUNTS
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.settings.training import GeneratedFeatures
from fedstrata.device.training.objectives.objective import (
    LocalUpdate,
    Minibatch,
    Objective,
    write_gradients,
)


class GeneratedObjective(Objective):
    """Cross-entropy of samples and of generated features. The reported loss is the cross-entropy of
    samples.
    """

    uses_head = True
    receives = (HIDDEN, FEATURES)
    returns = (LABEL_COUNTS,)

    def __init__(self, settings: GeneratedFeatures) -> None:
        self._alpha = settings.alpha
        self._beta = settings.beta

    def draws(self, shapes: Mapping[str, Sequence[int]], classes: int) -> int:
        """Return the numbers of noise for both terms, and one for the random label."""
        return 2 * (shapes[HIDDEN][1] - classes - 1) + 1

    def backward(self, batch: Minibatch) -> Tensor:
        """Write the gradients of the sum; return the cross-entropy of the samples."""
        if not self._alpha and not self._beta:
            return super().backward(batch)
        assert batch.uniform is not None
        logits = batch.forward()
        classes = logits.shape[-1]
        noise = batch.uniform.shape[-1] // 2
        with torch.no_grad():
            labels = (batch.uniform[..., -1] * classes).long().clamp_(max=classes - 1)
            features = _generated(batch, batch.uniform[..., :noise], labels, classes)
            of_own = _generated(batch, batch.uniform[..., noise : 2 * noise], batch.labels, classes)
            target = functional.softmax(batch.classify(of_own), -1)
        generated = functional.log_softmax(batch.classify(features), -1)
        first = -generated.gather(-1, labels[..., None])[..., 0]
        log_probabilities = functional.log_softmax(logits, -1)
        second = functional.kl_div(log_probabilities, target, reduction="none").sum(-1)
        losses = self.losses(batch, logits)
        terms = batch.mean(self._alpha * first + self._beta * second)
        write_gradients(losses + _present(batch, losses.dim()) * terms)
        return losses.detach()

    def finish(self, update: LocalUpdate) -> Mapping[str, Floats]:
        """Return the counts of the device's labels."""
        return {LABEL_COUNTS: update.label_counts}


def _generated(batch: Minibatch, noise: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the generator's features [W, F], or [A, W, F], for noise and labels."""
    (hidden,) = batch.vectors[HIDDEN]
    (output,) = batch.vectors[FEATURES]
    one = torch.ones_like(noise[..., :1])
    # one_hot looks at the labels' values
    hot = labels[..., None] == torch.arange(classes, device=labels.device)
    inputs = torch.cat([noise, hot.to(noise.dtype), one], -1)
    return torch.cat([functional.relu(inputs @ hidden.mT), one], -1) @ output.mT


def _present(batch: Minibatch, dimensions: int) -> Tensor:
    """Return whether there is a generator, bool [] or, of A models, [A]."""
    (output,) = batch.vectors[FEATURES]
    return (output != 0).flatten(dimensions).any(-1)
