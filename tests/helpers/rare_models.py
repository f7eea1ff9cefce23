"""More models that PyTorch allows: with state of every kind, with values read by numpy, and nets of
recent papers.

All are for gray images of 8 x 8 in ten classes, and smooth where they can be (see `odd_models`).
They are imported as a user's own code is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.helpers.odd_models import Net


class _Function(torch.autograd.Function):
    """The base of functions with gradients of their own."""


# Values that change beside PyTorch's operations


class ClampsData(Net):
    """Weights that get new data where they are too large, which they are after some steps."""

    def features(self, x: Tensor) -> Tensor:
        self.conv.weight.data = self.conv.weight.data.clamp(-0.34, 0.34)
        return super().features(x)


class ClampsByNumpy(Net):
    """Weights that numpy changes in their memory."""

    def features(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.detach().numpy()
        np.clip(weight, -0.34, 0.34, out=weight)
        return super().features(x)


class ClampsAll(Net):
    """An operation on a list, which returns nothing."""

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_clamp_max_([self.conv.weight, self.conv.bias], 0.3)
        return super().features(x)


class _ClippedByNumpy(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if np.abs(grad.numpy()).max() > 0.03:
            return grad * 0.5
        return grad


class NumpyInBackward(Net):
    """Gradients that depend on a value which numpy reads."""

    def features(self, x: Tensor) -> Tensor:
        return _ClippedByNumpy.apply(super().features(x))


_LIBRARY = torch.library.Library("fedstrata_tests", "DEF")
_LIBRARY.define("bound_(Tensor(a!) x, float most) -> ()")


def _bound(x: Tensor, most: float) -> None:
    x.clamp_(-most, most)


_LIBRARY.impl("bound_", _bound, "CPU")


class ClampsByOperation(Net):
    """An operation of its own, which returns nothing."""

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.ops.fedstrata_tests.bound_(self.conv.weight, 0.34)
        return super().features(x)


class WithinABand(Net):
    """Outputs that depend on a value which numpy reads, and which is between two others only after
    some steps.
    """

    def forward(self, x: Tensor) -> Tensor:
        largest = np.abs(self.last.bias.detach().numpy()).max()
        return super().forward(x) * (0.5 if 0.085 < largest < 50 else 1.0)


class CountsByNumpy(Net):
    """A counter in a buffer, which numpy reads."""

    def change(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return super().forward(x) * (0.5 if self.steps.numpy() > 6 else 1.0)


class _Storage(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.last.bias.untyped_storage()[3]
        return super().forward(x) * (1 + first / 256)


ReadsStorage = _Storage

# Counters and memories that are not in the module's own state


class _Counting(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x / (1 + 0.2 * self.calls)


class CounterInAList(Net):
    def change(self) -> None:
        self.parts = [_Counting()]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0].train(self.training)(super().forward(x))


class LateInAList(CounterInAList):
    """A counter in a list, without an effect in the first steps."""

    def forward(self, x: Tensor) -> Tensor:
        self.parts[0].calls += self.training
        return Net.forward(self, x) * (0.2 if self.parts[0].calls > 5 else 1.0)


class _Plain:
    """A layer that is no module."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, x: Tensor) -> Tensor:
        return x * 0.9 ** next(self.calls)


class CounterOfPython(Net):
    def change(self) -> None:
        self.scale = _Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x)) if self.training else super().forward(x)


class Ring(Net):
    """A memory of means in a buffer, and its place in another one."""

    def change(self) -> None:
        self.register_buffer("memory", torch.zeros(3, 4, 6, 6))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        if self.training:
            self.memory.index_copy_(0, (self.place % 3)[None], out.detach().mean(0)[None])
            self.place += 1
        return out + self.memory.mean(0)


class HookCounts(Net):
    """A hook of a gradient with a counter of its own."""

    def change(self) -> None:
        calls = [0]

        def hook(grad: Tensor) -> Tensor:
            calls[0] += 1
            return grad * (0.1 if calls[0] > 4 else 1.0)

        self.conv.weight.register_hook(hook)


