"""An experiment's model: built by its name, converted to a flat model and back, and its head.

Every model returns logits, float32 [B, classes]. No layer uses torch's process-global random
generator, which concurrent trainings would share: dropout has its own generator (`nets.py`). A head
is the last linear layer, whose inputs are the features.

A custom model is a function named in the experiment, `model.name = "package.module:function"`. It
is called with those of the keywords `shape`, `classes` and `tokens` that it accepts, or `outputs`
in place of `classes` if `data.targets` are numbers (see `Inputs`), and returns an `nn.Module` of
float32 that computes logits [B, classes], or predictions
[B, outputs]:

    def build(*, shape: tuple[int, int, int], classes: int) -> nn.Module: ...

So the module's own class is such a function, if it needs no other keyword. It is called anew for
each training and each evaluation, so what a module keeps beside its `state_dict` begins each time
as the function makes it. Its frozen arrays (`common/model/parts.py`) begin as the function makes
them at the cloud. torch's, numpy's and Python's own generators are seeded by the experiment during
construction, training and evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning.computing import seeded
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import ARCHITECTURES, DRAWS, draw_default, own_dropout
from fedstrata.common.model import tensors
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.model.parts import (
    INITIAL,
    NO_ARRAYS,
    ModelParts,
    Part,
    differences,
    part_of_each,
)
from fedstrata.common.model.warm_start import read_initial
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings import own
from fedstrata.common.settings.data import ModelSettings, check_accepted
from fedstrata.common.settings.own import is_own

MODEL_KEY: Final = "model.name"
NO_PARTS: Final = ModelSettings(name="")
KEPT_BYTES: Final = 4 << 20  # of a row that is kept with its views
Tensors = dict[str, Tensor]
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


def of(experiment: Experiment, *, inputs: Inputs, frozen: Arrays = NO_ARRAYS) -> nn.Module:
    """Return the experiment's model as `build` does, its frozen parameters without gradients.

    `frozen`: the frozen arrays of another node, in place of the model's own. Raises
    InvalidExperiment, also if they are those of another model.
    """
    model = experiment.model
    module = build(
        model.name, experiment.seed, inputs=inputs, projection=model.projection, parts=model
    )
    module = _frozen(module, model)
    if frozen:
        if wrong := differences(frozen, parts_of(module, model).frozen):
            remedy = "Use one release of fedstrata, and of the model's package, everywhere."
            own.refuse(
                MODEL_KEY,
                model.name,
                f"the cloud's frozen arrays are not those of this model: {wrong}",
                remedy,
            )
        read_frozen(module, frozen)
    return module


def anew(experiment: Experiment, *, inputs: Inputs, node: str = "") -> nn.Module:
    """Return the experiment's model as `of` did, without another trial of it. Raises
    InvalidExperiment.

    `node`: with the weights of this node's own, and not with those that all nodes have.
    """
    model = experiment.model
    own_seed = torch_seed(experiment.seed, Purpose.INIT, node)
    if is_own(model.name):
        return _frozen(build_own(model.name, own_seed, inputs=inputs), model)
    return _frozen(_built(model.name, own_seed, inputs=inputs, projection=model.projection), model)


def _frozen(module: nn.Module, model: ModelSettings) -> nn.Module:
    if model.frozen:
        parts = _part_of_each(module, model)
        for name, weight in module.named_parameters():
            if parts[name] is Part.FROZEN:
                weight.requires_grad_(False)
    return module


def build(
    name: str, seed: int, *, inputs: Inputs, projection: int = 0, parts: ModelSettings = NO_PARTS
) -> nn.Module:
    """Return the model on the CPU with its initial weights, which depend on the seed alone.

    `projection`: features of a head before the classifier, 0 = none. `parts`: which arrays are
    frozen or personal.

    The module is created without storage and then filled from its own generator, so that neither
    the process-global generator nor another thread has an influence. A name with a colon is a
    custom function, which is tried.
    Raises InvalidExperiment, also if the model does not accept such inputs.
    """
    if is_own(name):
        own_seed = torch_seed(seed, Purpose.INIT)
        try_own(name, own_seed, inputs=inputs)
        module = build_own(name, own_seed, inputs=inputs)
        parts_of(module, parts.model_copy(update={"name": name}))
        return module
    check_accepted(name, inputs.shape, text=inputs.tokens > 0, what=str(inputs))
    return _built(name, torch_seed(seed, Purpose.INIT), inputs=inputs, projection=projection)


def _built(name: str, own_seed: int, *, inputs: Inputs, projection: int) -> nn.Module:
    with torch.device("meta"):
        module = ARCHITECTURES[name](inputs)
        if projection:
            project(module, projection)
    # As `to_empty(device="cpu")`, which imports sympy: half a second of each process that builds a
    # model.
    storage = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(storage, assign=True)
    with torch.no_grad():
        DRAWS.get(name, draw_default)(module, torch.Generator().manual_seed(own_seed))
    return module


def build_own(name: str, seed: int, *, inputs: Inputs) -> nn.Module:
    """Return the module that the function creates. Raises InvalidExperiment."""
    keywords: dict[str, Any] = {
        "shape": inputs.shape,
        "outputs" if inputs.numbers else "classes": inputs.classes,
    }
    if inputs.tokens:
        keywords["tokens"] = inputs.tokens
    with seeded(seed):
        module = own.call(MODEL_KEY, name, keywords)
        if not isinstance(module, nn.Module):
            own.refuse(
                MODEL_KEY,
                name,
                f"returns {type(module).__name__}, not nn.Module",
                "Return the module itself.",
            )
        module = module.to("cpu").train()
        own_dropout(module)
        if any(isinstance(weight, nn.UninitializedParameter) for weight in module.parameters()):
            _logits(name, module, inputs)  # makes them
    return module


def try_own(name: str, seed: int, *, inputs: Inputs) -> None:
    """Build the function's module twice, and try a pass of one of them on two samples. Raises
    InvalidExperiment.
    """
    module, other = (build_own(name, seed, inputs=inputs) for _ in range(2))
    if set(module.modules()) & set(other.modules()):
        problem = (
            "returns the same module, or a part of it, again: devices of a process would "
            "share what it keeps"
        )
        own.refuse(MODEL_KEY, name, problem, "Make a new one in each call.")
    with seeded(seed):
        logits = _logits(name, module, inputs)
    for part, value in module.named_parameters():  # a buffer may have them: a mask
        if not bool(torch.isfinite(value).all()):
            problem = f"makes {part} with nan or infinity{own.place(own.code(MODEL_KEY, name))}"
            own.refuse(MODEL_KEY, name, problem, "Initialise it with finite numbers.")
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, inputs.classes):
        shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        wanted = "predictions" if inputs.numbers else "logits"
        problem = f"returns {shape} for two samples, not {wanted} of [2, {inputs.classes}]"
        own.refuse(MODEL_KEY, name, problem, f"Return {wanted}.")


def random_samples(inputs: Inputs, count: int) -> torch.Tensor:
    """Return samples [count, ...] of which code may be tried, the same ones each time."""
    draw = torch.Generator().manual_seed(count)
    shape = (count, *inputs.shape)
    if inputs.tokens:
        return torch.randint(inputs.tokens, shape, generator=draw)
    return torch.randn(shape, generator=draw)


def random_targets(inputs: Inputs, count: int) -> torch.Tensor:
    """Return targets of such samples, int64 [count] or float32 [count, T], the same ones each
    time.
    """
    draw = torch.Generator().manual_seed(count)
    labels = torch.randint(inputs.classes, (count,), generator=draw)
    if inputs.numbers:
        return torch.randn(count, inputs.classes, generator=draw)
    return labels


@torch.no_grad()
def _logits(name: str, module: nn.Module, inputs: Inputs) -> Any:
    """Return what a module returns for two random samples, in eval mode; it is in training mode
    before and after.
    """
    remedy = "Fix the model, or use another data.dataset."
    try:
        with own.guarded({MODEL_KEY: name}, problem=f"fails with {{}} on {inputs}", remedy=remedy):
            return module.eval()(random_samples(inputs, 2))
    finally:
        module.train()


def layout_of(module: nn.Module, model: ModelSettings = NO_PARTS) -> ModelLayout:
    """Return the place of each exchanged tensor of the module's state in a flat model, as
    `parts_of` does.
    """
    return parts_of(module, model).exchanged


def parts_of(module: nn.Module, model: ModelSettings = NO_PARTS) -> ModelParts:
    """Return what becomes of each tensor of the module's state, and its place in a flat model.

    Parameters are the trainable columns; buffers are float32 columns or int64 counters; frozen
    tensors have no place, and any type of numpy's. A tensor of several names (tied weights) has one
    place, under its first name. Raises InvalidExperiment for a state that no flat model holds, and
    for patterns that do not fit.
    """
    parameters = {id(weight): path for path, weight in module.named_parameters()}
    buffers = {id(buffer) for buffer in module.buffers()}
    parts = _part_of_each(module, model)
    arrays: list[tuple[str, Sequence[int], Section]] = []
    values: dict[str, npt.NDArray[Any]] = {}
    problem = remedy = ""
    for path, tensor in _state(module).items():
        if parameters.pop(id(tensor), None) is not None:
            kind = "parameter"
        else:
            kind = "buffer" * (id(tensor) in buffers)
        problem, remedy = _obstacle(path, tensor, kind, frozen=parts[path] is Part.FROZEN)
        if problem:
            break
        section = Section.COUNTER if tensor.dtype == torch.int64 else Section.BUFFER
        if kind == "parameter":
            section = Section.PARAMETER
        arrays.append((path, tuple(tensor.shape), section))
        if parts[path] is not Part.EXCHANGED:
            values[path] = _array(tensor)
    if parameters and not problem:
        problem = f"its parameter {next(iter(parameters.values()))} is not in its state_dict"
        remedy = "Leave it there."
    trained = any(weight.requires_grad for weight in module.parameters())
    if not (trained or problem or model.frozen):
        problem = "it has no parameter that is trained"
        remedy = "Leave some parameters with requires_grad."
    if problem:
        own.refuse(MODEL_KEY, model.name or type(module).__name__, problem, remedy)
    if not any(
        section is Section.PARAMETER and parts[name] is Part.EXCHANGED
        for name, _, section in arrays
    ):
        part = Part.PERSONAL if model.personal else Part.FROZEN
        problem = "they leave no parameter that devices exchange"
        remedy = "Name fewer arrays."
        raise InvalidExperiment(f"model.{part}", ", ".join(getattr(model, part)), problem, remedy)
    return ModelParts.of(arrays, parts, values, constant=_constant(module))


def _obstacle(path: str, tensor: Tensor, kind: str, *, frozen: bool) -> tuple[str, str]:
    """Return why a tensor of the state has no place in a flat model, and the remedy; "" if it has
    one, or is frozen.
    """
    if not kind:
        return (
            f"{path} in its state_dict is neither a parameter nor a buffer",
            "Keep that state in buffers.",
        )
    if frozen:
        known = (
            tensor.dtype == torch.bfloat16
            or str(tensor.dtype).removeprefix("torch.") in tensors.TYPES
        )
        return (
            "" if known else f"its frozen {path} is {tensor.dtype}, which numpy does not have",
            "Use another type.",
        )
    if kind == "parameter":
        return (
            "" if tensor.dtype == torch.float32 else f"its parameter {path} is {tensor.dtype}",
            "Use float32.",
        )
    remedy = (
        "Use float32 or int64. If it never changes (a mask), add it to model.frozen, or use "
        "persistent=False."
    )
    known = tensor.dtype in (torch.float32, torch.int64)
    return "" if known else f"its buffer {path} is {tensor.dtype}", remedy


def _part_of_each(module: nn.Module, model: ModelSettings) -> dict[str, Part]:
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return part_of_each(
        model, {each[0]: each for each in names.values()}, constant=_constant(module)
    )


def _constant(module: nn.Module) -> set[str]:
    """Return the names of the parameters without gradients."""
    return {name for name, weight in module.named_parameters() if not weight.requires_grad}


def weights_of(module: nn.Module, layout: ModelLayout) -> dict[str, nn.Parameter]:
    """Return the module's parameters that a layout has, by name, in the module's order."""
    trained = {entry.name for entry in layout.entries if entry.section is Section.PARAMETER}
    return {name: weight for name, weight in module.named_parameters() if name in trained}


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values, on the CPU."""
    values = tensor.detach().cpu()
    if values.dtype == torch.bfloat16:
        return values.contiguous().view(torch.int16).numpy().view(tensors.BFLOAT16)
    return values.numpy()


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """Return an array's values."""
    if array.dtype == tensors.BFLOAT16:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@torch.no_grad()
