"""The architectures: each function creates a module for given inputs with uninitialised weights;
then their parts.

Small nets are convolutions and pools, then linear layers, no batch norm. Residual nets are for
small images (He et al. 2016), beside the pre-activation net of FedCross's and FedMR's code. VGG
nets (Simonyan and Zisserman 2015) are as in torchvision and in the same code. Recurrent nets are
for LEAF's text tasks: token rows, int64 [B, L], to logits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from fedstrata.common.learning.inputs import Inputs

_WHOLE: Final[Mapping[type[nn.Module], bool]] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}

# of VGG-16: the widths of its convolutions, and of its two hidden linear layers
_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_VGG_HIDDEN = 4096


def linear_digits(inputs: Inputs) -> nn.Module:
    """Return one linear layer: softmax regression, whose loss is convex."""
    return sequence(flatten=nn.Flatten(), fc=nn.Linear(64, inputs.classes))


def mlp_digits(inputs: Inputs) -> nn.Module:
    """Return a net with one hidden layer of 32."""
    return sequence(
        flatten=nn.Flatten(),
        fc1=nn.Linear(64, 32),
        relu1=nn.ReLU(),
        fc2=nn.Linear(32, inputs.classes),
    )


def cnn_digits(inputs: Inputs) -> nn.Module:
    """Return a net of two convolutions and a linear layer."""
    return sequence(
        conv1=nn.Conv2d(1, 16, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc=nn.Linear(512, inputs.classes),
    )


def lenet5(inputs: Inputs) -> nn.Module:
    """Return LeNet-5 as in Tempo, with ReLU."""
    return sequence(
        conv1=nn.Conv2d(1, 6, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(16, 120, 5),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc2=nn.Linear(84, inputs.classes),
    )


def lenet_cifar(inputs: Inputs) -> nn.Module:
    """Return the net that FedCross's and FedMR's code uses as "CNN" on CIFAR."""
    return sequence(
        **_two_convolutions(nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)),
        fc1=nn.Linear(400, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, inputs.classes),
    )


def cnn_femnist(inputs: Inputs) -> nn.Module:
    """Return the net that FedCross's and FedMR's code uses as "CNN" on FEMNIST."""
    return _two_and_two(inputs, widths=(16, 32, 256), padding=0)


def cnn_motions(inputs: Inputs) -> nn.Module:
    """Return a net that convolves along time: windows of six channels, [6, 1, 128]."""
    return sequence(
        **_two_convolutions(nn.Conv2d(6, 32, (1, 9)), nn.Conv2d(32, 64, (1, 9)), pool=(1, 4)),
        fc1=nn.Linear(64 * 5, 128),
        relu3=nn.ReLU(),
        fc2=nn.Linear(128, inputs.classes),
    )


def cnn_fedavg(inputs: Inputs) -> nn.Module:
    """Return FedCDA's "simple CNN": FedAvg's without padding."""
    return _two_and_two(inputs, widths=(32, 64, 512), padding=0)


def cnn_fedavg_padded(inputs: Inputs) -> nn.Module:
    """Return FedAvg's CNN (McMahan et al. 2017)."""
    return _two_and_two(inputs, widths=(32, 64, 512), padding=2)


