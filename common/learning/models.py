"""The models by name, and how a module's state goes into a row and back.

Images are float32 [B, C, H, W]; every model returns logits, float32 [B, 10]. No model has a random layer
(dropout): torch's layers draw from the process-global generator, which concurrent trainings would share.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import InvalidExperiment
from common.layout import ModelLayout, Row, Section
from common.randomness import Purpose, torch_seed


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x_BCHW)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(x_BCHW))


def _lenet5() -> nn.Module:
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(1, 6, 5, padding=2)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(6, 16, 5)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("conv3", nn.Conv2d(16, 120, 5)),
        ("relu3", nn.ReLU()),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(120, 84)),
        ("relu4", nn.ReLU()),
        ("fc2", nn.Linear(84, 10)),
    ]
    return nn.Sequential(OrderedDict(layers))


def _mlp_digits() -> nn.Module:
    layers: list[tuple[str, nn.Module]] = [
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(64, 32)),
        ("relu1", nn.ReLU()),
        ("fc2", nn.Linear(32, 10)),
    ]
    return nn.Sequential(OrderedDict(layers))


def _cnn_digits() -> nn.Module:
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(1, 16, 3, padding=1)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(16, 32, 3, padding=1)),
        ("relu2", nn.ReLU()),
        ("pool", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(512, 10)),
    ]
    return nn.Sequential(OrderedDict(layers))


def _resnet18_cifar() -> nn.Module:
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(3, 64, 3, padding=1, bias=False)),
        ("bn1", nn.BatchNorm2d(64)),
        ("relu", nn.ReLU()),
    ]
    inputs = 64
    for stage, (width, stride) in enumerate(((64, 1), (128, 2), (256, 2), (512, 2)), start=1):
        blocks = nn.Sequential(_BasicBlock(inputs, width, stride), _BasicBlock(width, width, 1))
        layers.append((f"stage{stage}", blocks))
        inputs = width
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(512, 10))]
    return nn.Sequential(OrderedDict(layers))


@dataclass(frozen=True, slots=True)
class _Kind:
    construct: Callable[[], nn.Module]
    image_shape: tuple[int, int, int]


_KINDS = MappingProxyType(
    {
        "lenet5": _Kind(_lenet5, (1, 28, 28)),
        "mlp_digits": _Kind(_mlp_digits, (1, 8, 8)),
        "cnn_digits": _Kind(_cnn_digits, (1, 8, 8)),
        "resnet18_cifar": _Kind(_resnet18_cifar, (3, 32, 32)),
    }
)


def build(name: str, seed: int) -> nn.Module:
    """Return the model on the CPU with its initial weights, which depend on the seed alone.

    The module is made without storage and then filled from a generator of its own, so that neither the
    process-global generator nor another thread has a part in it. Raises InvalidExperiment.
    """
    kind = _kind(name)
    with torch.device("meta"):
        module = kind.construct()
    module.to_empty(device="cpu")
    source = torch.Generator().manual_seed(torch_seed(seed, Purpose.INIT))
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            _draw(layer, source)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()  # ones and zeros: nothing random
    return module


def check_images(name: str, image_shape: Sequence[int]) -> None:
    """Check that the model takes images [C, H, W] of this shape. Raises InvalidExperiment."""
    wanted = _kind(name).image_shape
    if tuple(image_shape) != wanted:
        fitting = [other for other, kind in _KINDS.items() if kind.image_shape == tuple(image_shape)]
        raise InvalidExperiment(
            "model.name",
            name,
            f"takes images of {list(wanted)}, the data set has {list(image_shape)}",
            f"Use {' or '.join(fitting)}, or another data.dataset." if fitting else "Use another data.dataset.",
        )


def layout_of(module: nn.Module) -> ModelLayout:
    """Return where each tensor of the module's state lies in a row.

    Parameters are the trainable columns; buffers are float32 columns or int64 counters. Raises
    InvalidExperiment on any other dtype.
    """
    parameters = {name for name, _ in module.named_parameters()}
    tensors: list[tuple[str, Sequence[int], Section]] = []
    for name, tensor in _state(module).items():
        if tensor.dtype == torch.float32:
            section = Section.PARAMETER if name in parameters else Section.BUFFER
        elif tensor.dtype == torch.int64 and name not in parameters:
            section = Section.COUNTER
        else:
            raise InvalidExperiment(
                "model.name", name, f"this tensor is {tensor.dtype}", "Use float32, and int64 for counters."
            )
        tensors.append((name, tuple(tensor.shape), section))
    return ModelLayout.build(tensors)


@torch.no_grad()
def read_row(module: nn.Module, layout: ModelLayout, row: Row) -> None:
    """Copy a row, uint8 [row_bytes], into the module's tensors, on whatever device they are."""
    state = _state(module)
    for name, view in layout.views(row).items():
        # The copy is writable and aligned, as torch wants it; a received row may be neither.
        state[name].copy_(torch.from_numpy(view.copy()))


@torch.no_grad()
def write_row(module: nn.Module, layout: ModelLayout, row: Row) -> None:
    """Copy the module's tensors into a row, uint8 [row_bytes]."""
    state = _state(module)
    for name, view in layout.views(row).items():
        view[...] = state[name].cpu().numpy()


def _kind(name: str) -> _Kind:
    if name not in _KINDS:
        raise InvalidExperiment("model.name", name, "no such model", f"Use one of {', '.join(_KINDS)}.")
    return _KINDS[name]


def _state(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.state_dict())  # detached tensors that share the module's storage


def _draw(layer: nn.Conv2d | nn.Linear, source: torch.Generator) -> None:
    """Draw as PyTorch does by default: weights and biases uniform in +-1/sqrt(fan_in)."""
    bound = 1 / math.sqrt(layer.weight[0].numel())
    nn.init.uniform_(layer.weight, -bound, bound, generator=source)
    if layer.bias is not None:
        nn.init.uniform_(layer.bias, -bound, bound, generator=source)
