"""More models that PyTorch allows: with state of every kind, with values read by numpy, and nets of
recent papers.

All are for gray images of 8 x 8 in ten classes, and smooth where they can be (see `odd_models`).
They are imported as a user's own code is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.helpers.odd_models import Net, changed


class _Function(torch.autograd.Function):
    """The base of functions with gradients of their own."""


# Values that change beside PyTorch's operations


class ClampsData(Net):
    """Weights that get new data where they are too large, which they are after some steps."""

    def features(self, x: Tensor) -> Tensor:
        self.conv.weight.data = self.conv.weight.data.clamp(-0.34, 0.34)
        return super().features(x)


class ClampsInPlace(Net):
    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.conv.weight.clamp_(-0.34, 0.34)
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


class UnitNorm(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.div_(self.last.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class Renormed(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.last.weight.data = torch.renorm(self.last.weight.data, 2, 0, 0.6)
        return super().forward(x)


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


class _ScaledByNumpy(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        largest = np.abs(weight.numpy()).max()
        return grad * (0.2 if 0.085 < largest < 50 else 1.0), None


class BandInBackward(Net):
    """Gradients that depend on a weight, which numpy reads, and which is between two values after
    some steps.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _ScaledByNumpy.apply(super().forward(x), self.last.bias)


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


class ListInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (0.5 if max(out.detach().flatten().tolist()) > 1 else 1.0)


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


