"""Custom models: a function named in the experiment, `model.name = "package.module:function"`.

It is called with those of the keywords `shape`, `classes` and `tokens` that it accepts, or `outputs` in place of
`classes` if `data.targets` are numbers (see `Inputs`), and returns an `nn.Module` of float32 that computes logits
[B, classes], or predictions [B, outputs]:

    def build(*, shape: tuple[int, int, int], classes: int) -> nn.Module: ...

So the module's own class is such a function, if it needs no other keyword.

Random numbers from torch's global generator during the construction are seeded by the experiment. In training only
dropout may be random, as separate layers (`nn.Dropout`, `Dropout1d`, `2d`, `3d`; not `nn.LSTM(dropout=...)`). Devices
train the model and the cloud evaluates it.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
from torch import nn

from common.experiment import own
from common.learning.inputs import Inputs
from common.learning.nets.layers import draws_globally, own_dropout, reseed

KEY: Final = "model.name"

_SEEDING = threading.Lock()  # all threads share torch's global generator


def build_own(name: str, seed: int, *, inputs: Inputs) -> nn.Module:
    """Return the module that the function creates, tested on two samples. Raises InvalidExperiment."""
    found = own.load(KEY, name)
    keywords: dict[str, Any] = {"shape": inputs.shape, "outputs" if inputs.numbers else "classes": inputs.classes}
    if inputs.tokens:
        keywords["tokens"] = inputs.tokens
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = own.call(KEY, name, found, own.accepted(found, keywords))
        if not isinstance(module, nn.Module):
            own.refuse(KEY, name, f"returns {type(module).__name__}, not nn.Module", "Return the module itself.")
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
        own.refuse(
            KEY, name, f"fails with {own.short(error)} on {inputs}", "Fix the model, or use another data.dataset."
        )
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, inputs.classes):
        shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        wanted = "predictions" if inputs.numbers else "logits"
        problem = f"returns {shape} for two samples, not {wanted} of [2, {inputs.classes}]"
        own.refuse(KEY, name, problem, f"Return {wanted}.")
    module.train()
    reseed(module, 0, samples.device)  # else fedstrata's own dropout would use the global generator
    layer = draws_globally(module, samples)
    if layer is not None:
        own.refuse(
            KEY,
            name,
            f"its layer {layer} uses torch's global random generator, which all devices of a process share",
            "Use nn.Dropout, Dropout1d, 2d or 3d, each as a separate layer: these get their own generator.",
        )
