"""Custom models: a function named in the experiment, `model.name = "package.module:function"`.

It is called with the keywords `shape` and `classes`, and `tokens` if the data are text (see `Inputs`), and returns an
`nn.Module` of float32 that computes logits [B, classes]:

    def build(*, shape: tuple[int, int, int], classes: int) -> nn.Module: ...

Random numbers from torch's global generator during the construction are seeded by the experiment. In training only
dropout may be random, as separate layers (`nn.Dropout`, `Dropout1d`, `2d`, `3d`; not `nn.LSTM(dropout=...)`). The
module must be importable wherever the model is trained or evaluated: on the devices and at the cloud. So the experiment
names code to run. The cloud gets its experiment from its user. A device gets it from a broker, and imports only what
its own user has allowed by `fedstrata device --allow-models PACKAGE` (`common.experiment.data.permit`), and nothing of
Python's standard library. `fedstrata run` allows its devices the model of its user's experiment.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from typing import Any, Never

import torch
from torch import nn

from common.errors import InvalidExperiment
from common.learning.inputs import Inputs
from common.learning.nets.layers import draws_globally, own_dropout, reseed

_SEEDING = threading.Lock()  # all threads share torch's global generator


def build_own(name: str, seed: int, *, inputs: Inputs) -> nn.Module:
    """Return the module that the function creates, tested on two samples. Raises InvalidExperiment."""
    where, _, function = name.partition(":")
    if where.partition(".")[0] in sys.stdlib_module_names:  # some modules of Python have side effects when imported
        _refuse(name, "is in Python's standard library", "Name one of your own modules.")
    try:
        found = getattr(importlib.import_module(where), function)
    except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
        _refuse(
            name, f"cannot be imported ({_short(error)})", "Put its folder on PYTHONPATH wherever models are built."
        )
    keywords: dict[str, Any] = {"shape": inputs.shape, "classes": inputs.classes}
    if inputs.tokens:
        keywords["tokens"] = inputs.tokens
    if not callable(found):
        _refuse(name, f"is not a function but {type(found).__name__}", "Name a function that returns an nn.Module.")
    try:
        inspect.signature(found).bind(**keywords)
    except (TypeError, ValueError) as error:
        _refuse(
            name, f"does not accept the keywords {', '.join(keywords)} ({error})", "Give the function these keywords."
        )
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = found(**keywords)
        except Exception as error:  # noqa: BLE001 - custom code
            _refuse(name, f"fails with {_short(error)}", "Fix the function.")
        if not isinstance(module, nn.Module):
            _refuse(name, f"returns {type(module).__name__}, not nn.Module", "Return the module itself.")
        module = module.to("cpu")
        own_dropout(module)
        _try(name, module, inputs)
    return module


def _try(name: str, module: nn.Module, inputs: Inputs) -> None:
    samples = torch.zeros(2, *inputs.shape, dtype=torch.int64 if inputs.tokens else torch.float32)
    module.eval()
    try:
        with torch.no_grad():
            logits = module(samples)
    except Exception as error:  # noqa: BLE001 - custom code
        _refuse(name, f"fails with {_short(error)} on {inputs}", "Fix the model, or use another data.dataset.")
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, inputs.classes):
        shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        _refuse(name, f"returns {shape} for two samples, not logits of [2, {inputs.classes}]", "Return logits.")
    module.train()
    reseed(module, 0, samples.device)  # else fedstrata's own dropout would use the global generator
    layer = draws_globally(module, samples)
    if layer is not None:
        _refuse(
            name,
            f"its layer {layer} uses torch's global random generator, which all devices of a process share",
            "Use nn.Dropout, Dropout1d, 2d or 3d, each as a separate layer: these get their own generator.",
        )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _refuse(name: str, problem: str, remedy: str) -> Never:
    raise InvalidExperiment("model.name", name, problem, remedy) from None
