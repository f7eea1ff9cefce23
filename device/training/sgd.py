"""SGD over the batches of a local round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, MethodType
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import InvalidExperiment
from common.experiment.own import is_own
from common.experiment.schema import Experiment
from common.experiment.training import TrainingSettings
from common.learning.models import classifier_of, with_features
from device.training.captured import CapturedGradients
from device.training.objectives.objective import Minibatch, Objective, norms, scale
from device.training.objectives.table import objective_of

Forward = Callable[[Tensor], Tensor]
FeaturesAt = Callable[[Tensor, Sequence[Tensor] | None], tuple[Tensor, Tensor]]

NO_VECTORS: Final[Mapping[str, Sequence[Tensor]]] = MappingProxyType({})
CAPTURED_PARAMETERS: Final = 2_000_000  # of the largest model whose gradients are captured
SMALL_BATCH_SAMPLES = 16  # up to which linear layers compute in fp32 on a CPU


def forward_of(module: nn.Module, training: TrainingSettings, *, device: torch.device) -> Forward:
    """Return a function for the module's logits, float32 [b, classes], in the chosen precision, compiled if chosen."""
    run: Forward = torch.compile(module, dynamic=False) if training.compile else module
    if training.precision != "bf16":
        return run
    mixed = torch.autocast(device.type, torch.bfloat16)

    def forward(inputs: Tensor) -> Tensor:
        with mixed:  # left before the backward pass; the cached casts of the weights live until then
            logits = run(inputs)
        return logits.float()

    return forward


def check_features(module: nn.Module, training: TrainingSettings) -> None:
    """Check that an objective can read features. Raises InvalidExperiment."""
    classifier_of(module)
    if training.compile:
        problem = f"the objective {training.objective.name} reads features, which a compiled model does not give"
        raise InvalidExperiment("training.compile", True, problem, "Set it to false.")


def features_of(module: nn.Module, training: TrainingSettings, *, device: torch.device) -> FeaturesAt:
    """Return a function for a batch's logits and features, at other trained parameters if they are given."""
    names = [name for name, weight in module.named_parameters() if weight.requires_grad]
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bf16")

    def features(inputs: Tensor, at: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
        with mixed:
            logits, found = with_features(module, inputs, None if at is None else dict(zip(names, at, strict=True)))
        return (logits.float(), found.float()) if training.precision == "bf16" else (logits, found)

    return features


def is_captured(module: nn.Module, experiment: Experiment, *, device: torch.device) -> bool:
    """Return whether the gradients of the objective's losses are captured: where they can be, and it pays.

    They are for fedstrata's own small models and losses in fp32 on a CPU. In large models, and with batch norm, nearly
    all the time is the kernels', and a pass that is recorded takes more memory.
    """
    training, objective = experiment.training, objective_of(experiment.training)
    if is_own(experiment.model.name) or is_own(training.loss) or type(objective).losses is not Objective.losses:
        return False
    if device.type != "cpu" or training.compile or training.precision == "bf16":
        return False
    few = sum(weight.numel() for weight in module.parameters()) <= CAPTURED_PARAMETERS
    return few and not any(True for _ in module.buffers())


def captured_of(
    logits: Callable[[Sequence[Tensor], Tensor], Tensor], training: TrainingSettings, *, recorded_use: int = 1
) -> CapturedGradients:
    """Return the captured gradients of the objective's losses, of one model or of A models at once.

    `logits(weights, inputs)` is the pass of a model, or of A models, that has no buffers. `recorded_use` is that of
    each shape of a batch.
    """
    objective = objective_of(training)

    def losses(
        weights: Sequence[Tensor], inputs: Tensor, labels: Tensor, sample_weights: Tensor | None = None
    ) -> Tensor:
        found = logits(weights, inputs)
        return objective.losses(Minibatch(lambda: found, labels, weights, (), sample_weights), found)

    return CapturedGradients(losses, recorded_use=recorded_use)


def keep_linear_fp32(module: nn.Module, training: TrainingSettings, *, device: torch.device) -> None:
    """Make linear layers compute in fp32 in a CPU's bf16 training with small batches.

    With few samples, casts of weights and gradients cost more than they save: a step in bf16 moves 18 bytes per weight,
    one in fp32 12. FedAvg's CNN trains 1.2 times as fast.
    """
    if training.precision != "bf16" or device.type != "cpu" or training.batch_size > SMALL_BATCH_SAMPLES:
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
    buffers: Sequence[Tensor] = (),
    vectors: Mapping[str, Sequence[Tensor]] = NO_VECTORS,
    features: FeaturesAt | None = None,
    captured: CapturedGradients | None = None,
    uniform: Callable[[int], Tensor] | None = None,
    head: Sequence[int] = (),
    personal: Collection[int] = (),
) -> tuple[Tensor, int]:
    """Take one step of SGD for each batch (epoch, inputs, labels), with a fresh momentum.

    `watch(steps_done)` is called before each step; an exception that it raises ends the loop. `buffers` are those that
    `forward` updates. `vectors`, `features`, `uniform(samples)` and `head` are what the objective reads (Minibatch),
    `captured` are the gradients of its losses. `personal`: the places of weights that were not received; for these
    `received` has the present ones.
    Return the sum of the last epoch's losses over its samples, float64 [], and the number of steps.
    """
    objective = objective_of(training)
    received: list[Tensor] = []
    if objective.uses_received:
        received = [weight.detach() if i in personal else weight.detach().clone() for i, weight in enumerate(weights)]
    momenta = [torch.zeros_like(weight) if training.momentum else None for weight in weights]
    losses = torch.zeros((), dtype=torch.float64, device=weights[0].device)
    steps, passes = 0, _Passes(forward, features, captured, weights, buffers)
    for epoch, inputs, labels in batches:
        watch(steps)
        batch = Minibatch(partial(passes.logits, inputs), labels, weights, received, vectors=vectors, head=head)
        if features is not None:
            batch.features = partial(passes.features, inputs)
        if captured is not None:
            batch.captured = partial(passes.gradients, inputs, labels)
        if uniform is not None:
            batch.uniform = uniform(len(labels))
        loss = step(batch, momenta, objective=objective, training=training, learning_rate=learning_rate)
        passes.end()
        if epoch == last_epoch:
            losses.add_(loss, alpha=len(labels))
        steps += 1
    return losses, steps


