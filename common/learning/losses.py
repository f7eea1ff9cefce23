"""The losses: of the outputs of a model and the targets, each sample's.

    cross_entropy          -ln softmax(o)_y
    mean_squared_error     mean over the T outputs of (o - t)^2
    mean_absolute_error    mean of |o - t|
    huber                  mean of e^2 / 2 with e = |o - t| up to 1, else e - 1/2
    binary_cross_entropy   mean of -t ln s(o) - (1 - t) ln(1 - s(o)), s the logistic function

Cross-entropy takes outputs [N, classes] and targets int64 [N], the others outputs and targets
float32 [N, T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.settings import own
from fedstrata.common.settings.own import is_own

Loss = Callable[[Tensor, Tensor], Tensor]
LOSS_KEY: Final = "training.loss"


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, [N]."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def _mean(loss: Callable[..., Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    return loss(outputs, targets.to(outputs.dtype), reduction="none").mean(1)


_LOSSES: Final[Mapping[str, Loss]] = MappingProxyType(
    {
        "cross_entropy": cross_entropy,
        "mean_squared_error": partial(_mean, functional.mse_loss),
        "mean_absolute_error": partial(_mean, functional.l1_loss),
        "huber": partial(_mean, functional.smooth_l1_loss),
        "binary_cross_entropy": partial(_mean, functional.binary_cross_entropy_with_logits),
    }
)


def loss_of(name: str) -> Loss:
    """Return the loss of this name, or the user's own function as one. Raises InvalidExperiment.

    The user's function raises InvalidExperiment, and what it raises for lack of memory. It may
    write into its arguments, which are copies: the outputs are scored, too, and the targets are
    those of the data set.
    """
    if not is_own(name):
        return _LOSSES[name]
    found = cast(Callable[[Tensor, Tensor], Any], own.load(LOSS_KEY, name))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with own.guarded({LOSS_KEY: name}):
            each = found(outputs.clone(), targets.clone())
        if not isinstance(each, Tensor) or each.shape != outputs.shape[:1]:
            shape = list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            problem = (
                f"returns {shape} for {len(outputs)} samples, not the loss of each, "
                f"[{len(outputs)}]{own.place(found)}"
            )
            own.refuse(
                LOSS_KEY, name, problem, "Return no mean (of torch's losses: reduction='none')."
            )
        return each

    return loss


def try_loss(name: str, inputs: Inputs) -> None:
    """Take the user's own loss and its gradient of two samples. Raises InvalidExperiment."""
    if is_own(name):
        outputs = torch.zeros(2, inputs.classes, requires_grad=True)
        if inputs.numbers:
            targets = torch.zeros(2, inputs.classes)
        else:
            targets = torch.zeros(2, dtype=torch.int64)
        each = loss_of(name)(outputs, targets)
        if not each.requires_grad:
            own.refuse(
                LOSS_KEY,
                name,
                "its result does not depend on the outputs",
                "Compute it with torch, from outputs.",
            )
