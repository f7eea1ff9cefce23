"""FedDF and FedBE: a student learns what an ensemble predicts on samples without labels.

FedDF (Lin et al. 2020):

    minimise  mean over samples of KL(softmax(mean of the teachers' logits) || softmax(the student's
    logits))

Adam with a cosine from the learning rate to 0, gradients clipped
(epfml/federated-learning-public-code). The teachers are the uploads, with equal weights; the
student begins as the mean of the uploads. It is the one with the smallest divergence over all
samples, looked at every few steps, the start included: there are no labels to validate with.

FedBE (Chen & Chao 2021), with an ensemble of models around the uploads:

    teachers  the mean, `samples` sampled models, and the uploads
    gaussian  z + s (m + spread sqrt(v) e)    e ~ N(0, 1), for each tensor: m and v are mean and
              variance of the steps d_k / ||d_k||, d_k = v_k - z; s is the mean of ||d_k||; z is the
              model that the children received dirichlet sum of q_k v_k                  q ~
              Dirichlet(concentration, ..., concentration)
    target    P^(1/T) / its sum               P: the mean of the teachers' probabilities

SGD on KL(target || student), then the mean of the student's weights after the epochs of the second
half (hongyouc/FedBE averages from step 500 on, which few samples never reach).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from math import cos, pi
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrata import NodeSamples, RoundModels
from fedstrata.common.methods.baselines.refined import FedBE, FedDF

Doubles: TypeAlias = npt.NDArray[np.float64]
Row: TypeAlias = npt.NDArray[np.uint8]
LOOK_STEPS: Final = 50  # steps between two looks at the divergence
VARIANCE_LEAST: Final = 1e-5  # of the normalised steps, as in the authors' code


def distil(node: NodeSamples, settings: FedDF, models: RoundModels) -> Mapping[str, Any]:
    """Write the student over the mean; return the steps taken and the divergence before and
    after.
    """
    target = functional.softmax(mean_logits(node, models.uploads), dim=1)
    node.load(models.mean)
    before = best = node.divergence(target)
    kept = _copies(node.weights)
    kept_at = 0
    taken = 0
    step_at = node.adam(node.weights)
    batches = chain.from_iterable(node.passes(settings.batch_size, r=models.r))
    for step, places in enumerate(islice(batches, settings.steps)):
        loss_to(node, places, target).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(node.weights, settings.clip_norm)
        step_at(settings.learning_rate * (1 + cos(pi * step / settings.steps)) / 2)
        taken = step + 1
        if taken % LOOK_STEPS and taken < settings.steps:
            continue
        if (divergence := node.divergence(target)) < best:
            best = divergence
            kept = _copies(node.weights)
            kept_at = taken
        elif taken - kept_at >= settings.patience:
            break
    put(node, kept)
    node.store(models.mean)
    return {
        "steps": taken,
        "kept_step": kept_at,
        "divergence_before": before,
        "divergence_after": best,
    }


def distil_ensemble(node: NodeSamples, settings: FedBE, models: RoundModels) -> Mapping[str, Any]:
    """Write the student over the mean; return the steps taken and the divergence before and
    after.
    """
    target = torch.zeros(())
    count = 0
    for row in _teachers(node, settings, models):
        node.load(row)
        target = target + functional.softmax(node.all_logits(), dim=1)
        count += 1
    target = sharpened(target / count, settings.temperature)
    node.load(models.mean)
    before = node.divergence(target)
    momenta = [torch.zeros_like(weight) for weight in node.weights]
    sums = [torch.zeros_like(weight) for weight in node.weights]
    averaged = 0
    steps = 0
    for epoch, batches in enumerate(
        islice(node.passes(settings.batch_size, r=models.r), settings.epochs)
    ):
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
    after = node.divergence(target)
    return {
        "teachers": count,
        "steps": steps,
        "divergence_before": before,
        "divergence_after": after,
    }


def mean_logits(node: NodeSamples, rows: Sequence[Row]) -> Tensor:
    """Return the mean of the models' logits on all samples, float32 [N, classes]."""
    first, *others = rows
    node.load(first)
    total = node.all_logits()
    for row in others:
        node.load(row)
        total.add_(node.all_logits())
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


def sharpened(probabilities: Tensor, temperature: float) -> Tensor:
    """Return probabilities [N, classes] to the power of 1 / temperature, each row divided by its
    sum.
    """
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
    draw = node.chance(models.r, "teachers")
    yield models.mean
    row = models.mean.copy()
    floats = node.layout.floats(row)
    layout = node.layout
    if settings.teachers == "dirichlet":
        for _ in range(settings.samples):
            floats[:] = _mixed(
                node, models, draw.dirichlet([settings.concentration] * len(models.uploads))
            )
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
    z = layout.floats(models.received)
    uploads = [layout.floats(row) for row in models.uploads]
    centres = z[: layout.parameters].astype(np.float64)
    scales = np.zeros(layout.parameters)
    for entry in layout.entries:
        if entry.section != "parameter":
            continue
        columns = slice(entry.start, entry.stop)
        steps_KC = np.stack([upload[columns].astype(np.float64) - z[columns] for upload in uploads])
        lengths_K = np.linalg.norm(steps_KC, axis=1)
        # a tensor that did not move has no direction
        steps_KC /= np.where(lengths_K > 0, lengths_K, 1.0)[:, None]
        means = steps_KC.mean(axis=0)
        length = lengths_K.mean()
        variances = np.maximum((steps_KC**2).mean(axis=0) - means**2, VARIANCE_LEAST)
        centres[columns] += length * means
        scales[columns] = length * np.sqrt(variances)
    return centres, scales
