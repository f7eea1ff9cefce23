"""The models by name, and the conversion of a module's state to a flat model and back.

Every model returns logits, float32 [B, classes]. No layer uses torch's process-global random generator, which
concurrent trainings would share: dropout has its own generator (`nets/layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.experiment import own
from common.experiment.data import check_accepted
from common.experiment.own import is_own
from common.experiment.schema import Experiment
from common.learning.head import project
from common.learning.inputs import Inputs
from common.learning.nets import lstm, resnet, small, vgg
from common.learning.nets.layers import draw_default
from common.learning.own import KEY, build_own, try_own
from common.model.layout import ModelLayout, Row, Section
from common.randomness import Purpose, torch_seed

Draw = Callable[[nn.Module, torch.Generator], None]


class _Architecture(NamedTuple):
    """The constructor of a model, and how its initial weights are drawn."""

    construct: Callable[[Inputs], nn.Module]
    draw: Draw = draw_default


_KINDS = MappingProxyType(
    {
        "mlp_digits": _Architecture(small.mlp_digits),
        "cnn_digits": _Architecture(small.cnn_digits),
        "lenet5": _Architecture(small.lenet5),
        "lenet_cifar": _Architecture(small.lenet_cifar),
        "cnn_femnist": _Architecture(small.cnn_femnist),
        "cnn_fedavg": _Architecture(small.cnn_fedavg),
        "cnn_fedavg_padded": _Architecture(small.cnn_fedavg_padded),
        "resnet20": _Architecture(resnet.resnet20),
        "resnet20_b": _Architecture(resnet.resnet20_b),
        "resnet20_preact": _Architecture(resnet.resnet20_preact, resnet.draw_preact),
        "resnet18_cifar": _Architecture(resnet.resnet18_cifar),
        "vgg16_bn": _Architecture(vgg.vgg16_bn),
        "vgg16": _Architecture(vgg.vgg16, vgg.draw_vgg16),
        "vgg_femnist": _Architecture(vgg.vgg_femnist),
        "char_lstm": _Architecture(lstm.char_lstm),
        "sent_lstm": _Architecture(lstm.sent_lstm),
    }
)


def of(experiment: Experiment, *, inputs: Inputs) -> nn.Module:
    """Return the experiment's model as `build` does. Raises InvalidExperiment."""
    return build(experiment.model.name, experiment.seed, inputs=inputs, projection=experiment.model.projection)


def anew(experiment: Experiment, *, inputs: Inputs) -> nn.Module:
    """Return the user's own model as `of` did, without another trial of it. Raises InvalidExperiment."""
    return build_own(experiment.model.name, torch_seed(experiment.seed, Purpose.INIT), inputs=inputs)


def build(name: str, seed: int, *, inputs: Inputs, projection: int = 0) -> nn.Module:
    """Return the model on the CPU with its initial weights, which depend on the seed alone.

    `projection`: features of a head before the classifier, 0 = none.

    The module is created without storage and then filled from its own generator, so that neither the process-global
    generator nor another thread has an influence. A name with a colon is a custom function (`own.py`), which is tried.
    Raises InvalidExperiment, also if the model does not accept such inputs.
    """
    if is_own(name):
        own_seed = torch_seed(seed, Purpose.INIT)
        try_own(name, own_seed, inputs=inputs)
        module = build_own(name, own_seed, inputs=inputs)
        layout_of(module, name=name)
        return module
    check_accepted(name, inputs.shape, text=inputs.tokens > 0, what=str(inputs))
    kind = _KINDS[name]
    with torch.device("meta"):
        module = kind.construct(inputs)
        if projection:
            project(module, projection)
    # As `to_empty(device="cpu")`, which imports sympy: half a second of each process that builds a model.
    storage = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in module.state_dict().items()}
    module.load_state_dict(storage, assign=True)
    with torch.no_grad():
        kind.draw(module, torch.Generator().manual_seed(torch_seed(seed, Purpose.INIT)))
    return module


def layout_of(module: nn.Module, *, name: str = "") -> ModelLayout:
    """Return the place of each tensor of the module's state in a flat model.

    Parameters are the trainable columns; buffers are float32 columns or int64 counters. A tensor of several names
    (tied weights) has one place, under its first name. Raises InvalidExperiment for a state that no flat model holds;
    `name`: of the model, for its text.
    """
    parameters = {id(weight): path for path, weight in module.named_parameters()}
    buffers = {id(buffer) for buffer in module.buffers()}
    tensors: list[tuple[str, Sequence[int], Section]] = []
    problem, remedy = "", "Use float32."
    for path, tensor in _state(module).items():
        if parameters.pop(id(tensor), None) is not None:
            section = Section.PARAMETER
            if tensor.dtype != torch.float32:
                problem = f"its parameter {path} is {tensor.dtype}"
        elif id(tensor) in buffers:
            section = Section.BUFFER if tensor.dtype == torch.float32 else Section.COUNTER
            if tensor.dtype not in (torch.float32, torch.int64):
                problem = f"its buffer {path} is {tensor.dtype}"
                remedy = "Use float32 or int64, or persistent=False if it is the same at each node (a mask, a table)."
        else:
            problem = f"{path} in its state_dict is neither a parameter nor a buffer"
            remedy = "Keep that state in buffers."
        if problem:
            break
        tensors.append((path, tuple(tensor.shape), section))
    if parameters and not problem:
        problem, remedy = f"its parameter {next(iter(parameters.values()))} is not in its state_dict", "Leave it there."
    if not problem and not any(weight.requires_grad for weight in module.parameters()):
        problem, remedy = "it has no parameter that is trained", "Leave some parameters with requires_grad."
    if problem:
        own.refuse(KEY, name or type(module).__name__, problem, remedy)
    return ModelLayout.build(tensors)


@torch.no_grad()
def read_row(module: nn.Module, layout: ModelLayout, row: Row) -> None:
    """Copy a flat model, uint8 [row_bytes], into the module's tensors, on any device."""
    state = _state(module)
    for name, view in layout.views(row).items():
        # The copy is writable and aligned, as torch requires; a received model may be neither.
        state[name].copy_(torch.from_numpy(view.copy()))


@torch.no_grad()
def write_row(module: nn.Module, layout: ModelLayout, row: Row) -> None:
    """Copy the module's tensors into a flat model, uint8 [row_bytes]."""
    state = _state(module)
    for name, view in layout.views(row).items():
        view[...] = state[name].detach().cpu().numpy()


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state's own tensors, each once, by the first of their names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
