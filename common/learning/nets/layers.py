"""Shared parts of the families: named layers, dropout with its own generator, and weight initialisation."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Enter = Callable[[nn.Module, object], None]
Leave = Callable[[nn.Module, object, object], None]


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


def own_dropout(module: nn.Module) -> None:
    """Replace torch's dropout layers of a module by Dropout."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))
            elif type(child) is nn.Dropout1d or type(child) is nn.Dropout2d or type(child) is nn.Dropout3d:
                setattr(parent, name, Dropout(child.p, whole=True))


def draws_globally(module: nn.Module, samples: Tensor) -> str | None:
    """Return the name of the innermost layer that uses torch's global generator in training, if there is one.

    The module is run on the samples in training mode; its state, its mode and the generator are restored.
    """
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    names = {layer: name for name, layer in module.named_modules()}
    before: dict[nn.Module, Tensor] = {}
    found: list[str] = []

    def enter(layer: nn.Module, _: object) -> None:
        before[layer] = torch.get_rng_state()

    def leave(layer: nn.Module, _: object, __: object) -> None:
        if not torch.equal(before[layer], torch.get_rng_state()):
            found.append(f"{names[layer] or 'the model'} ({type(layer).__name__})")

    hooks = [hook for layer in names for hook in _hooked(layer, enter, leave)]
    mode = module.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module.train()(samples)
    finally:
        for hook in hooks:
            hook.remove()
        module.train(mode)
        module.load_state_dict(state)
    return found[0] if found else None


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


def _hooked(layer: nn.Module, enter: Enter, leave: Leave) -> tuple[RemovableHandle, RemovableHandle]:
    return layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)


def _uniform(tensor: Tensor, bound: float, source: torch.Generator) -> None:
    nn.init.uniform_(tensor, -bound, bound, generator=source)
