"""SGD over the batches of a local round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType, MethodType
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.common.learning.models import with_features
from fedstrata.common.learning.optimizers import Moments, Optimizer, optimizer_of, take
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.training.objectives.objective import Minibatch, Objective, norms, scale
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.recording import Comparison, Program

Forward = Callable[[Tensor], Tensor]
FeaturesAt = Callable[[Tensor, Sequence[Tensor] | None], tuple[Tensor, Tensor]]

NO_VECTORS: Final[Mapping[str, Sequence[Tensor]]] = MappingProxyType({})
NO_PROGRAMS: Final[Mapping[int, Program | None]] = MappingProxyType({})
SMALL_BATCH_SAMPLES = 16  # up to which linear layers compute in fp32 on a CPU
FIRST_STEPS: Final = 8  # of a program, before the time of a step is known
RUN_S: Final = 0.25  # of a program, between two looks at progress and cancellation


def forward_of(module: nn.Module, training: TrainingSettings, *, device: torch.device) -> Forward:
    """Return a function for the module's logits, float32 [b, classes], in the chosen precision."""
    if training.precision != "bf16":
        return module
    mixed = torch.autocast(device.type, torch.bfloat16)

    def forward(inputs: Tensor) -> Tensor:
        # left before the backward pass; the cached casts of the weights live until then
        with mixed:
            logits: Tensor = module(inputs)
        return logits.float()

    return forward


