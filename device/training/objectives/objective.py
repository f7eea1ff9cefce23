"""The interface of an objective, and the loss alone, on which the others build.

Everything here is of one model, or of A models at once (vmapped): then the tensors of the weights
are [A, ...], logits [A, W, classes], labels [A, W] or [A, W, T], and losses [A], and each model's
loss and gradients are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from fedstrata.common.learning.losses import Loss, cross_entropy
from fedstrata.common.methods.mixing import Floats

Features = Callable[[Sequence[Tensor] | None], tuple[Tensor, Tensor]]


def _no_features(at: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
    raise RuntimeError("an objective that reads features has `uses_features = True`")


# not frozen: each step makes one, and a frozen one costs a microsecond more
@dataclass(slots=True, eq=False)
class Minibatch:
    """One step's batch and the parameters at which it is taken.

    `forward()` returns the logits, float32 [W, classes], at the present `weights`, which are
    leaves. It may be called several times; only the first call updates batch statistics. `labels`
    are int64 [W], or float32 [W, T] if the data's targets are numbers. `sample_weights` [A, W],
    each row of sum 1, are the samples' weights in the loss of A models; None = equal. `received`
    are the parameters that training began with, in the order and with the shapes of `weights`;
    empty if the objective does not use them. `vectors`: those that the parent sent with the model,
    and those that the device keeps, by name. One of the length of the parameters is a list like
    `weights`, another one a list of itself.
    `features(at)` is a pass as `forward` that returns the logits and the samples' features, float32
    [W, F], the inputs of the model's last linear layer; at other parameters, which are like
    `weights`, unless `at` is None.
    `uniform` are random numbers from 0 to 1, float32 [W, draws]. `head`: the places of the last
    linear layer's weight and bias in `weights`.
    """

    forward: Callable[[], Tensor]
    labels: Tensor
    weights: Sequence[Tensor]
    received: Sequence[Tensor]
    sample_weights: Tensor | None = None
    vectors: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    features: Features = _no_features
    uniform: Tensor | None = None
    head: Sequence[int] = ()

    def classify(self, features: Tensor) -> Tensor:
        """Return the logits [W, classes] of features [W, F], of the model's last linear layer at
        the present weights.

        The objective has `uses_head = True`.
        """
        weight, *bias = (self.weights[place] for place in self.head)
        logits = features @ weight.mT
        if bias:
            return logits + bias[0].unsqueeze(-2)
        return logits

    def mean(self, each: Tensor) -> Tensor:
        """Return the mean [] of what each sample adds to the loss, [W], or the A models' means [A]
        of [A, W].
        """
        if each.dim() == 1:
            return each.mean()
        if self.sample_weights is None:
            return each.mean(1)
        return (each * self.sample_weights).sum(1)


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """What one device's training has done: the model's trainable columns before and after it,
    float32 [D] each.

    `uploaded_D`: the trained ones as the parent decodes them. `vectors`: as in Minibatch, but
    whole. `steps` of SGD were taken with this learning rate. `gradient_weight`: the sum of the
    weights of their gradients, without momentum the number of steps; the mean gradient is (received
    - trained) / (gradient_weight learning_rate). NaN unless the optimiser is SGD. `label_counts`:
    how many of the device's samples each label has, float32 [classes]; none if targets are numbers.
    """

    received_D: Floats
    trained_D: Floats
    uploaded_D: Floats
    vectors: Mapping[str, Floats]
    steps: int
    learning_rate: float
    gradient_weight: float
    label_counts: Floats


class Objective:
    """The mean loss of a batch. Another objective has other losses, or other gradients.

    Your own inherits from it (docs/own-methods.md): its keywords are the experiment's keys of
    `training.objective`.
    """

    # `training.loss`, of outputs [N, K] and targets: [N]
    sample_loss: Loss = staticmethod(cross_entropy)
    uses_received = False  # whether a copy of the received parameters is kept during training
    uses_features = False  # whether it reads the features
    uses_head = False  # whether it calls `batch.classify`
    # vectors of the device's own, float32 [D] each, zeros at first, from task to task
    keeps: Sequence[str] = ()
    receives: Sequence[str] = ()  # vectors that the rule must send with the model
    returns: Sequence[str] = ()  # vectors that the rule expects with the trained model

    def draws(self, shapes: Mapping[str, Sequence[int]], classes: int) -> int:
        """Return how many numbers of each sample `batch.uniform` has; `shapes`: of the vectors, by
        name.
        """
        return 0

    def losses(self, batch: Minibatch, logits: Tensor) -> Tensor:
        """Return the loss [] of one model, or the losses [A], differentiable."""
        if logits.dim() > 2:
            each = self.sample_loss(logits.flatten(0, 1), batch.labels.flatten(0, 1))
            return batch.mean(each.view(logits.shape[:2]))
        if self.sample_loss is cross_entropy:
            return functional.cross_entropy(logits, batch.labels)
        return batch.mean(self.sample_loss(logits, batch.labels))

    def backward(self, batch: Minibatch) -> Tensor:
        """Write each weight's gradient to `.grad`, None before; return the loss [] or [A] that is
        reported, detached.

        A weight that the logits do not depend on keeps None. Weights are the same before and after.
        """
        losses = self.losses(batch, batch.forward())
        write_gradients(losses)
        return losses.detach()

    def finish(self, update: LocalUpdate) -> Mapping[str, Floats]:
        """Return the vectors that the device keeps, and those that its parent expects, float32, of
        length D.
        """
        return {}


def write_gradients(losses: Tensor) -> None:
    """Write the gradients of a loss [], or of losses [A], each of its own model's weights."""
    if losses.dim():
        losses = losses.sum()
    torch.autograd.backward(losses)


@torch.no_grad()
def add_to_gradients(weights: Sequence[Tensor], *terms: tuple[float, Sequence[Tensor]]) -> None:
    """Add vectors, each times its factor, to the gradients of the weights that have one."""
    used = [place for place, weight in enumerate(weights) if weight.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    for factor, vector in terms:
        torch._foreach_add_(gradients, [vector[place] for place in used], alpha=factor)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm [A] of each model's tensors, [A, ...], all together; of numbers they are
    [A].
    """
    flat = [tensor.unsqueeze(-1).flatten(1) for tensor in tensors]
    each = torch.stack([torch.linalg.vector_norm(tensor, dim=1) for tensor in flat])
    whole: Tensor = torch.linalg.vector_norm(each, dim=0)
    return whole


def scale(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply each model's tensors, [A, ...], in place by its factor, [A]."""
    for tensor in tensors:
        tensor.mul_(factors.view(-1, *[1] * (tensor.dim() - 1)))