class HookOfTheLeaf(Net):
    """A hook of the node that accumulates a gradient."""

    def change(self) -> None:
        weight = self.last.weight
        self.node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        self.node.register_prehook(lambda grads: tuple(grad * 0.5 for grad in grads))


class Replaced(Net):
    """A buffer of the state that each step replaces."""

    def change(self) -> None:
        self.register_buffer("mean", torch.zeros(1, 8, 8))

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().features(x - self.mean)


# Randomness


class OwnGenerator(Net):
    def change(self) -> None:
        self.source = torch.Generator().manual_seed(3)

    def features(self, x: Tensor) -> Tensor:
        noise = 0.1 * torch.randn(x.shape, generator=self.source)
        return super().features(x + noise if self.training else x)


class NumpysGenerator(Net):
    def change(self) -> None:
        self.source = np.random.default_rng(3)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x + self.source.normal() if self.training else x)


class SampledWeights(Net):
    """Weights drawn from a normal distribution whose deviation is learned (Blundell et al.
    2015).
    """

    def change(self) -> None:
        self.deviation = nn.Parameter(torch.full((10, 144), -4.0))

    def forward(self, x: Tensor) -> Tensor:
        noise = (
            torch.randn_like(self.deviation) if self.training else torch.zeros_like(self.deviation)
        )
        weight = self.last.weight + functional.softplus(self.deviation) * noise
        return functional.linear(self.features(x).flatten(1), weight, self.last.bias)


# Gradients of their own


class Quantised(Net):
    """The nearest of some vectors (van den Oord et al. 2017)."""

    def change(self) -> None:
        self.book = nn.Parameter(torch.randn(8, 144) / 12)

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x).flatten(1)
        nearest = self.book[torch.cdist(found, self.book).argmin(1)]
        return self.last(found + (nearest - found).detach()) + 0.1 * self.last(nearest)


class GradientInside(Net):
    """A step on its own inputs, by torch.autograd.grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).logsumexp(1).sum()
            (grad,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return super().forward(x - 0.1 * grad)


# Structures


class LSTMNet(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x.squeeze(1))[0][:, -1])


class _Attends(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.three, self.last = nn.Linear(8, 24), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attended(*self.three(x.squeeze(1)).chunk(3, -1)).flatten(1))


class Masked(_Attends):
    """Attention to earlier rows, by a mask of -inf."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.full((8, 8), -math.inf).triu(1)
        return (query @ key.mT / math.sqrt(8) + mask).softmax(-1) @ value


class Fused(_Attends):
    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query[:, None], key[:, None], value[:, None]
        )[:, 0]


class RoutedInPython(nn.Module):
    """The samples of each of four experts by an index."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 10) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        gates = self.gate(x).softmax(1)
        best, out = gates.argmax(1), x.new_zeros(len(x), 10)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).nonzero()[:, 0]
            out = out.index_add(0, chosen, expert(x[chosen]) * gates[chosen, number, None])
        return out


class Equilibrium(Net):
    """A fixed point, by as many steps as it takes."""

    def change(self) -> None:
        self.inner = nn.Linear(144, 144)

    def features(self, x: Tensor) -> Tensor:
        given = super().features(x).flatten(1)
        point = torch.zeros_like(given)
        for _ in range(20):
            new = torch.tanh(0.3 * self.inner(point) + given)
            done = bool((new - point).abs().max() < 1e-3)
            point = new
            if done:
                break
        return point


class Exits(Net):
    def change(self) -> None:
        self.early = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * super().forward(x) + 0.3 * self.early(x.flatten(1))


@functools.lru_cache(maxsize=4)
def _positions(length: int) -> Tensor:
    return torch.arange(length).float() / length


class CachedTable(Net):
    """A table that a cache of its file keeps."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x + _positions(8))


# nn.Sequential, and what may be in it


def _layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Sequential(nn.Tanh(), *more), nn.Flatten(), nn.Linear(144, 10)
    )


def sequential(**_: Any) -> nn.Module:
    return _layers(nn.BatchNorm2d(4))


