"""Shared parts of the families: named layers, dropout with its own generator, and weight initialisation."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn


def sequence(layers: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """Return the layers one after another, under their names."""
    return nn.Sequential(OrderedDict(layers))


class Dropout(nn.Module):
    """Dropout with its own generator, `source`, set for each training; all threads share that of torch's layer.

    With `whole`, channels [B, C, ...] are dropped as one, as in torch's Dropout1d, 2d and 3d.
    """

    def __init__(self, p: float = 0.5, *, whole: bool = False) -> None:
        super().__init__()
        self.p = p
        self.whole = whole
        self.source: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return x * self.mask(x) / (1 - self.p)

    def mask(self, x: Tensor) -> Tensor:
        """Draw which of the values to keep: 1, else 0. The result does not depend on the memory format."""
        return x.new_empty(self.mask_shape(x)).bernoulli_(1 - self.p, generator=self.source)

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of a batch's mask."""
        return (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.whole else tuple(x.shape)


_WHOLE: Final[Mapping[type[nn.Module], bool]] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is as its class: its user has set no `forward` of its own, and no hooks."""
    own = vars(layer)
    return "forward" not in own and not any(value for name, value in own.items() if name.endswith("_hooks"))


def own_dropout(module: nn.Module) -> None:
    """Replace dropout layers of a module that are torch's as they are by Dropout, which vmapped training can batch."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) in _WHOLE and is_plain(child) and not child.inplace:
                setattr(parent, name, Dropout(vars(child)["p"], whole=_WHOLE[type(child)]))


def reseed(module: nn.Module, seed: int, device: torch.device) -> None:
    """Give all dropout layers of the module one new generator on the device that computes."""
    drops = [layer for layer in module.modules() if isinstance(layer, Dropout)]
    if drops:
        source = torch.Generator(device).manual_seed(seed)
        for layer in drops:
            layer.source = source


def draw_default(module: nn.Module, source: torch.Generator) -> None:
    """Initialise the weights as PyTorch does by default, layer by layer.

    Convolutions and linear layers: weights and biases uniform in +-1/sqrt(fan_in). LSTM: all in +-1/sqrt(hidden).
    Embeddings: standard normal. Batch norm: ones and zeros.
    """
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            _uniform(layer.weight, 1 / math.sqrt(layer.weight[0].numel()), source)
            if layer.bias is not None:
                _uniform(layer.bias, 1 / math.sqrt(layer.weight[0].numel()), source)
        elif isinstance(layer, nn.LSTM):
            for weight in layer.parameters():
                _uniform(weight, 1 / math.sqrt(layer.hidden_size), source)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, generator=source)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()


def draw_by_fan_out(module: nn.Module, source: torch.Generator) -> None:
    """Initialise convolutions normal with variance 2 / (k * k * outputs) (He et al. 2015), others by default."""
    draw_default(module, source)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            outputs = layer.weight.shape[0] * layer.weight[0, 0].numel()
            nn.init.normal_(layer.weight, 0.0, math.sqrt(2 / outputs), generator=source)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _uniform(tensor: Tensor, bound: float, source: torch.Generator) -> None:
    nn.init.uniform_(tensor, -bound, bound, generator=source)
