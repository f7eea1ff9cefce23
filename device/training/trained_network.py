"""An experiment's model where it is trained, and how its gradients are computed.

Convolutions that are one matrix product replace oneDNN's own where those cost many times their
arithmetic. Suffixes: B samples, C channels of the inputs, O of the outputs, kernels of H x W, K = C
H W, N positions of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MethodType
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.accelerators import is_lost
from fedstrata.common.learning import models
from fedstrata.common.learning.computing import first_line, own_code, seeded
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.losses import try_loss
from fedstrata.common.learning.models import (
    Arrays,
    classifier_of,
    head_places,
    random_samples,
    random_targets,
)
from fedstrata.common.learning.nets import Dropout, layers_in
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.model.parts import NO_ARRAYS, ModelParts
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings.own import is_own
from fedstrata.common.text import noted
from fedstrata.device.training.hidden import hidden_state
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.recording import (
    CONTRASTS,
    NoTorchScript,
    NotRecordable,
    Program,
    program_of,
)
from fedstrata.device.training.sgd import (
    FeaturesAt,
    Forward,
    LocalSteps,
    features_of,
    forward_of,
    keep_linear_fp32,
)
from fedstrata.device.training.vectors import TaskVectors

# of the largest model whose steps are recorded: in larger ones kernels take all
RECORDED_PARAMETERS: Final = 2_000_000
TRIAL_NOISE: Final = 0.1  # of the vectors behind a model: as large as gradients
SLOWER: Final = (
    "Steps of small models take 1.1 to 4 times as long (docs/devices.md). Install "
    "another release of it."
)

_Outputs = TypeVar("_Outputs")

log = logging.getLogger("fedstrata.training")


@dataclass(frozen=True, slots=True, eq=False)
class NetworkTensors:
    """A module's tensors: all that a row has, the trained weights, the buffers, and the parameters
    without gradients.

    `personal`: the places of the weights that no row between nodes has.
    """

    row: models.RowTensors
    weights: Sequence[nn.Parameter]
    buffers: Sequence[Tensor]
    fixed: Sequence[nn.Parameter]
    personal: Sequence[int]

    @classmethod
    def of(cls, module: nn.Module, parts: ModelParts) -> NetworkTensors:
        """Return those of a module."""
        weights = models.weights_of(module, parts.whole)
        return cls(
            models.RowTensors(module, parts.whole),
            list(weights.values()),
            list(module.buffers()),
            [weight for weight in module.parameters() if not weight.requires_grad],
            [place for place, name in enumerate(weights) if name in parts.personal],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A model and the functions of its passes. Each training overwrites the model's parameters and
    buffers.

    `features` and `head` (the places of the last linear layer's weight and bias) are for objectives
    that read them. `kept`: the tensors of a model that always has the same ones. A user's own may
    replace its buffers.
    """

    module: nn.Module
    forward: Forward
    features: FeaturesAt | None
    head: Sequence[int]
    drops: bool
    kept: NetworkTensors | None = None

    def tensors(self, parts: ModelParts) -> NetworkTensors:
        """Return the module's present tensors."""
        return self.kept or NetworkTensors.of(self.module, parts)

    def steps(
        self,
        experiment: Experiment,
        parts: ModelParts,
        *,
        rate: float,
        vectors: Mapping[str, Sequence[Tensor]],
    ) -> LocalSteps:
        """Return the steps of a training from the module's present weights, at this learning
        rate.
        """
        tensors = self.tensors(parts)
        return LocalSteps(
            self.forward,
            tensors.weights,
            training=experiment.training,
            learning_rate=rate,
            buffers=tensors.buffers,
            fixed=tensors.fixed,
            vectors=vectors,
            features=self.features,
            head=self.head,
            personal=tensors.personal,
        )