def _two_and_two(inputs: Inputs, *, widths: tuple[int, int, int], padding: int) -> nn.Module:
    channels, *sides = inputs.shape
    for _ in range(2):
        sides = [(side - 4 + 2 * padding) // 2 for side in sides]
    first, second, hidden = widths
    convolutions = (
        nn.Conv2d(channels, first, 5, padding=padding),
        nn.Conv2d(first, second, 5, padding=padding),
    )
    return sequence(
        **_two_convolutions(*convolutions),
        fc1=nn.Linear(second * sides[0] * sides[1], hidden),
        relu3=nn.ReLU(),
        fc2=nn.Linear(hidden, inputs.classes),
    )


def _two_convolutions(
    first: nn.Module, second: nn.Module, *, pool: int | tuple[int, int] = 2
) -> dict[str, nn.Module]:
    """Return two convolutions, each with a ReLU and a max pool, by name."""
    layers = {"conv1": first, "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(pool)}
    return {
        **layers,
        "conv2": second,
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(pool),
        "flatten": nn.Flatten(),
    }


def resnet18_cifar(inputs: Inputs) -> nn.Module:
    """Return ResNet-18 with a 3x3 stem of stride 1 and no max pool (Plato's, for Tempo)."""
    return _resnet(inputs, widths=(64, 128, 256, 512), blocks=2, pad=False)


def resnet20(inputs: Inputs) -> nn.Module:
    """Return ResNet-20 with He's shortcut A: strided, missing channels zero, no parameter."""
    return _resnet(inputs, widths=(16, 32, 64), blocks=3, pad=True)


def resnet20_b(inputs: Inputs) -> nn.Module:
    """Return ResNet-20 with He's shortcut B: 1x1 convolution and batch norm where the shape
    changes.
    """
    return _resnet(inputs, widths=(16, 32, 64), blocks=3, pad=False)


def resnet20_preact(inputs: Inputs) -> nn.Module:
    """Return the "ResNet-20" of FedCross's and FedMR's code: six pre-activation bottlenecks.

    As in that code, images of one channel pass a max pool of stride 1 after the first convolution.
    """
    return _PreActivation(inputs)


def _resnet(inputs: Inputs, *, widths: tuple[int, ...], blocks: int, pad: bool) -> nn.Module:
    before = widths[0]
    stages: dict[str, nn.Module] = {}
    for stage, width in enumerate(widths, start=1):
        stride = 1 if stage == 1 else 2
        layers = [_Block(before, width, stride, pad=pad)]
        layers += [_Block(width, width, 1, pad=pad) for _ in range(1, blocks)]
        stages[f"stage{stage}"] = nn.Sequential(*layers)
        before = width
    return sequence(
        conv1=nn.Conv2d(inputs.shape[0], widths[0], 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(widths[0]),
        relu=nn.ReLU(),
        **stages,
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(before, inputs.classes),
    )


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, *, pad: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or inputs != outputs:
            if pad:
                self.shortcut = _Padded(stride, outputs - inputs)
            else:
                self.shortcut = _projection(inputs, outputs, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x_BCHW)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(x_BCHW))


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class _Padded(nn.Module):
    def __init__(self, stride: int, more: int) -> None:
        super().__init__()
        self.stride = stride
        self.more = more

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = x_BCHW[:, :, :: self.stride, :: self.stride]
        return functional.pad(x_BCHW, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))


class _PreActivation(nn.Module):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs.shape[0], 16, 3, padding=1, bias=False)
        self.pool1 = nn.MaxPool2d(3, stride=1, padding=1) if inputs.shape[0] == 1 else nn.Identity()
        self.layer1 = nn.Sequential(_Bottleneck(16, 16, 1), _Bottleneck(64, 16, 1))
        self.layer2 = nn.Sequential(_Bottleneck(64, 32, 2), _Bottleneck(128, 32, 1))
        self.layer3 = nn.Sequential(_Bottleneck(128, 64, 2), _Bottleneck(256, 64, 1))
        self.bn = nn.BatchNorm2d(256)  # never called by the authors' code, but part of its state
        self.pool = nn.AdaptiveAvgPool2d(1)  # the authors' is of 8 on 8x8 and of 7 on 7x7
        self.fc = nn.Linear(256, inputs.classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = self.layer3(self.layer2(self.layer1(self.pool1(self.conv1(x_BCHW)))))
        logits: Tensor = self.fc(self.pool(inner).flatten(1))
        return logits


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = self.conv1(functional.relu(self.bn1(x_BCHW)))
        inner = self.conv2(functional.relu(self.bn2(inner)))
        inner = self.conv3(functional.relu(self.bn3(inner)))
        summed: Tensor = inner + self.shortcut(x_BCHW)
        return summed


def vgg16(inputs: Inputs) -> nn.Module:
    """Return torchvision's VGG-16 without batch norm: the same names, shapes and initial
    distribution.
    """
    classifier = nn.Sequential(*_hidden_layers(25_088), nn.Linear(_VGG_HIDDEN, inputs.classes))
    features = _features(inputs.shape[0], batch_norm=False)
    return sequence(
        features=features,
        avgpool=nn.AdaptiveAvgPool2d(7),
        flatten=nn.Flatten(),
        classifier=classifier,
    )


def vgg16_bn(inputs: Inputs) -> nn.Module:
    """Return VGG-16 with batch norm for images of 32x32, as in FedCross's and FedMR's code."""
    features = _features(inputs.shape[0], batch_norm=True)
    classifier = nn.Sequential(*_hidden_layers(512))
    fc = nn.Linear(_VGG_HIDDEN, inputs.classes)
    return sequence(features=features, flatten=nn.Flatten(), classifier=classifier, fc=fc)


def _hidden_layers(features: int) -> list[nn.Module]:
    return [
        nn.Linear(features, _VGG_HIDDEN),
        nn.ReLU(),
        Dropout(),
        nn.Linear(_VGG_HIDDEN, _VGG_HIDDEN),
        nn.ReLU(),
        Dropout(),
    ]


def vgg_femnist(inputs: Inputs) -> nn.Module:
    """Return the "VGG-16" of the same code for images of one channel: five convolutions, two linear
    layers in a row.
    """
    features = nn.Sequential(
        nn.Conv2d(inputs.shape[0], 64, 1, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 512, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(25_088, 256),
    )
    return sequence(features=features, fc=nn.Linear(256, inputs.classes))


def _features(channels: int, *, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for stage in _STAGES:
        for width in stage:
            norm = [nn.BatchNorm2d(width)] if batch_norm else []
            layers += [nn.Conv2d(channels, width, 3, padding=1), *norm, nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def char_lstm(inputs: Inputs) -> nn.Module:
    """Return a model of the next character, as for Shakespeare: embedding of 8, two layers of
    256.
    """
    return _Recurrent(inputs, width=8, hidden=256, narrow=None)


def sent_lstm(inputs: Inputs) -> nn.Module:
    """Return LEAF's sentiment model for Sent140: embedding of 100, two layers of 100, 128 without
    activation.
    """
    return _Recurrent(inputs, width=100, hidden=100, narrow=128)


class _Recurrent(nn.Module):
    def __init__(self, inputs: Inputs, *, width: int, hidden: int, narrow: int | None) -> None:
        super().__init__()
        # nn.Embedding would initialise it at once, which without storage imports torch's compiler:
        # 2.4 s, 115 MB.
        empty = torch.empty(inputs.tokens, width)
        self.embedding = nn.Embedding.from_pretrained(empty, freeze=False)  # type: ignore[no-untyped-call]
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.between = nn.Identity() if narrow is None else nn.Linear(hidden, narrow)
        self.fc = nn.Linear(narrow or hidden, inputs.classes)

    def forward(self, x_BL: Tensor) -> Tensor:
        steps_BLH, _ = self.lstm(self.embedding(x_BL))
        logits: Tensor = self.fc(self.between(steps_BLH[:, -1]))
        return logits


def sequence(**layers: nn.Module) -> nn.Sequential:
    """Return the layers one after another, under their names."""
    return nn.Sequential(OrderedDict(layers))


class Dropout(nn.Module):
    """Dropout with its own generator, `source`, set for each training; all threads share that of
    torch's layer.

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
        """Draw which of the values to keep: 1, else 0. The result does not depend on the memory
        format.
        """
        return x.new_empty(self.mask_shape(x)).bernoulli_(1 - self.p, generator=self.source)

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of a batch's mask."""
        if self.whole:
            return (*x.shape[:2], *(1 for _ in x.shape[2:]))
        return tuple(x.shape)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is as its class: its user has set no `forward` of its own, and no
    hooks.
    """
    own = vars(layer)
    return "forward" not in own and not any(
        value for name, value in own.items() if name.endswith("_hooks")
    )


def layers_in(module: nn.Module) -> object:
    """Return what the layers are of a module that is nothing but PyTorch's own in nn.Sequential, to
    be compared.

    None for any other: one with a class, a hook, a parametrisation, a function or a type of tensor
    of its user's.
    """
    found: list[object] = []
    for name, layer in module.named_modules(remove_duplicate=False):
        kind = type(layer)
        tensors = (*layer._parameters.values(), *layer._buffers.values())
        torchs = getattr(nn, kind.__name__, None) is kind and kind.forward.__module__.startswith(
            "torch.nn."
        )
        contains = kind is nn.Sequential
        if not torchs or not is_plain(layer) or contains != bool(name == "" or layer._modules):
            return None
        if any(tensor is not None and _is_users(tensor) for tensor in tensors):
            return None
        facts = {key: value for key, value in vars(layer).items() if not isinstance(value, dict)}
        if not all(map(_is_fact, facts.values())):
            return None
        found.append((name, kind, sorted(facts.items())))
    return None if _has_any_global_hook() else found  # type: ignore[no-untyped-call]


def _is_fact(value: object) -> bool:
    """Return whether a layer's attribute is a number, a text, or some of these."""
    if isinstance(value, (tuple, list, set)):
        return all(map(_is_fact, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_users(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class that is not PyTorch's, or has hooks."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return type(tensor) not in (nn.Parameter, Tensor) or bool(hooks)


def own_dropout(module: nn.Module) -> None:
    """Replace dropout layers of a module that are torch's as they are by Dropout, which vmapped
    training can batch.
    """
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

    Convolutions and linear layers: weights and biases uniform in +-1/sqrt(fan_in). LSTM: all in
    +-1/sqrt(hidden). Embeddings: standard normal. Batch norm: ones and zeros.
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
    """Initialise convolutions normal with variance 2 / (k * k * outputs) (He et al. 2015), others
    by default.
    """
    draw_default(module, source)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            outputs = layer.weight.shape[0] * layer.weight[0, 0].numel()
            nn.init.normal_(layer.weight, 0.0, math.sqrt(2 / outputs), generator=source)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def draw_preact(module: nn.Module, source: torch.Generator) -> None:
    """Initialise convolutions by fan-out and set every batch norm's gamma to 0.5."""
    draw_by_fan_out(module, source)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.constant_(layer.weight, 0.5)


def draw_vgg16(module: nn.Module, source: torch.Generator) -> None:
    """Initialise as torchvision: convolutions by fan-out, linear weights with deviation 0.01,
    biases zero.
    """
    draw_by_fan_out(module, source)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0.0, 0.01, generator=source)
            nn.init.zeros_(layer.bias)


def _uniform(tensor: Tensor, bound: float, source: torch.Generator) -> None:
    nn.init.uniform_(tensor, -bound, bound, generator=source)


Construct: TypeAlias = Callable[[Inputs], nn.Module]
Draw: TypeAlias = Callable[[nn.Module, torch.Generator], None]

ARCHITECTURES: Final[Mapping[str, Construct]] = {
    each.__name__: each
    for each in (
        *(linear_digits, mlp_digits, cnn_digits, lenet5, lenet_cifar, cnn_femnist, cnn_motions),
        *(cnn_fedavg, cnn_fedavg_padded),
        *(
            resnet20,
            resnet20_b,
            resnet20_preact,
            resnet18_cifar,
            vgg16_bn,
            vgg16,
            vgg_femnist,
            char_lstm,
            sent_lstm,
        ),
    )
}
# the others: draw_default
DRAWS: Final[Mapping[str, Draw]] = {"resnet20_preact": draw_preact, "vgg16": draw_vgg16}
