"""Custom models: a function named in the experiment, `model.name = "package.module:function"`.

It is called with those of the keywords `shape`, `classes` and `tokens` that it accepts, or `outputs` in place of
`classes` if `data.targets` are numbers (see `Inputs`), and returns an `nn.Module` of float32 that computes logits
[B, classes], or predictions [B, outputs]:

    def build(*, shape: tuple[int, int, int], classes: int) -> nn.Module: ...

So the module's own class is such a function, if it needs no other keyword. It is called anew for each training and each
evaluation, so what a module keeps beside its `state_dict` begins each time as the function makes it.

torch's, numpy's and Python's own generators are seeded by the experiment during construction, training and evaluation.
Devices train the model and the cloud evaluates it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from common.experiment import own
from common.learning.inputs import Inputs
from common.learning.nets.layers import own_dropout

KEY: Final = "model.name"
CPU: Final = torch.device("cpu")

_SEEDING = threading.RLock()  # all threads share these generators


@contextmanager
def seeded(seed: int, accelerator: torch.device = CPU) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python that own code may use, for one block of a process at a time.

    Those of the CPU are restored.
    """
    with _SEEDING:
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        torch.default_generator.manual_seed(seed)
        if accelerator.type == "cuda":
            torch.cuda.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])


def build_own(name: str, seed: int, *, inputs: Inputs) -> nn.Module:
    """Return the module that the function creates. Raises InvalidExperiment."""
    found = own.load(KEY, name)
    keywords: dict[str, Any] = {"shape": inputs.shape, "outputs" if inputs.numbers else "classes": inputs.classes}
    if inputs.tokens:
        keywords["tokens"] = inputs.tokens
    with seeded(seed):
        module = own.call(KEY, name, found, own.accepted(found, keywords))
        if not isinstance(module, nn.Module):
            own.refuse(KEY, name, f"returns {type(module).__name__}, not nn.Module", "Return the module itself.")
        module = module.to("cpu").train()
        own_dropout(module)
        if any(isinstance(weight, nn.UninitializedParameter) for weight in module.parameters()):
            _logits(name, module, inputs)  # makes them
    return module


def try_own(name: str, seed: int, *, inputs: Inputs) -> None:
    """Build the function's module twice, and try a pass of one of them on two samples. Raises InvalidExperiment."""
    module, other = (build_own(name, seed, inputs=inputs) for _ in range(2))
    if set(module.modules()) & set(other.modules()):
        problem = "returns the same module, or a part of it, again: devices of a process would share what it keeps"
        own.refuse(KEY, name, problem, "Make a new one in each call.")
    with seeded(seed):
        logits = _logits(name, module, inputs)
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, inputs.classes):
        shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        wanted = "predictions" if inputs.numbers else "logits"
        problem = f"returns {shape} for two samples, not {wanted} of [2, {inputs.classes}]"
        own.refuse(KEY, name, problem, f"Return {wanted}.")


def random_samples(inputs: Inputs, count: int) -> torch.Tensor:
    """Return samples [count, ...] of which code may be tried, the same ones each time."""
    draw, shape = torch.Generator().manual_seed(count), (count, *inputs.shape)
    return torch.randint(inputs.tokens, shape, generator=draw) if inputs.tokens else torch.randn(shape, generator=draw)


@torch.no_grad()
def _logits(name: str, module: nn.Module, inputs: Inputs) -> Any:
    """Return what a module returns for two random samples, in eval mode; it is in training mode before and after."""
    draw, shape = torch.Generator().manual_seed(0), (2, *inputs.shape)
    samples = (
        torch.randint(inputs.tokens, shape, generator=draw) if inputs.tokens else torch.rand(shape, generator=draw)
    )
    remedy = "Fix the model, or use another data.dataset."
    try:
        with own.guarded({KEY: name}, problem=f"fails with {{}} on {inputs}", remedy=remedy):
            return module.eval()(samples)
    finally:
        module.train()
