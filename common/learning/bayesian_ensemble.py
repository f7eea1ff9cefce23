"""FedBE (Chen & Chao 2021): a student learns what an ensemble of models around the uploads predicts.

    teachers  the mean, `samples` sampled models, and the uploads
    gaussian  z + s (m + spread sqrt(v) e)    e ~ N(0, 1), for each tensor: m and v are mean and variance of the steps
              d_k / ||d_k||, d_k = v_k - z; s is the mean of ||d_k||; z is the model that the children received
    dirichlet sum of q_k v_k                  q ~ Dirichlet(concentration, ..., concentration)
    target    P^(1/T) / its sum               P: the mean of the teachers' probabilities

SGD on KL(target || student), then the mean of the student's weights after the epochs of the second half
(hongyouc/FedBE averages from step 500 on, which few samples never reach).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.learning.distillation import loss_to, put
from common.learning.node_samples import NodeSamples
from common.methods.refined import FedBE
from common.model.layout import Row, Section
from common.model.refinement import Doubles, RoundModels
from common.randomness import Purpose

VARIANCE_LEAST: Final = 1e-5  # of the normalised steps, as in the authors' code


def distil_ensemble(node: NodeSamples, settings: FedBE, models: RoundModels) -> Mapping[str, Any]:
    """Write the student over the mean; return the steps taken and the divergence before and after."""
    target, count = torch.zeros(()), 0
    for row in _teachers(node, settings, models):
        node.load(row)
        target = target + functional.softmax(node.all_logits(), dim=1)
        count += 1
    target = sharpened(target / count, settings.temperature)
    node.load(models.mean)
    before = node.divergence(target)
    momenta = [torch.zeros_like(weight) for weight in node.weights]
    sums, averaged, steps = [torch.zeros_like(weight) for weight in node.weights], 0, 0
    for epoch, batches in enumerate(islice(node.passes(settings.batch_size, r=models.r), settings.epochs)):
        for places in batches:
            loss_to(node, places, target).backward()  # type: ignore[no-untyped-call]
            _step(node.weights, momenta, settings)
            steps += 1
        if 2 * epoch >= settings.epochs - 1:
            averaged += 1
            for total, weight in zip(sums, node.weights, strict=True):
                total.add_(weight.detach())
    put(node, [total / averaged for total in sums])
    node.store(models.mean)
    return {
        "teachers": count,
        "steps": steps,
        "divergence_before": before,
        "divergence_after": node.divergence(target),
    }


def sharpened(probabilities: Tensor, temperature: float) -> Tensor:
    """Return probabilities [N, classes] to the power of 1 / temperature, each row divided by its sum."""
    powers = probabilities ** (1 / temperature)
    return powers / powers.sum(dim=1, keepdim=True)


@torch.no_grad()
def _step(weights: list[torch.nn.Parameter], momenta: list[Tensor], settings: FedBE) -> None:
    for weight, momentum in zip(weights, momenta, strict=True):
        if weight.grad is not None:
            momentum.mul_(settings.momentum).add_(weight.grad)
            weight.sub_(momentum, alpha=settings.learning_rate)
            weight.grad = None


def _teachers(node: NodeSamples, settings: FedBE, models: RoundModels) -> Iterator[Row]:
    """Yield the mean, the sampled models and the uploads; a row is valid until the next one."""
    draw = node.draw(Purpose.TEACHERS, r=models.r)
    yield models.mean
    row = models.mean.copy()
    floats, layout = node.layout.floats(row), node.layout
    if settings.teachers == "dirichlet":
        for _ in range(settings.samples):
            floats[:] = _mixed(node, models, draw.dirichlet([settings.concentration] * len(models.uploads)))
            yield row
    elif settings.samples:
        centres, scales = moments(node, models)
        for _ in range(settings.samples):
            noise = draw.standard_normal(layout.parameters, np.float32)
            floats[: layout.parameters] = centres + settings.spread * scales * noise
            yield row
    yield from models.uploads


def _mixed(node: NodeSamples, models: RoundModels, weights_K: Doubles) -> Doubles:
    total = np.zeros(node.layout.columns)
    for weight, upload in zip(weights_K, models.uploads, strict=True):
        total += weight * node.layout.floats(upload)
    return total


def moments(node: NodeSamples, models: RoundModels) -> tuple[Doubles, Doubles]:
    """Return the centre z + s m and the scale s sqrt(v) of each weight, float64 [D]."""
    layout = node.layout
    z, uploads = layout.floats(models.received), [layout.floats(row) for row in models.uploads]
    centres, scales = z[: layout.parameters].astype(np.float64), np.zeros(layout.parameters)
    for entry in layout.entries:
        if entry.section is not Section.PARAMETER:
            continue
        columns = slice(entry.start, entry.stop)
        steps_KC = np.stack([upload[columns].astype(np.float64) - z[columns] for upload in uploads])
        lengths_K = np.linalg.norm(steps_KC, axis=1)
        steps_KC /= np.where(lengths_K > 0, lengths_K, 1.0)[:, None]  # a tensor that did not move has no direction
        means, length = steps_KC.mean(axis=0), lengths_K.mean()
        variances = np.maximum((steps_KC**2).mean(axis=0) - means**2, VARIANCE_LEAST)
        centres[columns] += length * means
        scales[columns] = length * np.sqrt(variances)
    return centres, scales
