"""FedDF (Lin et al. 2020): a student learns what an ensemble predicts on samples without labels.

    minimise  mean over samples of KL(softmax(mean of the teachers' logits) || softmax(the student's logits))

Adam with a cosine from the learning rate to 0, gradients clipped (epfml/federated-learning-public-code). The teachers
are the uploads, with equal weights; the student begins as the mean of the uploads. It is the one with the smallest
divergence over all samples, looked at every few steps, the start included: there are no labels to validate with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from math import cos, pi
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.learning.adam import Adam
from common.learning.node_samples import NodeSamples
from common.methods.refined import FedDF
from common.model.layout import Row
from common.model.refinement import RoundModels

LOOK_STEPS: Final = 50  # steps between two looks at the divergence


def distil(node: NodeSamples, settings: FedDF, models: RoundModels) -> Mapping[str, Any]:
    """Write the student over the mean; return the steps taken and the divergence before and after."""
    target = functional.softmax(mean_logits(node, models.uploads), dim=1)
    node.load(models.mean)
    before = best = node.divergence(target)
    kept, kept_at, taken = _copies(node.weights), 0, 0
    optimiser = Adam(node.weights)
    batches = chain.from_iterable(node.passes(settings.batch_size, r=models.r))
    for step, places in enumerate(islice(batches, settings.steps)):
        loss_to(node, places, target).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(node.weights, settings.clip_norm)
        optimiser.step(settings.learning_rate * (1 + cos(pi * step / settings.steps)) / 2)
        taken = step + 1
        if taken % LOOK_STEPS and taken < settings.steps:
            continue
        if (divergence := node.divergence(target)) < best:
            best, kept, kept_at = divergence, _copies(node.weights), taken
        elif taken - kept_at >= settings.patience:
            break
    put(node, kept)
    node.store(models.mean)
    return {"steps": taken, "kept_step": kept_at, "divergence_before": before, "divergence_after": best}


def mean_logits(node: NodeSamples, rows: Sequence[Row]) -> Tensor:
    """Return the mean of the models' logits on all samples, float32 [N, classes]."""
    total: Tensor | None = None
    for row in rows:
        node.load(row)
        total = node.all_logits() if total is None else total.add_(node.all_logits())
    if total is None:
        raise ValueError("no model")
    return total.div_(len(rows))


def loss_to(node: NodeSamples, places: Tensor, target: Tensor) -> Tensor:
    """Return the divergence from the target, float32 [N, classes], on a batch of samples."""
    logs = functional.log_softmax(node.logits(places), dim=1)
    return functional.kl_div(logs, target.index_select(0, places), reduction="batchmean")


@torch.no_grad()
def put(node: NodeSamples, values: Sequence[Tensor]) -> None:
    """Copy values into the weights."""
    for weight, value in zip(node.weights, values, strict=True):
        weight.copy_(value)


def _copies(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]
