"""SGD over the batches of a local round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.sgd import sgd

from common.experiment.training import TrainingSettings

Forward = Callable[[Tensor], Tensor]

SMALL_BATCH_SAMPLES = 16  # up to which linear layers compute in fp32 on a CPU


def forward_of(module: nn.Module, training: TrainingSettings, *, device: torch.device) -> Forward:
    """Return a function for the module's logits, float32 [b, classes], in the chosen precision, compiled if chosen."""
    run: Forward = torch.compile(module, dynamic=False) if training.compile else module
    if training.precision == "fp32":
        return run
    mixed = torch.autocast(device.type, torch.bfloat16)

    def forward(inputs: Tensor) -> Tensor:
        with mixed:  # left before the backward pass; the cached casts of the weights live until then
            logits = run(inputs)
        return logits.float()

    return forward


def keep_linear_fp32(module: nn.Module, training: TrainingSettings, *, device: torch.device) -> None:
    """Make linear layers compute in fp32 in a CPU's bf16 training with small batches.

    With few samples, casts of weights and gradients cost more than they save: a step in bf16 moves 18 bytes per weight,
    one in fp32 12. FedAvg's CNN trains 1.2 times as fast.
    """
    if training.precision == "fp32" or device.type != "cpu" or training.batch_size > SMALL_BATCH_SAMPLES:
        return
    for layer in module.modules():
        if type(layer) is nn.Linear:
            setattr(layer, "forward", MethodType(_without_autocast, layer))  # noqa: B010 - mypy knows no such assignment


def _without_autocast(layer: nn.Linear, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return functional.linear(inputs.to(layer.weight.dtype), layer.weight, layer.bias)


def run_sgd(
    forward: Forward,
    weights: Sequence[Tensor],
    batches: Iterable[tuple[int, Tensor, Tensor]],
    *,
    training: TrainingSettings,
    learning_rate: float,
    last_epoch: int,
    watch: Callable[[int], None],
) -> tuple[Tensor, int]:
    """Take one step of SGD for each batch (epoch, inputs, labels), with a fresh momentum.

    `watch(steps_done)` is called before each step; an exception that it raises ends the loop. Return the sum of the
    last epoch's losses over its samples, float64 [], and the number of steps.
    """
    momenta = [torch.zeros_like(weight) if training.momentum else None for weight in weights]
    losses = torch.zeros((), dtype=torch.float64, device=weights[0].device)
    steps = 0
    for epoch, inputs, labels in batches:
        watch(steps)
        loss = step(forward(inputs), labels, weights, momenta, training=training, learning_rate=learning_rate)
        if epoch == last_epoch:
            losses.add_(loss, alpha=len(labels))
        steps += 1
    return losses, steps


def step(
    logits: Tensor,
    labels: Tensor,
    weights: Sequence[Tensor],
    momenta: Sequence[Tensor | None],
    *,
    training: TrainingSettings,
    learning_rate: float,
    sample_weights: Tensor | None = None,
) -> Tensor:
    """Take one step of SGD of one model, or of A models at once, in place; return the loss before it, detached.

    One model: logits [W, classes], labels int64 [W], loss []. A models (vmapped): logits [A, W, classes], labels
    [A, W], losses [A]; the tensors of `weights` and `momenta` are [A, ...], and each model's loss, clipping and update
    are its own. `sample_weights` [A, W], each row of sum 1, are the samples' weights in the loss; None = equal.

    `logits` depend on `weights`, leaves without gradients. Momenta start at zero; they are None without momentum. No
    weight changes before all gradients are computed.
    """
    losses = _losses(logits, labels, sample_weights)
    torch.autograd.backward(losses.sum() if losses.dim() else losses)  # each depends on its own model's weights alone
    # A weight without gradient, for example of a layer that is never called, does not change.
    used = [i for i, weight in enumerate(weights) if weight.grad is not None]
    gradients = [grad for weight in weights if (grad := weight.grad) is not None]
    with torch.no_grad():
        if training.clip_norm is not None:
            if losses.dim():
                _clip_each(gradients, training.clip_norm)
            else:
                nn.utils.clip_grad_norm_(weights, training.clip_norm)
        # torch.optim.SGD, fused. The functional form: an Optimizer imports torch's compiler, 1.3 s and 150 MB. Each
        # gradient must have its weight's strides, or the result is silently wrong: those that autograd.backward writes
        # to .grad have them, those of torch.autograd.grad may not.
        sgd(
            [weights[i] for i in used],
            gradients,
            [momenta[i] for i in used],
            fused=True,
            lr=learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            dampening=0.0,
            nesterov=training.nesterov,
            maximize=False,
        )
    for weight in weights:
        weight.grad = None
    return losses.detach()


def _losses(logits: Tensor, labels: Tensor, sample_weights: Tensor | None) -> Tensor:
    """Return the mean cross-entropy [] of one model's samples, or the means [A] of those of A models."""
    if labels.dim() == 1:
        return functional.cross_entropy(logits, labels)
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return losses.mean(1) if sample_weights is None else (losses * sample_weights).sum(1)


def _clip_each(gradients: Sequence[Tensor], most: float) -> None:
    """Scale each model's gradients, [A, ...], to an L2 norm of at most `most`, as nn.utils.clip_grad_norm_ does."""
    norms = torch.stack([torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in gradients])
    factors = (most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for grad in gradients:
        grad.mul_(factors.view(-1, *[1] * (grad.dim() - 1)))
