"""The optimisers of local training: PyTorch's fused kernels, of one model or of A models at once.

An `Optimizer` object would import torch's compiler, 1.3 s and 150 MB, and its functional form sorts
the weights at each step. Each gradient must have its weight's strides, or the result is silently
wrong: those that autograd.backward writes to `.grad` have them, those of torch.autograd.grad may
not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedstrata.common.settings.training import Adam, AdamW, TrainingSettings

Moments = dict[str, list[Tensor]]


class Optimizer(Protocol):
    """Steps of weights, in place. Its state has one tensor for each weight under each name, zeros
    at first.
    """

    def begin(self, weights: Sequence[Tensor], *, models: int = 0) -> Moments:
        """Return the state of a fresh optimiser, of weights of A `models`, [A, ...], if it is not
        0.
        """

    def step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Moments,
        *,
        rate: float,
    ) -> None:
        """Take one step at this learning rate; the lists have the same length."""


class SgdOptimizer:
    """torch.optim.SGD."""

    def __init__(self, training: TrainingSettings) -> None:
        self._momentum = training.momentum
        self._weight_decay = training.weight_decay
        self._nesterov = training.nesterov

    def begin(self, weights: Sequence[Tensor], *, models: int = 0) -> Moments:
        """Return the momenta, none without momentum."""
        if self._momentum:
            return {"momentum": list(map(_zeros, weights))}
        return {}

    def step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Moments,
        *,
        rate: float,
    ) -> None:
        """Take one step."""
        torch._fused_sgd_(
            list(weights),
            list(gradients),
            moments.get("momentum", []),
            lr=rate,
            momentum=self._momentum,
            weight_decay=self._weight_decay,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
            is_first_step=False,
        )


class AdaptiveMoments:
    """torch.optim.Adam (Kingma and Ba 2015) and torch.optim.AdamW (Loshchilov and Hutter 2019), by
    their kernel.

    Each weight counts its own steps, as models that are trained together may have taken different
    numbers.
    """

    def __init__(self, settings: Adam | AdamW) -> None:
        self._settings = settings
        self._kernel = torch._fused_adamw_ if isinstance(settings, AdamW) else torch._fused_adam_

    def begin(self, weights: Sequence[Tensor], *, models: int = 0) -> Moments:
        """Return the means of the gradients and of their squares, and the steps taken, [] or [A] of
        each weight.
        """
        shape = (models,) if models else ()
        steps = [
            torch.zeros(shape, dtype=torch.float32, device=weight.device) for weight in weights
        ]
        return {
            "mean": list(map(_zeros, weights)),
            "square": list(map(_zeros, weights)),
            "steps": steps,
        }

    def step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Moments,
        *,
        rate: float,
    ) -> None:
        """Take one step."""
        settings = self._settings
        parts = [moments["mean"], moments["square"], moments["steps"]]
        torch._foreach_add_(parts[2], 1.0)
        lists = [list(weights), list(gradients), *parts]
        if parts[2] and parts[2][0].dim():  # the kernel has one count for each tensor
            lists = list(map(_of_models, lists))
        changed, given, means, squares, steps = lists
        self._kernel(
            changed,
            given,
            means,
            squares,
            [],
            steps,
            lr=rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.epsilon,
            amsgrad=False,
            maximize=False,
        )


def optimizer_of(training: TrainingSettings) -> Optimizer:
    """Return the optimiser that an experiment selects."""
    settings = training.optimizer
    if isinstance(settings, (Adam, AdamW)):
        return AdaptiveMoments(settings)
    return SgdOptimizer(training)


@torch.no_grad()
def take(optimizer: Optimizer, weights: Sequence[Tensor], moments: Moments, *, rate: float) -> None:
    """Take one step of the weights that have a gradient, and remove the gradients.

    A weight without one, for example of a layer that is never called, does not change.
    """
    used = [place for place, weight in enumerate(weights) if weight.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    some: dict[str, list[Tensor]] = {}
    for name, each in moments.items():
        some[name] = [each[place] for place in used]
    optimizer.step([weights[place] for place in used], gradients, some, rate=rate)
    for weight in weights:
        weight.grad = None


def _of_models(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [one for tensor in tensors for one in tensor.unbind()]


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, requires_grad=False)
