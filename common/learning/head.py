"""A model's head: its last linear layer, whose inputs are the features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from common.errors import InvalidExperiment
from common.methods.fedgen import head_of
from common.model.layout import ModelLayout

Tensors = dict[str, Tensor]


def classifier_of(module: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last linear layer of a model and its name. Raises InvalidExperiment if there is none."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not layers:
        problem, remedy = "it has no torch.nn.Linear, whose inputs are the features", "End it with one."
        raise InvalidExperiment("model.name", type(module).__name__, problem, remedy)
    return layers[-1]


def head_places(module: nn.Module, layout: ModelLayout) -> tuple[int, ...]:
    """Return the places of the head's weight and bias, if it has one, among the parameters. Raises InvalidExperiment.

    Nodes without torch find it in the layout; both must agree.
    """
    name, classifier = classifier_of(module)
    found = [f"{name}.{own}" for own, _ in classifier.named_parameters()]
    if found != [entry.name for entry in head_of(layout) if entry is not None]:
        problem = f"its last torch.nn.Linear is {name}, and a later parameter is a matrix, too"
        raise InvalidExperiment("model.name", type(module).__name__, problem, "Define the linear layer last.")
    names = [each for each, _ in module.named_parameters()]
    return tuple(names.index(each) for each in found)


def with_features(
    module: nn.Module, inputs: Tensor, parameters: Tensors | Sequence[Tensors] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the logits [B, classes] and the features [B, F] of a batch.

    `parameters`: by name, in place of the module's own; a second mapping has the buffers.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0])

    _, classifier = classifier_of(module)
    hook = classifier.register_forward_pre_hook(keep)
    try:
        logits: Tensor = module(inputs) if parameters is None else functional_call(module, parameters, (inputs,))
    finally:
        hook.remove()
    return logits, seen[-1].flatten(1)


def project(module: nn.Module, width: int) -> None:
    """Put two layers before the classifier, F to F and, behind a ReLU, F to `width` features (Li et al. 2021)."""
    name, classifier = classifier_of(module)
    parent, _, own = name.rpartition(".")
    inputs, classes = classifier.in_features, classifier.out_features
    layers = nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, width), nn.Linear(width, classes)
    setattr(module.get_submodule(parent), own, nn.Sequential(*layers))