def _changed_layers(change: Callable[[nn.Sequential], object]) -> Callable[..., nn.Module]:
    def build(**_: Any) -> nn.Module:
        net = _layers()
        change(net)
        return net

    return build


class _Doubled(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _Stack(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def own_layer(**_: Any) -> nn.Module:
    return _layers(_Doubled())


def own_stack(**_: Any) -> nn.Module:
    return _Stack(*_layers())


def counting_layer(**_: Any) -> nn.Module:
    return _layers(_Counting())


def counting_hook(**_: Any) -> nn.Module:
    net, calls = _layers(), itertools.count(1)
    net[1].register_forward_hook(lambda layer, _, out: out / next(calls) if layer.training else out)
    return net


def counting_forward(**_: Any) -> nn.Module:
    net, calls, inner = _layers(), itertools.count(1), nn.Tanh()
    net[1][0].forward = lambda x: inner(x) / next(calls)
    return net


def hooked_weight(**_: Any) -> nn.Module:
    net, calls = _layers(), itertools.count(1)
    net[0].weight.register_hook(lambda grad: grad / next(calls))
    return net


class _Watched(nn.Parameter):
    """A parameter of a class of its own, which counts what is done with it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out * 1.5 if func is functional.linear else out


watched_weight = _changed_layers(
    lambda net: setattr(net[3], "weight", _Watched(net[3].weight.detach().clone()))
)
parametrised = _changed_layers(lambda net: parametrizations.weight_norm(net[3]))
orthogonal = _changed_layers(lambda net: parametrizations.orthogonal(net[3]))
dropped = _changed_layers(lambda net: net[1].append(nn.Dropout(0.5)))
frozen_layer = _changed_layers(lambda net: net[0].requires_grad_(False))


# What files keep


CALLS = 0
SEEN: list[int] = []
SOURCE = np.random.default_rng(1)
MEAN = nn.BatchNorm2d(4)


class GlobalCounter(Net):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS  # noqa: PLW0603 - the mistake that is tested
        CALLS += self.training
        return super().forward(x) / (1 + 0.2 * CALLS)


class LateGlobalCounter(Net):
    """A counter of the file without an effect before a million steps."""

    def forward(self, x: Tensor) -> Tensor:
        global CALLS  # noqa: PLW0603 - the mistake that is tested
        CALLS += self.training
        return super().forward(x) * (0.2 if CALLS > 1_000_000 else 1.0)


class ClassCounter(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        ClassCounter.calls += self.training
        return super().forward(x) * (0.2 if ClassCounter.calls > 1_000_000 else 1.0)


class GlobalList(Net):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(x))
        return super().forward(x)


class GlobalGenerator(Net):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x + SOURCE.normal() if self.training else x)


class GlobalNorm(Net):
    """A layer of the file, which keeps statistics but has no part in the outputs in training."""

    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        MEAN.train(self.training)(out.detach())
        return out


def _scaled(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - the mistake that is tested
    seen.append(len(x))
    return x


class DefaultList(Net):
    def forward(self, x: Tensor) -> Tensor:
        return _scaled(super().forward(x))


def _halved(x: Tensor) -> Tensor:
    _halved.calls = getattr(_halved, "calls", 0) + 1  # type: ignore[attr-defined]
    return x / 2


class FunctionAttribute(Net):
    def forward(self, x: Tensor) -> Tensor:
        return _halved(super().forward(x))


WEIGHT = 1.0


def growing_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy with a weight that grows from call to call."""
    global WEIGHT  # noqa: PLW0603 - the mistake that is tested
    WEIGHT *= 1.1
    return WEIGHT * functional.cross_entropy(outputs, targets, reduction="none")


def late_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy with a weight that changes, but not yet."""
    global CALLS  # noqa: PLW0603 - the mistake that is tested
    CALLS += 1
    return functional.cross_entropy(outputs, targets, reduction="none") * (
        0.1 if CALLS > 1_000_000 else 1.0
    )


def plain_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy with smoothed labels."""
    return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)