class RevivedUnits(Net):
    """Units that are drawn again where numpy finds them small."""

    def features(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.detach().numpy()
        for place in np.flatnonzero(np.abs(weight).max((1, 2, 3)) < 0.2):
            weight[place] = np.random.normal(size=weight[place].shape)
        return super().features(x)


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


class CounterInADict(Net):
    def change(self) -> None:
        self.parts = {"scale": _Counting()}

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["scale"].train(self.training)(super().forward(x))


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


class Deque(Net):
    def change(self) -> None:
        self.seen: deque[Tensor] = deque(maxlen=3)

    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        if self.training:
            self.seen.append(out.detach().mean(0))
        return out + torch.stack(list(self.seen)).mean(0) if self.seen else out


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


class Annealed(Net):
    """A temperature by a counter in a buffer."""

    def change(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return super().forward(x) * (1 + 1 / (1 + self.steps))


class AnnealedByItem(Annealed):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return Net.forward(self, x) * (1 + 1 / (1 + int(self.steps)))


class Lookahead(Net):
    """Slow weights in a list, to which those of training return every third step."""

    def change(self) -> None:
        self.slow: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                if self.slow and self.calls % 3 == 0:
                    self.last.weight.lerp_(self.slow[0], 0.5)
                self.slow = [self.last.weight.detach().clone()]
            self.calls += 1
        return super().forward(x)


class Teacher(Net):
    """The mean of its weights over the steps, in a list, and its outputs in its own."""

    def change(self) -> None:
        self.teacher = [nn.Linear(144, 10).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x).flatten(1)
        if self.training:
            with torch.no_grad():
                for mean, weight in zip(
                    self.teacher[0].parameters(), self.last.parameters(), strict=True
                ):
                    mean.lerp_(weight, 0.1)
        return self.last(found) + 0.1 * self.teacher[0](found)


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


class OutputHookByNumpy(Net):
    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * float(np.abs(grad.numpy()).max() < 1))
        return out


class Replaced(Net):
    """A buffer of the state that each step replaces."""

    def change(self) -> None:
        self.register_buffer("mean", torch.zeros(1, 8, 8))

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().features(x - self.mean)


# Randomness


class Bernoulli(Net):
    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        return out * torch.bernoulli(torch.full_like(out, 0.5)) if self.training else out


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


class StochasticDepth(Net):
    def change(self) -> None:
        self.block = nn.Conv2d(4, 4, 3, padding=1)

    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        keep = float(torch.rand(()) < 0.5) if self.training else 0.5
        return out + keep * torch.tanh(self.block(out))


class PermutesTheBatch(Net):
    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        return 0.8 * out + 0.2 * out[torch.randperm(len(out))] if self.training else out


class Rotated(Net):
    """Quarter turns that numpy draws."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(
            torch.rot90(x, int(np.random.randint(4)), (2, 3)) if self.training else x
        )


# Gradients of their own


class _Reversed(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.1 * grad


class ReversedGradient(Net):
    def change(self) -> None:
        self.other = nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x).flatten(1)
        return self.last(found) + self.other(_Reversed.apply(found))


class StraightThrough(Net):
    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        return out + (out.round(decimals=1) - out).detach()


class BinaryWeights(Net):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight
        binary = weight + (weight.sign() * weight.abs().mean() - weight).detach()
        return functional.linear(self.features(x).flatten(1), binary, self.last.bias)


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


class FunctionalGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: torch.tanh(y).sum())(x)
        return super().forward(x + 0.1 * slope)


class VmapInside(Net):
    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(
            torch.func.vmap(lambda one: functional.conv2d(one[None], self.conv.weight)[0])(x)
        )


class SavedOnTheWay(Net):
    def features(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return super().features(x)


# Structures


class LSTMNet(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x.squeeze(1))[0][:, -1])


class GRUCells(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(8, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 12)
        for row in x.squeeze(1).unbind(1):
            state = self.cell(row, state)
        return self.last(state)


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


class MaskedFill(_Attends):
    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        later = torch.ones(8, 8, dtype=torch.bool).triu(1)
        return (query @ key.mT / math.sqrt(8)).masked_fill(later, float("-inf")).softmax(-1) @ value


class Fused(_Attends):
    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query[:, None], key[:, None], value[:, None]
        )[:, 0]


class Heads(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.squeeze(1)
        return self.last(self.attention(rows, rows, rows)[0].flatten(1))


class Encoder(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, activation="gelu", batch_first=True
        )
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.squeeze(1)).flatten(1))


class Experts(nn.Module):
    """Two of four experts for each sample, by their gates."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(64, 4),
            nn.ModuleList(nn.Linear(64, 10) for _ in range(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        best, places = self.gate(x).topk(2, 1)
        each = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = each.gather(1, places[:, :, None].expand(-1, -1, 10))
        return (best.softmax(1)[:, :, None] * chosen).sum(1)


class RoutedInPython(Experts):
    """The samples of each expert by an index."""

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


class Euler(Net):
    def change(self) -> None:
        self.slope = nn.Linear(144, 144)

    def features(self, x: Tensor) -> Tensor:
        state = super().features(x).flatten(1)
        for _ in range(4):
            state = state + 0.25 * torch.tanh(self.slope(state))
        return state


class Fourier(nn.Module):
    """Products in the frequencies, with complex weights in two real parts."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.filter, self.last = nn.Parameter(torch.randn(8, 5, 2) / 4), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft2(x[:, 0]) * torch.view_as_complex(self.filter)
        return self.last(torch.tanh(torch.fft.irfft2(found, s=(8, 8))).flatten(1))


class Warped(Net):
    """A spatial transformer (Jaderberg et al. 2015)."""

    def change(self) -> None:
        self.place = nn.Linear(64, 6)
        nn.init.zeros_(self.place.weight)
        self.place.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0]) * 0.83

    def features(self, x: Tensor) -> Tensor:
        grid = functional.affine_grid(
            self.place(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False
        )
        return super().features(functional.grid_sample(x, grid, align_corners=False))


class Squeezed(Net):
    """Channels weighted by their means (Hu et al. 2018)."""

    def change(self) -> None:
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        return (
            out * torch.sigmoid(self.up(torch.tanh(self.down(out.mean((2, 3))))))[:, :, None, None]
        )


class Generated(Net):
    """Weights that another net generates (Ha et al. 2017)."""

    def change(self) -> None:
        self.code, self.make = nn.Parameter(torch.randn(10, 3)), nn.Linear(3, 144)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(
            self.features(x).flatten(1), self.make(self.code) / 4, self.last.bias
        )


class Adapted(Net):
    """Low-rank terms beside a frozen layer (Hu et al. 2022)."""

    def change(self) -> None:
        self.last.requires_grad_(False)
        self.down, self.up = nn.Linear(144, 2, bias=False), nn.Linear(2, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x).flatten(1)
        return self.last(found) + self.up(self.down(found))


class Distances(Net):
    """Radial functions of the distances to centres."""

    def change(self) -> None:
        self.centres = nn.Parameter(torch.randn(10, 144) / 12)

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x).flatten(1)
        squares = (found[:, None] - self.centres).square().sum(2)
        return -squares / 10 + 0.1 * self.last(found)


class Scanned(Net):
    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(super().features(x).cumsum(2).cumsum(3) / 10)


class Sorted(Net):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x).flatten(2).sort(2).values.view(len(x), 4, 6, 6)


class Bilinear(Net):
    def change(self) -> None:
        self.pair = nn.Parameter(torch.randn(10, 4, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        return (
            self.last(out.flatten(1)) + torch.einsum("bihw,oij,bjhw->bo", out, self.pair, out) / 36
        )


class Folded(Net):
    def features(self, x: Tensor) -> Tensor:
        columns = functional.unfold(x, 3)
        return torch.tanh(self.conv.weight.flatten(1) @ columns + self.conv.bias[:, None]).view(
            len(x), 4, 6, 6
        )


class Norms(Net):
    def change(self) -> None:
        self.groups, self.layer = nn.GroupNorm(2, 4), nn.LayerNorm(144)
        self.instances = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

    def features(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.instances(self.groups(self.conv(x)))).flatten(1))


class PowerIteration(Net):
    """A spectral norm of its own, with its vector in a buffer."""

    def change(self) -> None:
        self.register_buffer("vector", functional.normalize(torch.randn(10), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight
        if self.training:
            with torch.no_grad():
                right = functional.normalize(weight.mT @ self.vector, dim=0)
                self.vector.copy_(functional.normalize(weight @ right, dim=0))
        size = (
            self.vector.detach().clone()
            @ weight
            @ functional.normalize(weight.detach().mT @ self.vector, dim=0)
        )
        return functional.linear(self.features(x).flatten(1), weight / size, self.last.bias)


class Exits(Net):
    def change(self) -> None:
        self.early = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * super().forward(x) + 0.3 * self.early(x.flatten(1))


class Capsules(nn.Module):
    """Routing by agreement (Sabour et al. 2017)."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 10, 8, 4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bif,iofc->bioc", x[:, 0], self.weight)
        agreed = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            out = (agreed.softmax(2)[..., None] * votes).sum(1)
            size = out.square().sum(-1, keepdim=True)
            out = out * size / (1 + size) / (size + 1e-6).sqrt()
            agreed = agreed + (votes * out[:, None]).sum(-1)
        return 3 * out.norm(dim=-1)


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
tied_layers = changed(lambda net: setattr(net, "last", _tied()))


def _tied() -> nn.Sequential:
    first, second = nn.Linear(144, 144), nn.Linear(144, 144)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(144, 10))


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