def features_of(
    module: nn.Module, training: TrainingSettings, *, device: torch.device
) -> FeaturesAt:
    """Return a function for a batch's logits and features, at other trained parameters if they are
    given.
    """
    names = [name for name, weight in module.named_parameters() if weight.requires_grad]
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bf16")

    def features(inputs: Tensor, at: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
        weights = None
        if at is not None:
            weights = dict(zip(names, at, strict=True))
        with mixed:
            logits, found = with_features(module, inputs, weights)
        if training.precision == "bf16":
            return (logits.float(), found.float())
        return (logits, found)

    return features


def keep_linear_fp32(
    module: nn.Module, training: TrainingSettings, *, device: torch.device
) -> None:
    """Make linear layers compute in fp32 in a CPU's bf16 training with small batches.

    With few samples, casts of weights and gradients cost more than they save: a step in bf16 moves
    18 bytes per weight, one in fp32 12. FedAvg's CNN trains 1.2 times as fast.
    """
    on_cpu = training.precision == "bf16" and device.type == "cpu"
    if not on_cpu or training.batch_size > SMALL_BATCH_SAMPLES:
        return
    for layer in module.modules():
        if type(layer) is nn.Linear:
            setattr(layer, "forward", MethodType(_without_autocast, layer))  # noqa: B010 - mypy knows no such assignment


def _without_autocast(layer: nn.Linear, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return functional.linear(inputs.to(layer.weight.dtype), layer.weight, layer.bias)


class LocalSteps:
    """The steps of one training, with a fresh optimiser, and `state`: the tensors that they read
    and change.

    `buffers` are those that `forward` updates, `fixed` other tensors that it reads. `vectors`,
    `features` and `head` are what the objective reads (Minibatch). `personal`: the places of
    weights that were not received; for these `received` has the present ones.
    """

    def __init__(
        self,
        forward: Forward,
        weights: Sequence[Tensor],
        *,
        training: TrainingSettings,
        learning_rate: float,
        buffers: Sequence[Tensor] = (),
        fixed: Sequence[Tensor] = (),
        vectors: Mapping[str, Sequence[Tensor]] = NO_VECTORS,
        features: FeaturesAt | None = None,
        head: Sequence[int] = (),
        personal: Collection[int] = (),
    ) -> None:
        self.objective = objective_of(training)
        self._optimizer = optimizer_of(training)
        self._training = training
        self.learning_rate = learning_rate
        self._weights = weights
        self._vectors = vectors
        self._features = features
        self._head = head
        self._received: list[Tensor] = []
        if self.objective.uses_received:
            self._received = received_of(weights, personal)
        self._moments = self._optimizer.begin(weights)
        self._passes = _Passes(forward, features, buffers)
        read = (weights, buffers, fixed, self._received, *vectors.values())
        self.state: Sequence[Tensor] = [*chain(*read, *self._moments.values())]

    def take(self, tensors: Sequence[Tensor]) -> Tensor:
        """Take the step of a batch: inputs [b, ...], labels [b], and [b, draws] random numbers, if
        the objective reads some. Return the reported loss [], detached.
        """
        inputs, labels, *drawn = tensors
        uniform = drawn[0] if drawn else None
        batch = Minibatch(
            partial(self._passes.logits, inputs),
            labels,
            self._weights,
            self._received,
            vectors=self._vectors,
            uniform=uniform,
            head=self._head,
        )
        if self._features is not None:
            batch.features = partial(self._passes.features, inputs)
        loss = step(
            batch,
            self._moments,
            objective=self.objective,
            optimizer=self._optimizer,
            clip_norm=self._training.clip_norm,
            learning_rate=self.learning_rate,
        )
        self._passes.end()
        return loss


def received_of(weights: Sequence[Tensor], personal: Collection[int]) -> list[Tensor]:
    """Return copies of the weights as they were received; of personal ones, by their places, which
    were not, the present tensors themselves.
    """
    found = []
    for place, weight in enumerate(weights):
        received = weight.detach()
        if place not in personal:
            received = received.clone()
        found.append(received)
    return found


class Steps(Protocol):
    """The steps of one training. `state`: the tensors that they read and change."""

    learning_rate: float
    state: Sequence[Tensor]

    def take(self, tensors: Sequence[Tensor]) -> Tensor:
        """Take the step of a batch; return the reported loss [], detached."""


def run_sgd(
    steps: Steps,
    blocks: Iterable[tuple[int, Tensor, Tensor]],
    *,
    last_epoch: int,
    watch: Callable[[int], None],
    uniform: Callable[[int], Tensor] | None = None,
    programs: Mapping[int, Program | None] = NO_PROGRAMS,
    comparison: Comparison | None = None,
) -> tuple[Tensor, int]:
    """Take one step for each batch of blocks (epoch, inputs [n, b, ...], labels [n, b, ...]) of n
    batches.

    `watch(steps_done)` is called before each step, or each run of a program; an exception that it
    raises ends the loop. `uniform(samples)` are the objective's random numbers, `programs` the
    recorded steps by the size b of a batch, which are compared as they run if there is a
    `comparison`.
    Return the sum of the last epoch's losses over its samples, float64 [], and the number of steps.
    Raises ProgramDiffers.
    """
    done = 0
    most = FIRST_STEPS
    losses = scratch = None
    for epoch, *tensors in blocks:
        if losses is None or scratch is None:
            losses, scratch = (
                torch.zeros((), dtype=torch.float64, device=tensors[0].device) for _ in range(2)
            )
        count, size = tensors[1].shape[:2]
        if uniform is not None:
            tensors.append(uniform(count * size).view(count, size, -1))
        counted = losses if epoch == last_epoch else scratch
        program = programs.get(size)
        if program is not None and not program.fits(tensors):
            program = None
        taken = 0
        while taken < count:
            watch(done)
            if program is None:
                counted.add_(steps.take([each[taken] for each in tensors]), alpha=size)
                now = 1
            elif comparison is not None and comparison.now(done):
                batch = [each[taken] for each in tensors]
                rate = steps.learning_rate
                comparison.take(program, steps.take, steps.state, batch, rate=rate, losses=counted)
                now = 1
            else:
                begun = time.monotonic()
                now = min(most, count - taken)
                if comparison is not None:
                    now = comparison.some(now, done)
                some = [each[taken : taken + now] for each in tensors]
                program.run(steps.state, some, rate=steps.learning_rate, losses=counted)
                most = max(1, int(RUN_S * now / max(1e-6, time.monotonic() - begun)))
            taken = taken + now
            done = done + now
    return torch.zeros((), dtype=torch.float64) if losses is None else losses, done


class _Passes:
    """The forward passes of a step in-process, of which the first one alone updates the buffers."""

    def __init__(
        self, forward: Forward, features: FeaturesAt | None, buffers: Sequence[Tensor]
    ) -> None:
        self._forward = forward
        self._features = features
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

    def _begin(self) -> None:
        if self._taken == 1:
            self._after_first = [buffer.clone() for buffer in self._buffers]
        self._taken += 1

    def end(self) -> None:
        """End the step: give the buffers their values after the first pass, which no backward pass
        needs any more.
        """
        if self._taken > 1:
            for buffer, value in zip(self._buffers, self._after_first, strict=True):
                buffer.copy_(value)
        self._taken = 0


def step(
    batch: Minibatch,
    moments: Moments,
    *,
    objective: Objective,
    optimizer: Optimizer,
    clip_norm: float | None,
    learning_rate: float,
) -> Tensor:
    """Take one step of one model, or of A models at once, in place; return the reported loss,
    detached.

    One model: loss []. A models (vmapped): losses [A]; the tensors of the weights and of `moments`
    are [A, ...], and each model's loss, clipping and update are its own.

    The weights have no gradients before and after. No weight has changed if the objective fails,
    for example for lack of memory.
    """
    weights = batch.weights
    losses = objective.backward(batch)
    if clip_norm is not None and losses.dim():
        _clip_each([grad for weight in weights if (grad := weight.grad) is not None], clip_norm)
    elif clip_norm is not None:
        nn.utils.clip_grad_norm_(weights, clip_norm)
    take(optimizer, weights, moments, rate=learning_rate)
    return losses


@torch.no_grad()
def _clip_each(gradients: Sequence[Tensor], most: float) -> None:
    """Scale each model's gradients, [A, ...], to an L2 norm of at most `most`, as
    nn.utils.clip_grad_norm_ does.
    """
    scale(gradients, (most / (norms(gradients) + 1e-6)).clamp(max=1.0))