@dataclass(slots=True, eq=False)
class RecordedSteps:
    """The recorded steps of a source, by the size of a batch, None where they are taken one by one.

    `form`: of the net (`form_of`); None if its programs are compared as they run. `reason`: why
    they are not used any more, "" while they are. `named`: it was reported that steps are not
    recorded.
    """

    programs: dict[int, Program | None] = field(default_factory=dict)
    form: object = None
    reason: str = ""
    named: bool = False

    def drop(self, reason: str) -> None:
        """Take all steps one by one from now on."""
        self.reason = reason
        self.programs = dict.fromkeys(self.programs)


@dataclass(frozen=True, slots=True, eq=False)
class NetworkSource:
    """Networks of an experiment for one kind of inputs on one accelerator.

    fedstrata's own models have one network, `shared` by all trainings. A user's own may keep
    anything beside its state, so each training has a new one, in this memory format. `joins`: it
    cannot train on one sample. `tried`: sizes of batches. `recorded`: the recorded steps. `notes`:
    the warnings about own code, a line each.
    """

    experiment: Experiment
    inputs: Inputs
    accelerator: torch.device
    parts: ModelParts
    shared: Network | None
    memory_format: torch.memory_format = torch.contiguous_format
    joins: bool = False
    tried: set[int] = field(default_factory=set)
    recorded: RecordedSteps = field(default_factory=RecordedSteps)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Warn of what the user should know of the experiment's own code."""
        self.notes.append(text)
        log.warning("%s", noted(text))

    def network(self) -> Network:
        """Return the network of the next training. Raises InvalidExperiment."""
        if self.shared is not None:
            return self.shared
        module = models.anew(self.experiment, inputs=self.inputs)
        _order(module, self.memory_format)
        return _network(self.experiment, module, self.parts, self.accelerator)


def source_of(
    experiment: Experiment, inputs: Inputs, *, accelerator: torch.device, frozen: Arrays = NO_ARRAYS
) -> NetworkSource:
    """Return a new source; `frozen`: the cloud's arrays, if this node builds others. Raises
    InvalidExperiment.
    """
    training = experiment.training
    shared = None
    try_loss(training.loss, inputs)
    module = models.of(experiment, inputs=inputs, frozen=frozen)
    parts = models.parts_of(module, experiment.model)
    if not is_own(experiment.model.name):
        if accelerator.type == "cpu" and not experiment.tiers[-1].privacy.on_samples:
            _order(module, torch.channels_last)
            if training.precision != "bf16":
                as_products(module)
        keep_linear_fp32(module, training, device=accelerator)
        # it stays there, so that no training moves it
        shared = _network(experiment, module.to(accelerator).train(), parts, accelerator)
        shared = replace(shared, kept=NetworkTensors.of(module, parts))
    return NetworkSource(experiment, inputs, accelerator, parts, shared)


def record(
    source: NetworkSource, vectors: TaskVectors, *, draws: int, sizes: Iterable[int]
) -> None:
    """Record the steps of batches of these sizes, where that is not tried yet and they can be. CPUs
    only.

    `vectors` are those of training, `draws`: random numbers of each sample. A net that the
    experiment wants recorded and that cannot be is named, with the reason.
    """
    experiment = source.experiment
    found = source.recorded
    name = experiment.model.name
    wanted = experiment.training.recorded is True
    for size in sorted(set(sizes) - found.programs.keys()):
        found.programs[size] = None
        if found.reason:
            continue
        try:
            found.programs[size] = _recorded(source, vectors, draws=draws, size=size)
        except NoTorchScript:
            _warn_without_torchscript()
        except Exception as error:
            if is_lost(error):
                raise
            log.info(
                "%s: steps of %d samples are taken one by one: %s", name, size, first_line(error)
            )
            if wanted and not found.named:
                found.named = True
                problem = first_line(error).rstrip(".")
                source.note(f"training.recorded = true: {name} is not recorded, as {problem}.")


@cache
def _warn_without_torchscript() -> None:
    """Warn once in a process."""
    log.warning(
        "%s",
        noted(
            f"PyTorch {torch.__version__} has no TorchScript, so no steps are recorded. {SLOWER}"
        ),
    )