def read_frozen(module: nn.Module, frozen: Arrays) -> None:
    """Copy frozen arrays into the module's tensors, on any device."""
    state = _state(module) if frozen else {}
    for name, array in frozen.items():
        state[name].copy_(_tensor(array))


def check_constant(module: nn.Module, parts: ModelParts) -> None:
    """Check that training has left the parameters without gradients as they were. Raises
    InvalidExperiment.
    """
    state = _state(module) if parts.constant else {}
    for name in sorted(parts.constant):
        if _array(state[name]).tobytes() != parts.frozen[name].tobytes():
            problem = (
                f"training changes its parameter {name}, which has requires_grad = False "
                "and so is frozen"
            )
            own.refuse(
                MODEL_KEY, type(module).__name__, problem, "Keep what training changes in a buffer."
            )


def read_row(module: nn.Module, layout: ModelLayout, row: Row) -> None:
    """Copy a flat model, uint8 [row_bytes], into the module's tensors, on any device."""
    RowTensors(module, layout).read(row)


def write_row(module: nn.Module, layout: ModelLayout, row: Row) -> None:
    """Copy the module's tensors into a flat model, uint8 [row_bytes]."""
    RowTensors(module, layout).write(row)


class RowTensors:
    """A module's tensors in the order of a layout's entries, for copies of all from a row or into
    one.
    """

    def __init__(self, module: nn.Module, layout: ModelLayout) -> None:
        state = _state(module)
        self._layout = layout
        self._tensors = [state[entry.name] for entry in layout.entries]
        self._kept: tuple[Row, list[Tensor]] | None = None

    @torch.no_grad()
    def read(self, row: Row) -> None:
        """Copy a flat model, uint8 [row_bytes], into the tensors, on any device."""
        own, views = self._row()
        own[:] = row[: own.size]
        torch._foreach_copy_(self._tensors, views)

    @torch.no_grad()
    def write(self, row: Row) -> None:
        """Copy the tensors into a flat model, uint8 [row_bytes]."""
        own, views = self._row()
        torch._foreach_copy_(views, self._tensors)
        row[: own.size] = own

    def _row(self) -> tuple[Row, list[Tensor]]:
        """Return a row of any content and its entries; a model that was received may be read-only,
        or not aligned. A small one is kept: views of all entries take as long as a small copy.
        """
        if self._kept is not None:
            return self._kept
        # before the floats, so that the counters behind them are aligned
        odd = 4 * (self._layout.columns % 2)
        row = np.empty(odd + self._layout.row_bytes, np.uint8)[odd:]
        made = row, list(map(torch.from_numpy, self._layout.views(row).values()))
        if row.size <= KEPT_BYTES:
            self._kept = made
        return made