class _Passes:
    """The forward passes of a step in-process, of which the first one alone updates the buffers."""

    def __init__(
        self,
        forward: Forward,
        features: FeaturesAt | None,
        captured: CapturedGradients | None,
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        self._forward = forward
        self._features = features
        self._captured = captured
        self._weights = weights
        self._buffers = buffers
        self._taken = 0
        self._after_first: list[Tensor] = []

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits at the present weights."""
        self._begin()
        return self._forward(inputs)

    def features(self, inputs: Tensor, at: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return the logits and the features, at other weights unless `at` is None."""
        assert self._features is not None
        self._begin()
        return self._features(inputs, at)

    def gradients(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Write the gradients of the losses; return the loss."""
        assert self._captured is not None
        self._begin()
        return self._captured.backward(self._weights, inputs, labels)

    def _begin(self) -> None:
        if self._taken == 1:
            self._after_first = [buffer.clone() for buffer in self._buffers]
        self._taken += 1

    def end(self) -> None:
        """End the step: give the buffers their values after the first pass, which no backward pass needs any more."""
        if self._taken > 1:
            for buffer, value in zip(self._buffers, self._after_first, strict=True):
                buffer.copy_(value)
        self._taken = 0


def step(
    batch: Minibatch,
    momenta: Sequence[Tensor | None],
    *,
    objective: Objective,
    training: TrainingSettings,
    learning_rate: float,
) -> Tensor:
    """Take one step of SGD of one model, or of A models at once, in place; return the reported loss, detached.

    One model: loss []. A models (vmapped): losses [A]; the tensors of the weights and of `momenta` are [A, ...], and
    each model's loss, clipping and update are its own.

    The weights have no gradients before and after. Momenta start at zero; they are None without momentum. No weight has
    changed if the objective fails, for example for lack of memory.
    """
    weights = batch.weights
    losses = objective.backward(batch)
    # A weight without gradient, for example of a layer that is never called, does not change.
    used = [i for i, weight in enumerate(weights) if weight.grad is not None]
    gradients = [grad for weight in weights if (grad := weight.grad) is not None]
    with torch.no_grad():
        if training.clip_norm is not None:
            if losses.dim():
                _clip_each(gradients, training.clip_norm)
            else:
                nn.utils.clip_grad_norm_(weights, training.clip_norm)
        # The kernel of torch.optim.SGD, fused, for weights of one device and type. An Optimizer would import torch's
        # compiler, 1.3 s and 150 MB, and its functional form sorts the weights at each step. Each gradient must have
        # its weight's strides, or the result is silently wrong: those that autograd.backward writes to .grad have them,
        # those of torch.autograd.grad may not.
        torch._fused_sgd_(
            [weights[i] for i in used],
            gradients,
            [momentum for i in used if (momentum := momenta[i]) is not None],
            lr=learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            dampening=0.0,
            nesterov=training.nesterov,
            maximize=False,
            is_first_step=False,
        )
    for weight in weights:
        weight.grad = None
    return losses


def _clip_each(gradients: Sequence[Tensor], most: float) -> None:
    """Scale each model's gradients, [A, ...], to an L2 norm of at most `most`, as nn.utils.clip_grad_norm_ does."""
    scale(gradients, (most / (norms(gradients) + 1e-6)).clamp(max=1.0))
