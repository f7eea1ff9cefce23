"""FedLAW (Li et al. 2023): gamma and lambda of w = gamma sum of lambda_k v_k, learned on samples
with labels.

    gamma = e^s, lambda = softmax(x)        start: s = 0, x_k = ln p_k, which is the mean of the
    uploads
    minimise the cross-entropy by Adam with betas 0.5 and 0.999, its rate halved every 20 epochs
    (ZexiLee/FedLAW)

By the chain rule, with g the gradient at w: dL/ds = g . w, and dL/dx_k = lambda_k (gamma g . v_k -
dL/ds). Buffers are mixed by lambda. They are not in g, because batch norm runs on its running
statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fedstrata import NodeSamples, RoundModels
from fedstrata.common.methods.baselines.refined import FedLAW

Doubles: TypeAlias = "npt.NDArray[np.float64]"

BETA_1 = 0.5
BETA_2 = 0.999
EPSILON = 1e-8
HALVED_EPOCHS: Final = 20
BLOCK: Final = 65_536  # columns of an inner product at once


def learn_weights(node: NodeSamples, settings: FedLAW, models: RoundModels) -> Mapping[str, Any]:
    """Return gamma, the lambdas in the order of the uploads, and the loss before and after; the
    mean stays.
    """
    mixer = _Mixer(node, models)
    node.load(models.mean)
    before = node.loss()
    with np.errstate(divide="ignore"):  # a child without samples stays at weight 0
        logarithms = np.append(np.log(models.weights_K), 0.0)  # x, then s
    first = np.zeros_like(logarithms)
    second = np.zeros_like(logarithms)
    steps = 0
    for epoch, batches in enumerate(
        islice(node.passes(settings.batch_size, r=models.r), settings.epochs)
    ):
        rate = settings.learning_rate * 0.5 ** (epoch // HALVED_EPOCHS)
        for places in batches:
            gradient = mixer.gradient(logarithms, places)
            steps += 1
            first = BETA_1 * first + (1 - BETA_1) * gradient
            second = BETA_2 * second + (1 - BETA_2) * gradient**2
            root = np.sqrt(second / (1 - BETA_2**steps)) + EPSILON
            logarithms = logarithms - rate * first / (1 - BETA_1**steps) / root
    gamma, lambdas_K = split(logarithms)
    mixer.mix(gamma, lambdas_K)
    after = node.loss()
    return {
        "gamma": gamma,
        "lambdas": lambdas_K.tolist(),
        "steps": steps,
        "loss_before": before,
        "loss_after": after,
    }


def split(logarithms: Doubles) -> tuple[float, Doubles]:
    """Return gamma = e^s and lambda = softmax(x), float64 [K], from x and s."""
    powers = np.exp(logarithms[:-1] - logarithms[:-1].max())
    return float(np.exp(logarithms[-1])), powers / powers.sum()


class _Mixer:
    """The uploads as tensors, and the module at a mixture of them."""

    def __init__(self, node: NodeSamples, models: RoundModels) -> None:
        self._node = node
        self._row = models.mean.copy()
        self._rows = [torch.from_numpy(node.layout.floats(row)) for row in models.uploads]
        self._block = torch.empty(BLOCK)
        self._mixed = torch.from_numpy(node.layout.floats(self._row))

    @torch.no_grad()
    def mix(self, gamma: float, lambdas_K: Doubles) -> None:
        """Put gamma sum of lambda_k v_k into the module; buffers without gamma."""
        self._mixed.zero_()
        for row, weight in zip(self._rows, lambdas_K.tolist(), strict=True):
            self._mixed.add_(row, alpha=weight)
        self._mixed[: self._node.layout.parameters].mul_(gamma)
        self._node.load(self._row)

    def gradient(self, logarithms: Doubles, places: Tensor) -> Doubles:
        """Return the gradient of a batch's loss with respect to x and s, float64 [K + 1]."""
        gamma, lambdas_K = split(logarithms)
        self.mix(gamma, lambdas_K)
        node = self._node
        columns = self._node.layout.parameters
        functional.cross_entropy(
            node.logits(places), node.labels.index_select(0, places)
        ).backward()  # type: ignore[no-untyped-call]
        flat = torch.zeros(columns)
        places_of = {entry.name: slice(entry.start, entry.stop) for entry in node.layout.entries}
        for name, weight in node.module.named_parameters():
            if weight.grad is not None:
                flat[places_of[name]] = weight.grad.reshape(-1)
                weight.grad = None
        inner_K = gamma * np.array([self._product(flat, row) for row in self._rows])
        by_s = float(lambdas_K @ inner_K)
        return np.append(lambdas_K * (inner_K - by_s), by_s)

    def _product(self, flat: Tensor, row: Tensor) -> float:
        """Return the inner product with a row, whose place in memory must not matter: BLAS depends
        on alignment.
        """
        total = 0.0
        for start in range(0, len(flat), BLOCK):
            part = flat[start : start + BLOCK]
            block = self._block[: len(part)].copy_(row[start : start + len(part)])
            total += float(torch.dot(part, block))
        return total
