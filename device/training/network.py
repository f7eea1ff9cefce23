"""An experiment's model where it is trained, and how its gradients are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from common.experiment.own import is_own
from common.experiment.schema import Experiment
from common.learning import models
from common.learning.head import head_places
from common.learning.inputs import Inputs
from common.learning.losses import try_loss
from common.model.layout import ModelLayout
from device.training.captured import CapturedGradients
from device.training.convolutions import as_products
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
    layout: ModelLayout
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
        return _network(self.experiment, module, self.layout, self.accelerator)


def source_of(experiment: Experiment, inputs: Inputs, *, accelerator: torch.device) -> NetworkSource:
    """Return a new source. Raises InvalidExperiment."""
    training, shared = experiment.training, None
    try_loss(training.loss, inputs)
    module = models.of(experiment, inputs=inputs)
    layout = models.layout_of(module)
    if not is_own(experiment.model.name):
        if accelerator.type == "cpu":
            _order(module, torch.channels_last)
            if training.precision != "bf16" and not training.compile:
                as_products(module)
        keep_linear_fp32(module, training, device=accelerator)
        shared = _network(experiment, module, layout, accelerator)
    return NetworkSource(experiment, inputs, accelerator, layout, shared)


def _order(module: nn.Module, memory_format: torch.memory_format) -> None:
    """Give images' kernels an order in memory. `nn.Module.to` would do it too, and fail for those of volumes."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def _network(experiment: Experiment, module: nn.Module, layout: ModelLayout, accelerator: torch.device) -> Network:
    training, objective = experiment.training, objective_of(experiment.training)
    forward = forward_of(module, training, device=accelerator)
    features = None
    if objective.uses_features:
        check_features(module, training)
        features = features_of(module, training, device=accelerator)
    captured = None
    if is_captured(module, experiment, device=accelerator):
        captured = captured_of(lambda _, batch: forward(batch), training)  # at the module's own weights
    return Network(module, forward, features, captured, head_places(module, layout) if objective.uses_head else ())