def _recorded(
    source: NetworkSource, vectors: TaskVectors, *, draws: int, size: int
) -> Program | None:
    """Return the program of a step, None if none is wanted. Raises NotRecordable, and what own code
    raises.
    """
    experiment = source.experiment
    inputs = source.inputs
    found = source.recorded
    with seeded(torch_seed(experiment.seed, Purpose.OWN_CODE)):
        if experiment.tiers[-1].privacy.on_samples:
            raise NotRecordable("each sample has a gradient of its own by DP-SGD")
        network = source.network()
        if (
            form := form_of(experiment, network.module)
        ) is None and experiment.training.recorded is not True:
            return None
        if sum(weight.numel() for weight in network.module.parameters()) > RECORDED_PARAMETERS:
            raise NotRecordable(f"it has more than {RECORDED_PARAMETERS:,} parameters")
        draw = torch.Generator().manual_seed(size)
        noise = {
            each: np.float32(TRIAL_NOISE) * torch.randn(shape, generator=draw).numpy()
            for each, shape in vectors.shapes.items()
        }
        given = {
            each: vector_tensors(vectors, network.module, each, vector)
            for each, vector in noise.items()
        }
        steps = network.steps(
            experiment, source.parts, rate=experiment.training.learning_rate, vectors=given
        )
        samples = random_samples(inputs, 2 * size)
        tensors = [
            samples,
            random_targets(inputs, 2 * size),
            *([torch.rand(2 * size, draws, generator=draw)] if draws else []),
        ]
        batches = [[tensor[:size] for tensor in tensors], [tensor[size:] for tensor in tensors]]
        found.form = form
        if form is not None:
            return program_of(steps.take, steps.state, batches, rate=steps.learning_rate)
        hidden = hidden_in(experiment, network.module, steps.objective)
        return program_of(
            steps.take,
            steps.state,
            batches,
            rate=steps.learning_rate,
            hidden=hidden,
            factors=CONTRASTS,
        )


def hidden_in(experiment: Experiment, module: nn.Module, objective: object) -> Callable[[], bytes]:
    """Return a function for what the code of a training keeps beside the model's state."""
    return partial(hidden_state, module, objective, own_names(experiment))


def own_names(experiment: Experiment) -> list[str]:
    """Return the names of the own code that computes with tensors in training."""
    return [name for name in own_code(experiment).values() if is_own(name)]


def form_of(experiment: Experiment, module: nn.Module) -> object:
    """Return what a net is, if a step of it runs the code of PyTorch and of fedstrata alone, else
    None.

    These are the nets that ship, and own ones of PyTorch's layers in nn.Sequential, as long as loss
    and objective ship.
    """
    training = experiment.training
    name = experiment.model.name
    if is_own(training.loss) or is_own(training.objective.name):
        return None
    if is_own(name):
        return layers_in(module)
    return name


def vector_tensors(
    vectors: TaskVectors, module: nn.Module, name: str, vector: Floats
) -> list[Tensor]:
    """Return a vector as tensors: one of length D like the parameters, in their order, another one
    as it is.
    """
    parts = vectors.split(name, vector)
    weights = models.weights_of(module, vectors.layout)
    device = next(module.parameters()).device
    if name in parts:
        return [torch.from_numpy(vector.copy()).to(device)]
    found = []
    for parameter, weight in weights.items():
        part = torch.from_numpy(parts[parameter].copy())
        found.append(torch.empty_like(weight, requires_grad=False).copy_(part))
    return found


