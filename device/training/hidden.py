"""What the user's own code keeps beside a model's state: common steps and recorded ones would pass over it."""

from __future__ import annotations

import pickle
import random
from io import BytesIO
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def obstacle_in(module: nn.Module) -> str:
    """Return what of a module vmapped steps would pass over without an error, or ""."""
    for name, weight in module.named_parameters():
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            return f"a hook of the gradients of {name}"
    seen: set[nn.Module] = set()
    for name, layer in module.named_modules(remove_duplicate=False):
        if getattr(layer, "_backward_hooks", None) or getattr(layer, "_backward_pre_hooks", None):
            return f"a hook of the gradients of {name or 'the model'}"
        if layer in seen:  # torch.func.functional_call would leave it with the tensors of the call
            return f"the second name of a layer, {name}"
        seen.add(layer)
    return ""


def hidden_state(module: nn.Module, objective: object) -> bytes:
    """Return the values of all that a module and an objective keep beside the module's state, and of all generators.

    Raises RuntimeError if some of it has no form that can be compared.
    """
    file = BytesIO()
    writer = _Writer(file, module)
    layers = [{key: value for key, value in vars(layer).items() if key != "_parameters"} for layer in module.modules()]
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
    on_gpu = torch.cuda.get_rng_state() if next(module.parameters()).is_cuda else None
    try:
        writer.dump((layers, vars(objective), generators, on_gpu))
    except Exception as error:  # noqa: BLE001 - any object may refuse to be pickled, with any error
        raise RuntimeError(f"the model or the objective keeps what cannot be compared: {error}") from None
    return file.getvalue()


class _Writer(pickle.Pickler):
    """A pickler that writes tensors by value, but those of the state, and code and layers by identity."""

    def __init__(self, file: BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._state = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}

    def persistent_id(self, value: Any) -> object:
        """Return what stands for a value, None for itself."""
        if isinstance(value, Tensor):
            content = self._state.get(id(value)) or value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
            return value.requires_grad, str(value.dtype), tuple(value.shape), content
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, FunctionType):
            return id(value), [cell.cell_contents for cell in value.__closure__ or ()], value.__defaults__
        if isinstance(value, (nn.Module, BuiltinFunctionType, ModuleType, type)):
            return id(value)
        return None
