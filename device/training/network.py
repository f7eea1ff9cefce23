"""An experiment's model where it is trained, and how its gradients are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

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
    layout: ModelLayout
    forward: Forward
    features: FeaturesAt | None
    captured: CapturedGradients | None
    head: Sequence[int]


def network_of(experiment: Experiment, inputs: Inputs, *, accelerator: torch.device) -> Network:
    """Return a new network. Raises InvalidExperiment."""
    training, objective = experiment.training, objective_of(experiment.training)
    try_loss(training.loss, inputs)
    module = models.of(experiment, inputs=inputs)
    layout = models.layout_of(module)
    if accelerator.type == "cpu":
        # torch's types know no such overload before 2.15.
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, unused-ignore]
        if training.precision != "bf16" and not training.compile:
            as_products(module)
    keep_linear_fp32(module, training, device=accelerator)
    forward = forward_of(module, training, device=accelerator)
    features = None
    if objective.uses_features:
        check_features(module, training)
        features = features_of(module, training, device=accelerator)
    captured = None
    if is_captured(module, experiment, device=accelerator):
        captured = captured_of(lambda _, batch: forward(batch), training)  # at the module's own weights
    return Network(
        module, layout, forward, features, captured, head_places(module, layout) if objective.uses_head else ()
    )
