"""DP-SGD (Abadi et al. 2016): the gradient of each sample is clipped, and their sum gets noise.

    g = (sum of g_i min(1, C / ||g_i||) + N(0, (z C)^2)) / b        b: the samples of the batch

With Poisson sampling each step takes each sample with the same probability, and b is the expected
number. FedProx's term, which is not of the samples, is added to g.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _NormBase

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning.optimizers import optimizer_of, take
from fedstrata.common.randomness import Noise, Purpose, generator
from fedstrata.common.settings.accountant import steps_in_epoch
from fedstrata.device.training.batches import LocalDataset, change_images, draw_changes
from fedstrata.device.training.objectives.objective import norms
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.sgd import received_of

NUMBERS_MOST: Final = 1 << 26  # of samples' gradients at once


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """The clipping and the noise of a training's gradients. `expected`: the samples of a batch,
    None: those it has.
    """

    clip_norm: float
    multiplier: float
    noise: Noise
    expected: float | None = None


class PrivateSteps:
    """The steps of one training by DP-SGD, with a fresh optimiser, as `run_sgd` takes them."""

    def __init__(
        self,
        module: nn.Module,
        weights: Mapping[str, nn.Parameter],
        experiment: Experiment,
        *,
        learning_rate: float,
        private: GradientNoise,
        personal: Collection[int] = (),
    ) -> None:
        """`personal`: the places of weights that were not received; FedProx leaves them alone."""
        training = experiment.training
        self.learning_rate = learning_rate
        self.state: Sequence[Tensor] = ()  # of programs, of which there are none
        self._module = module
        self._weights = weights
        self._private = private
        self._loss = objective_of(training).sample_loss
        self._clip_norm = training.clip_norm
        self._mu = training.objective.proximal
        self._received: list[Tensor] = []
        if self._mu:
            self._received = received_of(list(weights.values()), personal)
        self._optimizer = optimizer_of(training)
        self._moments = self._optimizer.begin(list(weights.values()))

    def take(self, tensors: Sequence[Tensor]) -> Tensor:
        """Take the step of a batch: inputs [b, ...], labels [b]. Return the mean loss [], 0 of an
        empty batch.
        """
        inputs, labels = tensors
        private = self._private
        weights = list(self._weights.values())
        present = {name: weight.detach() for name, weight in self._weights.items()}
        sums = {name: torch.zeros_like(weight) for name, weight in present.items()}
        total = torch.zeros((), device=labels.device)
        chunk = max(1, NUMBERS_MOST // sum(weight.numel() for weight in weights))
        each: Callable[..., Any] = vmap(
            grad_and_value(self._loss_of), in_dims=(None, 0, 0), randomness="different"
        )
        for begin in range(0, len(labels), chunk):
            gradients, losses = each(
                present, inputs[begin : begin + chunk], labels[begin : begin + chunk]
            )
            add_clipped(gradients, sums, clip_norm=private.clip_norm)
            total += losses.sum()
        divisor = private.expected or float(len(labels))
        self._write(sums, private.multiplier * private.clip_norm, divisor)
        for weight, received in zip(weights, self._received, strict=False):
            assert weight.grad is not None
            weight.grad.add_(weight.detach() - received, alpha=self._mu)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(weights, self._clip_norm)
        take(self._optimizer, weights, self._moments, rate=self.learning_rate)
        return total / max(1, len(labels))

    def _write(self, sums: Mapping[str, Tensor], std: float, divisor: float) -> None:
        """Write each weight's gradient: the sum of the clipped ones with noise, divided."""
        if std:
            numbers = std * self._private.noise.normals(sum(each.numel() for each in sums.values()))
            noise = torch.from_numpy(numbers.astype(np.float32)).to(
                next(iter(sums.values())).device
            )
            for each, part in zip(
                sums.values(),
                torch.split(noise, [each.numel() for each in sums.values()]),
                strict=True,
            ):
                each.add_(part.view(each.shape))
        for name, weight in self._weights.items():
            weight.grad = sums[name].div_(divisor)

    def _loss_of(self, weights: Mapping[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        """Return the loss of one sample."""
        return self._loss(
            functional_call(self._module, dict(weights), (sample[None],)), label[None]
        )[0]


def add_clipped(
    gradients: Mapping[str, Tensor], sums: Mapping[str, Tensor], *, clip_norm: float
) -> None:
    """Add samples' gradients, [b, ...] by weight, each clipped over all weights, to the sums."""
    # a gradient of zeros stays: the factor is 1
    factors = (clip_norm / norms(list(gradients.values()))).clamp(max=1.0)
    for name, each in gradients.items():
        sums[name].add_(torch.einsum("b,b...->...", factors, each))


def check_module(module: nn.Module, experiment: Experiment) -> None:
    """Check that no layer mixes the samples of a batch. Raises InvalidExperiment."""
    for name, layer in module.named_modules():
        if isinstance(layer, _NormBase):
            key = f"{experiment.key(experiment.tiers[-1])}.privacy.unit"
            problem = (
                f"{experiment.model.name} cannot train by DP-SGD: its {name} mixes the "
                "samples of a batch"
            )
            raise InvalidExperiment(key, "sample", problem, "Use a model without, or another unit.")


def poisson_batches(
    local: LocalDataset,
    experiment: Experiment,
    *,
    node: str,
    epochs: int,
    local_round: int,
    rate: float,
    noise: Noise,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (epoch, inputs [1, b, ...], labels [1, b]) of batches that each sample joins by chance;
    b may be 0.

    Who joins is drawn as secretly as the noise: that is why the sampling counts.
    """
    asked = experiment.training.image_changes
    count = len(local.samples)
    source = generator(experiment.seed, Purpose.AUGMENTATION, node, local_round)
    for epoch in range(epochs):
        for _ in range(steps_in_epoch(rate)):
            chosen = torch.from_numpy(np.flatnonzero(noise.uniforms(count) < rate)).to(
                local.samples.device
            )
            places = local.samples[chosen]
            images = local.images.index_select(0, places)
            if asked.changes and len(places):
                changes = draw_changes(asked, len(places), source=source, device=images.device)
                images = change_images(images, changes, crop=asked.crop)
            yield epoch, local.normalise(images)[None], local.labels.index_select(0, places)[None]
