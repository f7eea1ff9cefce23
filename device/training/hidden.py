"""What the user's own code keeps beside a model's state: recorded steps would pass over it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.common.settings.own_values import ValueWriter, kept_in_files


class NotComparable(RuntimeError):
    """The user's own code keeps an object without a form that can be compared."""


def hidden_state(module: nn.Module, objective: object, names: Iterable[str]) -> bytes:
    """Return what a module and an objective keep beside the module's state, and the states of all
    generators.

    With them the places of the state's tensors in memory, as code may give them others, and what
    the files of own code keep, by the `names` of that code. Raises NotComparable.
    """
    file = BytesIO()
    writer = _StateWriter(file, module)
    layers = []
    for layer in module.modules():
        layers.append({key: value for key, value in vars(layer).items() if key != "_parameters"})
    hooks = [
        (each._backward_hooks, getattr(each, "_post_accumulate_grad_hooks", None))
        for each in module.parameters()
    ]
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        writer.dump((layers, hooks, vars(objective), generators, kept_in_files(names)))
    except Exception as error:  # noqa: BLE001 - any object may refuse to be pickled, with any error
        problem = "the model or the objective keeps what cannot be compared"
        raise NotComparable(f"{problem}: {error}") from None
    return file.getvalue()


class _StateWriter(ValueWriter):
    """A pickler that writes the tensors of a module's state, and its layers, by identity, and all
    others by value.
    """

    def __init__(self, file: BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._state = {
            id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()
        }
        self._layers = set(map(id, module.modules()))

    def persistent_id(self, value: Any) -> object:
        """Return what stands for a value, None for itself."""
        if id(value) in self._layers:
            return id(value)
        if id(value) in self._state and isinstance(value, Tensor):
            return value.requires_grad, self._state[id(value)], id(value), value.data_ptr()
        return super().persistent_id(value)