def first_of(experiment: Experiment, module: nn.Module) -> tuple[ModelParts, Row, str, list[str]]:
    """Return the parts of a run's model, the first one, uint8 [row_bytes], its file's digest, and
    notes.

    It is the module as it is, and the digest "", or `model.initial`, whose arrays have the names,
    shapes and kinds of the module's. The file may lack frozen and personal arrays. The module gets
    its frozen ones. Raises InvalidExperiment.
    """
    parts = parts_of(module, experiment.model)
    initial = experiment.model.initial
    row = parts.exchanged.empty()
    write_row(module, parts.exchanged, row)
    if initial is None:
        return parts, row, "", []
    known = module.state_dict()  # a tied tensor has one place, and several names
    read = read_initial(
        initial, parts.exchanged, row, model=experiment.model.name, known=known, frozen=parts.frozen
    )
    found = read.arrays
    if frozen := {name: found[name] for name in parts.frozen if name in found}:
        read_frozen(module, frozen)
        parts = parts_of(module, experiment.model)
    notes = [
        f"{INITIAL}: {name} is personal, and devices begin with that of the model as it is built"
        for name in parts.personal
        if name in found
    ]
    return parts, row, read.content, [*read.notes, *notes[:1]]


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state's own tensors, each once, by the first of their names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def classifier_of(module: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last linear layer of a model and its name. Raises InvalidExperiment if there is
    none.
    """
    layers = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
    ]
    if not layers:
        problem = "it has no torch.nn.Linear, whose inputs are the features"
        remedy = "End it with one."
        raise InvalidExperiment("model.name", type(module).__name__, problem, remedy)
    return layers[-1]


def head_places(module: nn.Module, layout: ModelLayout) -> tuple[int, ...]:
    """Return the places of the head's weight and bias, if it has one, among `weights_of`. Raises
    InvalidExperiment.

    Nodes without torch find it in the layout; both must agree.
    """
    name, classifier = classifier_of(module)
    found = [f"{name}.{own}" for own, _ in classifier.named_parameters()]
    names = list(weights_of(module, layout))
    if absent := [each for each in found if each not in names]:
        problem = (
            f"{absent[0]} of its last torch.nn.Linear is not trained, or is another layer's, too"
        )
        remedy = "Use another objective."
        raise InvalidExperiment("model.name", type(module).__name__, problem, remedy)
    if found != [entry.name for entry in layout.head if entry is not None]:
        problem = f"its last torch.nn.Linear is {name}, and a later parameter is a matrix, too"
        raise InvalidExperiment(
            "model.name", type(module).__name__, problem, "Define the linear layer last."
        )
    return tuple(names.index(each) for each in found)


def with_features(
    module: nn.Module, inputs: Tensor, parameters: Tensors | Sequence[Tensors] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the logits [B, classes] and the features [B, F] of a batch.

    `parameters`: by name, in place of the module's own; a second mapping has the buffers.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0])

    _, classifier = classifier_of(module)
    hook = classifier.register_forward_pre_hook(keep)
    try:
        logits: Tensor = (
            module(inputs) if parameters is None else functional_call(module, parameters, (inputs,))
        )
    finally:
        hook.remove()
    return logits, seen[-1].flatten(1)


def project(module: nn.Module, width: int) -> None:
    """Put two layers before the classifier, F to F and, behind a ReLU, F to `width` features (Li et
    al. 2021).
    """
    name, classifier = classifier_of(module)
    parent, _, own = name.rpartition(".")
    inputs = classifier.in_features
    classes = classifier.out_features
    layers = (
        nn.Linear(inputs, inputs),
        nn.ReLU(),
        nn.Linear(inputs, width),
        nn.Linear(width, classes),
    )
    setattr(module.get_submodule(parent), own, nn.Sequential(*layers))
