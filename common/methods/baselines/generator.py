"""FedGen's generator (Zhu et al. 2021, eq. 4): features for which the children's heads predict a
given label.

    minimise  mean of sum_k a_k(y) CE(head_k(G(y, e)), y) + exp(-mean of d(e_i, e_j) d(G_i, G_j))

over minibatches of labels y and uniform noise e; a_k(y): child k's share of the samples with label
y; labels that no child has are not drawn. The second term keeps the features apart: d(e_i, e_j) is
the mean squared difference of noise, d(G_i, G_j) the mean absolute difference of features
(zhuangdizhu/FedGen). Adam with L2 decay, anew in each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedstrata import NodeDraws, RoundModels
from fedstrata.common.methods.baselines.fedgen import BATCH_NORM_EPSILON, LABEL_COUNTS, FedGen

LEARNED: Final = ("weight", "bias", "scale", "shift", "output", "output_bias")
BATCH_NORM_MOMENTUM: Final = 0.1  # torch's


def learn_generator(node: NodeDraws, settings: FedGen, models: RoundModels) -> Mapping[str, Any]:
    """Write the generator after some steps; return their number and the heads' loss in the first
    and the last one.
    """
    layout = models.layout
    children = [_copied(layout.views(row)) for row in models.uploads]
    heads_KCF = torch.stack([each["head"] for each in children])
    biases_KC = torch.stack([each["head_bias"] for each in children])
    counts_KC = torch.stack([each[LABEL_COUNTS] for each in children])
    shares_KC = counts_KC / counts_KC.sum(0).clamp(min=1e-12)
    present = np.flatnonzero(counts_KC.sum(0).numpy() > 0)
    tensors = _copied(layout.views(models.mean))
    learned = [tensors[name].requires_grad_() for name in LEARNED]
    step_at = node.adam(learned, weight_decay=settings.weight_decay)
    draw = node.chance(models.r + 1, "generator")
    losses: list[float] = []
    while len(present) and len(losses) < settings.steps:
        labels = torch.from_numpy(present[draw.integers(0, len(present), settings.batch_size)])
        noise = torch.from_numpy(draw.random((settings.batch_size, settings.noise), np.float32))
        features = generate(tensors, noise, labels, classes=heads_KCF.shape[1])
        logits = features @ heads_KCF.mT + biases_KC[:, None]
        each = functional.cross_entropy(
            logits.flatten(0, 1), labels.repeat(len(children)), reduction="none"
        )
        taught = (each.view(len(children), -1) * shares_KC[:, labels]).sum(0).mean()
        (taught + diversity(noise, features)).backward()  # type: ignore[no-untyped-call]
        step_at(settings.learning_rate)
        losses.append(float(taught.detach()))
        node.moved()
    written = layout.views(models.mean)
    for name in (*LEARNED, "mean", "variance"):
        written[name][:] = tensors[name].detach().numpy()
    if not losses:
        return {"steps": 0}
    return {"steps": len(losses), "loss_before": losses[0], "loss_after": losses[-1]}


def generate(
    tensors: Mapping[str, Tensor], noise: Tensor, labels: Tensor, *, classes: int
) -> Tensor:
    """Return features [B, F] from noise [B, Z] and labels [B]; batch norm takes the batch's
    statistics.
    """
    inputs = torch.cat([noise, functional.one_hot(labels, classes).to(noise.dtype)], 1)
    hidden = functional.batch_norm(
        functional.linear(inputs, tensors["weight"], tensors["bias"]),
        tensors["mean"], tensors["variance"], tensors["scale"], tensors["shift"],
        training=True, momentum=BATCH_NORM_MOMENTUM, eps=BATCH_NORM_EPSILON,
    )  # fmt: skip
    return functional.linear(functional.relu(hidden), tensors["output"], tensors["output_bias"])


def diversity(noise: Tensor, features: Tensor) -> Tensor:
    """Return exp(-mean of the products of the distances of noise and of features) over all pairs,
    [].
    """
    apart = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist")
    squares = apart.square() / noise.shape[1]
    absolute = torch.cdist(features, features, p=1) / features.shape[1]
    return torch.exp(-(squares * absolute).mean())


def _copied(views: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Tensor]:
    """Return copies: where rows lie in memory must not matter, and BLAS depends on alignment."""
    return {name: torch.from_numpy(values.copy()) for name, values in views.items()}
