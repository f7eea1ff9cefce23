"""An experiment's model where it is trained, and how its gradients are computed.

Convolutions that are one matrix product replace oneDNN's own where those cost many times their arithmetic. Suffixes: B
samples, C channels of the inputs, O of the outputs, kernels of H x W, K = C H W, N positions of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.experiment.own import is_own
from common.experiment.schema import Experiment
from common.learning import models
from common.learning.inputs import Inputs
from common.learning.losses import try_loss
from common.learning.models import NO_ARRAYS, Arrays, head_places
from common.model.parts import ModelParts
from device.training.captured import CapturedGradients
from device.training.objectives.table import objective_of
from device.training.sgd import (
    FeaturesAt,
    Forward,
    captured_of,
    check_features,
    features_of,
    forward_of,
    is_captured,
    keep_linear_fp32,
)


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A model and the functions of its passes. Each training overwrites the model's parameters and buffers.

    `features` and `head` (the places of the last linear layer's weight and bias) are for objectives that read them.
    """

    module: nn.Module
    forward: Forward
    features: FeaturesAt | None
    captured: CapturedGradients | None
    head: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class NetworkSource:
    """Networks of an experiment for one kind of inputs on one accelerator.

    fedstrata's own models have one network, `shared` by all trainings. A user's own may keep anything beside its
    state, so each training has a new one, in this memory format. `joins`: it cannot train on one sample. `tried`: sizes
    of batches.
    """

    experiment: Experiment
    inputs: Inputs
    accelerator: torch.device
    parts: ModelParts
    shared: Network | None
    memory_format: torch.memory_format = torch.contiguous_format
    joins: bool = False
    tried: set[int] = field(default_factory=set)

    def network(self) -> Network:
        """Return the network of the next training. Raises InvalidExperiment."""
        if self.shared is not None:
            return self.shared
        module = models.anew(self.experiment, inputs=self.inputs)
        _order(module, self.memory_format)
        return _network(self.experiment, module, self.parts, self.accelerator)


def source_of(
    experiment: Experiment, inputs: Inputs, *, accelerator: torch.device, frozen: Arrays = NO_ARRAYS
) -> NetworkSource:
    """Return a new source; `frozen`: the cloud's arrays, if this node builds others. Raises InvalidExperiment."""
    training, shared = experiment.training, None
    try_loss(training.loss, inputs)
    module = models.of(experiment, inputs=inputs, frozen=frozen)
    parts = models.parts_of(module, experiment.model)
    if not is_own(experiment.model.name):
        if accelerator.type == "cpu":
            _order(module, torch.channels_last)
            if training.precision != "bf16" and not training.compile:
                as_products(module)
        keep_linear_fp32(module, training, device=accelerator)
        shared = _network(experiment, module, parts, accelerator)
    return NetworkSource(experiment, inputs, accelerator, parts, shared)


def _order(module: nn.Module, memory_format: torch.memory_format) -> None:
    """Give images' kernels an order in memory. `nn.Module.to` would do it too, and fail for those of volumes."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def _network(experiment: Experiment, module: nn.Module, parts: ModelParts, accelerator: torch.device) -> Network:
    training, objective = experiment.training, objective_of(experiment.training)
    forward = forward_of(module, training, device=accelerator)
    features = None
    if objective.uses_features:
        check_features(module, training)
        features = features_of(module, training, device=accelerator)
    captured = None
    if is_captured(module, experiment, device=accelerator):
        captured = captured_of(lambda _, batch: forward(batch), training)  # at the module's own weights
    head = head_places(module, parts.whole) if objective.uses_head else ()
    return Network(module, forward, features, captured, head)


OUTPUTS_LEAST: Final = 16  # of a first layer's product: with fewer columns oneDNN is faster
WINDOWS_MOST: Final = 1 << 15  # numbers in the windows of a first layer's batch: beyond them oneDNN is as fast


def as_products(module: nn.Module) -> None:
    """Let convolutions of a model of fedstrata's be products where a CPU is faster so: by shape, never by timing.

    These are the ones of a kernel as large as its input, such as LeNet-5's last, and first ones of few gray pixels.
    """
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _is_plain(layer):
            setattr(layer, "forward", MethodType(_forward, layer))  # noqa: B010 - mypy knows no such assignment


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros" and layer.padding != "same"


def _padding_of(layer: nn.Conv2d) -> tuple[int, int]:
    rows, columns = (0, 0) if isinstance(layer.padding, str) else layer.padding  # "valid" is none
    return rows, columns


def _forward(layer: nn.Conv2d, x_BCHW: Tensor) -> Tensor:
    if layer.kernel_size == x_BCHW.shape[2:] and _padding_of(layer) == (0, 0):
        return _whole(layer, x_BCHW)
    windows = x_BCHW.numel() * layer.kernel_size[0] * layer.kernel_size[1]
    wide = layer.in_channels == 1 and layer.out_channels >= OUTPUTS_LEAST
    if wide and windows <= WINDOWS_MOST and not x_BCHW.requires_grad:
        return _gray(layer, x_BCHW)
    return nn.Conv2d.forward(layer, x_BCHW)


def _whole(layer: nn.Conv2d, x_BCHW: Tensor) -> Tensor:
    """Return the outputs [B, O, 1, 1] of a kernel as large as the input."""
    x_BK, weight_OK = (tensor.permute(0, 2, 3, 1).flatten(1) for tensor in (x_BCHW, layer.weight))
    return functional.linear(x_BK, weight_OK, layer.bias)[:, :, None, None]


def _gray(layer: nn.Conv2d, x_B1HW: Tensor) -> Tensor:
    """Return the outputs of a layer whose input needs no gradient, in the order of channels_last."""
    (height, width), (down, right), (rows, columns) = layer.kernel_size, layer.stride, _padding_of(layer)
    padded = functional.pad(x_B1HW, (columns, columns, rows, rows))
    windows = padded.unfold(2, height, down).unfold(3, width, right)  # [B, 1, rows, columns, H, W]
    x_KN = windows.permute(4, 5, 1, 0, 2, 3).reshape(height * width, -1)
    # Contiguous, so that its gradient is x_KN times a matrix as wide as O: the transposed product takes twice as long.
    weight_KO = layer.weight.permute(2, 3, 1, 0).flatten(0, 2).contiguous()
    y_NO = x_KN.t() @ weight_KO if layer.bias is None else torch.addmm(layer.bias, x_KN.t(), weight_KO)
    return y_NO.view(len(x_B1HW), *windows.shape[2:4], -1).permute(0, 3, 1, 2)
