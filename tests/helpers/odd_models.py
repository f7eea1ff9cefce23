"""Models that PyTorch allows and a trainer may get wrong: each trains as in a plain loop, or is
refused in one line.

All are for gray images of 8 x 8 in ten classes. All are smooth: at the kink of a ReLU another order
of a sum gives another gradient. They are imported as a user's own code is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Module):
    """Two layers, of which models here change something."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.last = nn.Linear(144, 10)
        self.change()

    def change(self) -> None:
        """Change something of a new model."""

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x).flatten(1))


def changed(change: Callable[[Net], object]) -> Callable[..., nn.Module]:
    """Return a function that makes a changed `Net`."""

    def build(**_: Any) -> nn.Module:
        net = Net()
        change(net)
        return net

    return build


def _standardised(layer: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weight = layer.weight - layer.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return functional.conv2d(x, weight, layer.bias)

    return forward


class WeightStandardised(Net):
    def change(self) -> None:
        # a first layer that a CPU would compute as a matrix product
        self.wide = nn.Conv2d(1, 16, 3)
        self.wide.forward = _standardised(self.wide)
        self.whole = nn.Conv2d(16, 10, 6)  # a kernel as large as its input
        self.whole.forward = _standardised(self.whole)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x).flatten(1)) + self.whole(
            torch.tanh(self.wide(x))
        ).flatten(1)


class LinearOfItsOwn(Net):
    def change(self) -> None:
        layer = self.last
        layer.forward = lambda x: (
            functional.linear(x, layer.weight.round(decimals=2), layer.bias) + x.mean()
        )


class _WithNorm(Net):
    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.conv(x)))


class _Recurrent(Net):
    def change(self) -> None:
        del self.conv
        self.rnn, self.last = self.recurrent(), nn.Linear(64, 10)

    def features(self, x: Tensor) -> Tensor:
        return self.rnn(x.squeeze(1))[0]


class LSTMOfItsOwn(_Recurrent):
    def recurrent(self) -> nn.LSTM:
        rnn = nn.LSTM(8, 8, batch_first=True)
        rnn.forward = lambda x: nn.LSTM.forward(rnn, 2 * x)
        return rnn


class RunningMean(Net):
    """A buffer that is not in the state, and changes."""

    def change(self) -> None:
        self.register_buffer("mean", torch.zeros(1, 8, 8), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * x.mean(0).detach())
        return torch.tanh(self.conv(x - self.mean))


class Rebound(RunningMean):
    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0).detach()
        return torch.tanh(self.conv(x - self.mean))


class StepCounter(Net):
    def change(self) -> None:
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return super().forward(x) / (1 + 0.2 * self.steps)


class LateCounter(StepCounter):
    """A counter without an effect in the first steps."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return Net.forward(self, x) * (0.2 if self.steps > 5 else 1)


def closure(**_: Any) -> nn.Module:
    net, seen = Net(), [0]
    inner = net.forward

    def forward(x: Tensor) -> Tensor:
        seen[0] += net.training
        return inner(x) / seen[0] if seen[0] else inner(x)

    net.forward = forward
    return net


class Remembers(Net):
    """The last batch's mean output, as a list of tensors."""

    def change(self) -> None:
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        before = self.seen[-1] if self.seen else 0.0
        if self.training:
            self.seen.append(out.detach().mean())
        return out + before


def _halved(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


ScaledByHook = changed(
    lambda net: net.conv.weight.register_hook(
        lambda grad: grad.transpose(2, 3).contiguous().transpose(2, 3) * 0.5
    )
)
AfterAccumulation = changed(lambda net: net.last.weight.register_post_accumulate_grad_hook(_halved))
BackwardHook = changed(
    lambda net: net.last.register_full_backward_hook(
        lambda _, given, __: tuple(each * 0.5 for each in given)
    )
)


class HookInside(Net):
    def features(self, x: Tensor) -> Tensor:
        out = super().features(x)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 0.1)
        return out


FrozenPart = changed(lambda net: net.conv.requires_grad_(False))
AllFrozen = changed(lambda net: net.requires_grad_(False))


class NumpyNoise(Net):
    def features(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + float(np.random.normal())
        return super().features(x)


class PythonNoise(Net):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x * (random.random() if self.training else 1.0))


class TorchNoise(Net):
    def features(self, x: Tensor) -> Tensor:
        return functional.dropout(super().features(x), 0.5, self.training)