def _order(module: nn.Module, memory_format: torch.memory_format) -> None:
    """Give images' kernels an order in memory. `nn.Module.to` would do it too, and fail for those
    of volumes.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def _network(
    experiment: Experiment, module: nn.Module, parts: ModelParts, accelerator: torch.device
) -> Network:
    training = experiment.training
    objective = objective_of(experiment.training)
    forward = forward_of(module, training, device=accelerator)
    features = None
    if objective.uses_features:
        classifier_of(module)
        features = features_of(module, training, device=accelerator)
    # it may write into its inputs, which other passes of a step read
    if is_own(experiment.model.name):
        forward = _of_copies(forward)
        features = None if features is None else _of_copies(features)
    head = head_places(module, parts.whole) if objective.uses_head else ()
    return Network(
        module,
        forward,
        features,
        head,
        drops=any(isinstance(layer, Dropout) for layer in module.modules()),
    )


def _of_copies(run: Callable[..., _Outputs]) -> Callable[..., _Outputs]:
    """Return the same pass of a copy of its inputs."""

    def of_copy(inputs: Tensor, *at: Sequence[Tensor] | None) -> _Outputs:
        return run(inputs.clone(), *at)

    return of_copy


OUTPUTS_LEAST: Final = 16  # of a first layer's product: with fewer columns oneDNN is faster
# numbers in the windows of a first layer's batch: beyond them oneDNN is as fast
WINDOWS_MOST: Final = 1 << 15


def as_products(module: nn.Module) -> None:
    """Let convolutions of a model of fedstrata's be products where a CPU is faster so: by shape,
    never by timing.

    These are the ones of a kernel as large as its input, such as LeNet-5's last, and first ones of
    few gray pixels.
    """
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _is_plain(layer):
            setattr(layer, "forward", MethodType(_forward, layer))  # noqa: B010 - mypy knows no such assignment


def _is_plain(layer: nn.Conv2d) -> bool:
    return (
        layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and layer.padding != "same"
    )


def _padding_of(layer: nn.Conv2d) -> tuple[int, int]:
    rows, columns = (0, 0) if isinstance(layer.padding, str) else layer.padding  # "valid" is none
    return rows, columns


def _forward(layer: nn.Conv2d, x_BCHW: Tensor) -> Tensor:
    if layer.kernel_size == x_BCHW.shape[2:] and _padding_of(layer) == (0, 0):
        return _whole(layer, x_BCHW)
    windows = x_BCHW.numel() * layer.kernel_size[0] * layer.kernel_size[1]
    wide = layer.in_channels == 1 and layer.out_channels >= OUTPUTS_LEAST
    if wide and windows <= WINDOWS_MOST and not x_BCHW.requires_grad:
        return _gray(layer, x_BCHW)
    return nn.Conv2d.forward(layer, x_BCHW)


def _whole(layer: nn.Conv2d, x_BCHW: Tensor) -> Tensor:
    """Return the outputs [B, O, 1, 1] of a kernel as large as the input."""
    x_BK, weight_OK = (tensor.permute(0, 2, 3, 1).flatten(1) for tensor in (x_BCHW, layer.weight))
    return functional.linear(x_BK, weight_OK, layer.bias)[:, :, None, None]


def _gray(layer: nn.Conv2d, x_B1HW: Tensor) -> Tensor:
    """Return the outputs of a layer whose input needs no gradient, in the order of
    channels_last.
    """
    (height, width) = layer.kernel_size
    (down, right) = layer.stride
    (rows, columns) = _padding_of(layer)
    padded = functional.pad(x_B1HW, (columns, columns, rows, rows))
    windows = padded.unfold(2, height, down).unfold(3, width, right)  # [B, 1, rows, columns, H, W]
    x_KN = windows.permute(4, 5, 1, 0, 2, 3).reshape(height * width, -1)
    # Contiguous, so that its gradient is x_KN times a matrix as wide as O: the transposed product
    # takes twice as long.
    weight_KO = layer.weight.permute(2, 3, 1, 0).flatten(0, 2).contiguous()
    if layer.bias is None:
        y_NO = x_KN.t() @ weight_KO
    else:
        y_NO = torch.addmm(layer.bias, x_KN.t(), weight_KO)
    return y_NO.view(len(x_B1HW), *windows.shape[2:4], -1).permute(0, 3, 1, 2)
