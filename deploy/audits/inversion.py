"""Gradient inversion: samples that would have moved a model as an upload did.

    g       (z - v) / (learning rate * steps): the mean gradient of an upload v from the model z
    DLG     min over x of ||grad L(x) - g||^2, by L-BFGS                       (Zhu et al. 2019)
    cosine  min over x of 1 - cos(grad L(x), g) + TV(x) / 10^4, by Adam of the gradient's signs
                                                                            (Geiping et al. 2020)
    first layer   b' W / b' b, of its weight's and its bias's gradient: the sample itself, if it is
                  one, and the layer linear                                     (Phong et al. 2018)
    PSNR    20 log10(range of the test samples / root of the mean squared error), dB

The attacker knows labels, optimiser, learning rate and steps. Of DLG's two starts the one that fits
g best counts. A restored sample is compared with the true one that is nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log10
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.deploy.audits.samples import Samples

Attack: TypeAlias = Literal["DLG", "cosine"]
FIRST_LAYER: Final = "first layer"
STARTS: Final[Mapping[Attack, int]] = {"DLG": 2, "cosine": 1}
DLG_STEPS: Final = 200
COSINE_STEPS: Final = 200
COSINE_RATE: Final = 0.1
VARIATION: Final = 1e-4
TINY: Final = 1e-30
SETTLED: Final = 1e-10  # of the loss: no further start is needed
PSNR_MOST: Final = 100.0


def restored(
    module: nn.Module, gradient: Sequence[Tensor], like: Samples, *, attack: Attack, seed: int
) -> Tensor:
    """Return samples [n, ...] of the labels of `like` that explain a gradient.

    Raises RunFailed for a module whose gradients have no gradients.
    """
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    draw = torch.Generator().manual_seed(seed)
    best = torch.inf
    found = torch.zeros_like(like.inputs)
    for _ in range(STARTS[attack]):
        inputs = torch.randn(like.inputs.shape, generator=draw).requires_grad_()

        def apart(inputs: Tensor = inputs) -> Tensor:
            loss = functional.cross_entropy(module(inputs), like.labels)
            own = torch.autograd.grad(loss, weights, create_graph=True)
            if attack == "DLG":
                pairs = zip(own, gradient, strict=True)
                return torch.stack([(one - other).square().sum() for one, other in pairs]).sum()
            flat = nn.utils.parameters_to_vector(own)
            wanted = nn.utils.parameters_to_vector(gradient)
            return 1 - functional.cosine_similarity(flat, wanted, 0) + VARIATION * variation(inputs)

        left = _by_lbfgs(inputs, apart) if attack == "DLG" else _by_signs(inputs, apart)
        if left < best:
            best = left
            found = inputs.detach().clone()
        if best < SETTLED:
            break
    return found


def by_first_layer(gradient: Sequence[Tensor], like: Samples) -> dict[str, Tensor]:
    """Return what the first layer's gradient alone gives, [1, ...], if it is linear with a bias."""
    shapes = [each.shape for each in gradient[:2]]
    width = shapes[-1][0]
    if shapes != [(width, like.inputs[0].numel()), (width,)]:
        return {}
    weight, bias = gradient[:2]
    return {
        FIRST_LAYER: (bias @ weight / (bias @ bias).clamp_min(TINY)).reshape(like.inputs[:1].shape)
    }


def psnr(found: Tensor, true: Tensor, *, span: float) -> list[float]:
    """Return the PSNR of each sample of `found` [n, ...] beside the nearest of `true` [m, ...]."""
    errors = (found.flatten(1)[:, None] - true.flatten(1)).square().mean(2).min(1).values
    least = (span / 10 ** (PSNR_MOST / 20)) ** 2
    return [10 * log10(span**2 / max(error, least)) for error in errors.tolist()]


def variation(inputs: Tensor) -> Tensor:
    """Return the total variation of images [n, C, H, W], 0 of others."""
    if inputs.dim() != 4:
        return torch.zeros(())
    return inputs.diff(dim=2).abs().mean() + inputs.diff(dim=3).abs().mean()


def _by_lbfgs(inputs: Tensor, apart: Callable[[], Tensor]) -> float:
    optimiser = torch.optim.LBFGS([inputs], max_iter=DLG_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = apart()
        inputs.grad = torch.autograd.grad(loss, inputs)[0]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return float(apart().detach())


def _by_signs(inputs: Tensor, apart: Callable[[], Tensor]) -> float:
    optimiser = torch.optim.Adam([inputs], COSINE_RATE)
    for step in range(COSINE_STEPS):
        inputs.grad = torch.autograd.grad(apart(), inputs)[0].sign()
        for group in optimiser.param_groups:
            group["lr"] = COSINE_RATE * (1 - step / COSINE_STEPS)
        optimiser.step()
    return float(apart().detach())