class NoiseInABranch(Net):
    """Random only where a value is met that no input of zeros has."""

    def features(self, x: Tensor) -> Tensor:
        if self.training and bool((x > 0).any()):
            x = x + 0.1 * torch.randn_like(x)
        return super().features(x)


class SystemNoise(Net):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * float(np.random.default_rng().normal())


class DroppedLSTM(_Recurrent):
    def recurrent(self) -> nn.LSTM:
        return nn.LSTM(8, 8, 2, batch_first=True, dropout=0.5)


class InPlaceDropout(Net):
    """A sum that sees what dropout in place leaves."""

    def change(self) -> None:
        self.drop = nn.Dropout(0.5, inplace=True)

    def features(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        return torch.tanh(self.drop(out) + out)


class Viewed(Net):
    """The usual view after a convolution, which needs its order in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x).view(-1, 144))


class Normed(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x.flatten(1)))))


class Squeezes(Net):
    """It fails with a batch of one sample, whose dimension it drops."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class MomentumNone(_WithNorm):
    def change(self) -> None:
        self.norm = nn.BatchNorm2d(4, momentum=None)


class CentresTheBatch(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class SparseEmbedding(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 3, sparse=True)
        self.last = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        places = (x * 4).long().clamp(0, 16)
        return self.last(self.table(places).flatten(1))


def scripted(**_: Any) -> nn.Module:
    module: nn.Module = torch.jit.script(Normed())
    return module


class ExtraState(Net):
    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"steps": 3}


class ExtraTensor(Net):
    def get_extra_state(self) -> Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: Any) -> None:
        assert state.sum() == 3


class Tied(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Scale(Net):
    """A parameter without dimensions, and one without elements."""

    def change(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.empty.sum()


def with_buffer(value: Tensor, *, persistent: bool = True) -> Callable[..., nn.Module]:
    return changed(lambda net: net.register_buffer("mask", value.clone(), persistent=persistent))


bool_buffer = with_buffer(torch.ones(3, dtype=torch.bool))
bool_table = with_buffer(torch.ones(3, dtype=torch.bool), persistent=False)
half_buffer = with_buffer(torch.ones(3, dtype=torch.float16))
brain_buffer = with_buffer(torch.arange(3, dtype=torch.bfloat16))
double_buffer = with_buffer(torch.ones(3, dtype=torch.float64))
short_counter = with_buffer(torch.ones(3, dtype=torch.int32))
counter = with_buffer(torch.ones(3, dtype=torch.int64))
HalfParameter = changed(
    lambda net: net.register_parameter("extra", nn.Parameter(torch.zeros(3, dtype=torch.float16)))
)
Unused = changed(lambda net: net.add_module("spare", nn.Linear(3, 3)))


class Lazy(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.first, self.last = nn.LazyLinear(16), nn.LazyLinear(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1))))


class FreezesAfterSteps(Net):
    """It stops training a layer after some steps."""

    def change(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.conv.requires_grad_(bool(self.steps < 3))
        return super().forward(x)


class KeepsEval(_WithNorm):
    """Its norm stays in eval mode whatever is asked for."""

    def change(self) -> None:
        self.norm = nn.BatchNorm2d(4)

    def train(self, mode: bool = True) -> KeepsEval:
        super().train(mode)
        self.norm.eval()
        return self


class Volume(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 4, (1, 3, 3))
        self.last = nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.conv(x[:, None])).flatten(1))


class FixedAttribute(Net):
    """A constant matrix that no conversion of the module reaches."""

    def change(self) -> None:
        self.fixed = [torch.eye(10) / 2]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.fixed[0]


class Once(Net):
    """A module that is made once for all."""


_ONCE = Once()


def shared_module(**_: Any) -> nn.Module:
    return _ONCE


_BACKBONE = nn.Conv2d(1, 4, 3)


def shared_part(**_: Any) -> nn.Module:
    net = Net()
    net.conv = _BACKBONE
    return net


class Tuple(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class BadBackward(Net):
    """An operation in place that only the backward pass refuses."""

    def features(self, x: Tensor) -> Tensor:
        out = torch.exp(self.conv(x))
        out += 1
        return out


class TrainOnlyFault(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.absent(x)
        return super().forward(x)


class NoGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


def _without_a_bias(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    del state["last.bias"]


HiddenParameter = changed(lambda net: net._register_state_dict_hook(_without_a_bias))
