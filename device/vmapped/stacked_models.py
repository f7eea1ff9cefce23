"""The models of several devices as one, and their common steps.

Suffixes: S devices, A of them in one step, W samples of each. Every tensor of the state has a
leading dimension S. vmap turns the layers' kernels into batched ones. A device's result differs
from that of its own training only by rounding, but it may depend on the other devices in the step.

Layers that vmap cannot batch as they are have their own form: dropout, with each device's own
masks, and LSTMs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from fedstrata.common.learning.datasets import Normalise
from fedstrata.common.learning.models import head_places, with_features
from fedstrata.common.learning.nets import Dropout, is_plain
from fedstrata.common.learning.optimizers import optimizer_of
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.training import sgd
from fedstrata.device.training.batches import Changes, change_images
from fedstrata.device.training.objectives.objective import Minibatch
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.vectors import TaskVectors
from fedstrata.device.vmapped.schedule import VmappedStep

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """What vmapped trainings share. Module, `images` [N, ...], `labels` int64 [N] are on one
    accelerator.

    `vectors` are those of training, `personal` the names of the weights that no device has
    received.
    """

    module: nn.Module
    vectors: TaskVectors
    images: Tensor
    labels: Tensor
    normalise: Normalise
    training: TrainingSettings
    learning_rate: float
    personal: frozenset[str] = frozenset()

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model."""
        return self.vectors.layout

    @property
    def accelerator(self) -> torch.device:
        """The accelerator of the training."""
        return self.labels.device

    @property
    def pads(self) -> bool:
        """Whether samples of weight 0 have no effect, as they would have in batch statistics."""
        return not any(isinstance(layer, _NormBase) for layer in self.module.modules())

    def parts_of(self, name: str, vectors: Floats) -> Tensors:
        """Return vectors of this name, behind some dimensions, as tensors: those of length D like
        the weights.
        """
        dtype = next(self.module.parameters()).dtype
        parts = self.vectors.split(name, vectors)
        return {
            part: torch.from_numpy(values.copy()).to(self.accelerator, dtype)
            for part, values in parts.items()
        }

    def inputs(self, places: Tensor, changes: Changes | None) -> Tensor:
        """Return the model's inputs for samples with these indices, int64 [n]."""
        images = self.images.index_select(0, places)
        if changes is not None:
            images = change_images(images, changes, crop=self.training.image_changes.crop)
        return self.normalise(images)


def keep_batch_norm_fp32(
    module: nn.Module, training: TrainingSettings, *, device: torch.device
) -> None:
    """Make batch norm compute in fp32 in a GPU's vmapped bf16 training.

    vmap gives the kernel weights of the inputs' dtype beside running statistics in fp32, which
    CUDA's kernels need not accept.
    """
    if training.precision != "bf16" or device.type != "cuda":
        return
    for layer in module.modules():
        if isinstance(layer, _NormBase):
            forward = partial(_of_fp32, layer.forward)
            setattr(layer, "forward", forward)  # noqa: B010 - mypy knows no such assignment


def _of_fp32(forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    if inputs.dtype is torch.bfloat16:
        inputs = inputs.float()
    return forward(inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step and its samples: `samples` int64 [A, W] are indices of images, `changes` the
    augmentation of A * W images.

    `weights` [A, W], each row of sum 1, are the samples' weights in the loss; None = equal.
    `counted` float64 [A]: the factor of each loss in the last epoch's sum. `uniform`: the samples'
    random numbers, float32 [A, W, draws].
    """

    step: VmappedStep
    samples: Tensor
    changes: Changes | None
    weights: Tensor | None
    counted: Tensor
    uniform: Tensor | None = None


class VmappedModels:
    """The state of S trainings: weights, the optimiser's moments, buffers, and the sums of their
    last epochs' losses.

    For an objective that uses them, also the received weights and the vectors.
    """

    def __init__(self, recipe: Recipe, rows: Sequence[Row], seeds: Sequence[int]) -> None:
        """Start with each device's flat model and the vectors behind it, uint8, and a fresh
        optimiser.

        `seeds`: of each device's dropout masks.
        """
        self._recipe = recipe
        self._layers = VmappedLayers(recipe.module, seeds, device=recipe.accelerator)
        self._objective = objective_of(recipe.training)
        self._weights, self._buffers = _tensors(
            recipe, np.stack([row[: recipe.layout.model_bytes] for row in rows])
        )
        kept = self._weights if self._objective.uses_received else {}
        self._received = {
            name: weight.clone() for name, weight in kept.items() if name not in recipe.personal
        }
        found = [recipe.vectors.read(row) for row in rows]
        self._vectors: dict[str, Tensors] = {}
        for name in recipe.vectors.shapes:
            given = np.stack([each[name] for each in found])
            self._vectors[name] = recipe.parts_of(name, given)
        self._head = head_places(recipe.module, recipe.layout) if self._objective.uses_head else ()
        self._optimizer = optimizer_of(recipe.training)
        begun = self._optimizer.begin(list(self._weights.values()), models=len(rows))
        self._moments = {
            slot: dict(zip(self._weights, parts, strict=True)) for slot, parts in begun.items()
        }
        self._losses = torch.zeros(len(rows), dtype=torch.float64, device=recipe.accelerator)

    def step(self, places: int | Tensor, batch: Batch) -> None:
        """Take one step of SGD at the first A places, or at given ones, int64 [A].

        Nothing has changed if memory runs out.
        """
        recipe = self._recipe
        weights = {
            name: tensor.detach().requires_grad_()
            for name, tensor in _some(self._weights, places).items()
        }
        moments = {slot: _some(parts, places) for slot, parts in self._moments.items()}
        buffers = _some(self._buffers, places)
        passes: list[Tensors] = []

        def forward() -> Tensor:
            (logits,), moved = self._outputs(self._forward, weights, buffers, batch)
            passes.append(moved)
            return logits

        def features(at: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
            chosen = weights if at is None else dict(zip(weights, at, strict=True))
            (logits, found), moved = self._outputs(self._features, chosen, buffers, batch)
            passes.append(moved)
            return logits, found

        minibatch = Minibatch(
            forward,
            recipe.labels[batch.samples],
            list(weights.values()),
            self._received_at(places, weights),
            batch.weights,
            {name: list(_some(parts, places).values()) for name, parts in self._vectors.items()},
            features,
            batch.uniform,
            self._head,
        )
        with self._layers.batched(batch.step):
            losses = sgd.step(
                minibatch,
                {slot: list(parts.values()) for slot, parts in moments.items()},
                objective=self._objective,
                optimizer=self._optimizer,
                clip_norm=recipe.training.clip_norm,
                learning_rate=recipe.learning_rate,
            )
        moved = passes[0] if passes else {}  # the batch statistics of the first pass
        with torch.no_grad():
            if isinstance(places, int):  # weights and moments are views of the state's
                self._losses[:places].addcmul_(losses, batch.counted)
                for name, buffer in moved.items():
                    buffers[name].copy_(buffer)
            else:
                self._losses.index_add_(0, places, losses * batch.counted)
                moved_moments = [(self._moments[slot], parts) for slot, parts in moments.items()]
                for all_, some in (
                    (self._weights, weights),
                    (self._buffers, moved),
                    *moved_moments,
                ):
                    for name, tensor in some.items():
                        all_[name].index_copy_(0, places, tensor.detach())

    def read(self, places: Sequence[int]) -> tuple[list[Row], list[float]]:
        """Return these places' models, uint8 [row_bytes] each, and their sums of losses."""
        layout = self._recipe.layout
        index = torch.tensor(places, device=self._losses.device)
        state = _some({**self._weights, **self._buffers}, index)
        floats = [
            state[e.name].reshape(len(places), -1)
            for e in layout.entries
            if e.section is not Section.COUNTER
        ]
        counters = [
            state[e.name].reshape(len(places), -1)
            for e in layout.entries
            if e.section is Section.COUNTER
        ]
        parts = [torch.cat(floats, 1).float()] + ([torch.cat(counters, 1)] if counters else [])
        rows = torch.cat([part.view(torch.uint8) for part in parts], 1)
        return list(rows.cpu().numpy()), self._losses[index].tolist()

    def part(self, start: int, stop: int) -> VmappedModels:
        """Return the places from start to stop as a separate state, on the CPU until it is
        moved.
        """
        made = copy.copy(self)
        made._layers = self._layers.part(start, stop)
        made._weights, made._received, made._buffers = (
            _part(tensors, start, stop)
            for tensors in (self._weights, self._received, self._buffers)
        )
        made._moments = {slot: _part(parts, start, stop) for slot, parts in self._moments.items()}
        made._vectors = {
            name: _part(tensors, start, stop) for name, tensors in self._vectors.items()
        }
        made._losses = self._losses[start:stop].cpu()
        return made

    def move_to(self, device: torch.device) -> None:
        """Move the state to another device."""
        everything = (self._weights, self._received, self._buffers, *self._moments.values())
        for tensors in (*everything, *self._vectors.values()):
            tensors.update({name: tensor.to(device) for name, tensor in tensors.items()})
        self._losses = self._losses.to(device)

    def _received_at(self, places: int | Tensor, weights: Tensors) -> list[Tensor]:
        """Return the received weights; the present ones in place of those that were not
        received.
        """
        if not self._objective.uses_received:
            return []
        present = {name: weight.detach() for name, weight in weights.items()}
        return [*(present | _some(self._received, places)).values()]

    def _outputs(
        self,
        run: Callable[..., tuple[Sequence[Tensor], Tensors]],
        weights: Tensors,
        buffers: Tensors,
        batch: Batch,
    ) -> tuple[Sequence[Tensor], Tensors]:
        """Return what `run` computes of one device's tensors, for A devices, and the buffers after
        the batch.
        """
        recipe = self._recipe
        inputs = self._inputs(batch)
        bf16 = recipe.training.precision == "bf16"
        with torch.autocast(recipe.accelerator.type, torch.bfloat16, enabled=bf16):
            outputs, moved = vmap(run, randomness="error")(weights, buffers, inputs)
        return [output.float() for output in outputs] if bf16 else outputs, moved

    def _inputs(self, batch: Batch) -> Tensor:
        """Return the model's inputs [A, W, ...]."""
        inputs = self._recipe.inputs(batch.samples.flatten(), batch.changes)
        return inputs.view(*batch.samples.shape, *inputs.shape[1:])

    def _forward(
        self, weights: Tensors, buffers: Tensors, inputs: Tensor
    ) -> tuple[Sequence[Tensor], Tensors]:
        """Return one device's logits [W, classes] and its buffers after the batch."""
        moved = {name: buffer.clone() for name, buffer in buffers.items()}
        return (functional_call(self._recipe.module, (weights, moved), (inputs,)),), moved

    def _features(
        self, weights: Tensors, buffers: Tensors, inputs: Tensor
    ) -> tuple[Sequence[Tensor], Tensors]:
        """Return one device's logits [W, classes], its features [W, F], and its buffers after the
        batch.
        """
        moved = {name: buffer.clone() for name, buffer in buffers.items()}
        return with_features(self._recipe.module, inputs, (weights, moved)), moved


def _some(tensors: Mapping[str, Tensor], places: int | Tensor) -> Tensors:
    """Return the first places as views, or copies of the given ones."""
    if isinstance(places, int):
        return {name: tensor[:places] for name, tensor in tensors.items()}
    return {name: tensor.index_select(0, places) for name, tensor in tensors.items()}


def _part(tensors: Mapping[str, Tensor], start: int, stop: int) -> Tensors:
    return {name: tensor[start:stop].cpu() for name, tensor in tensors.items()}


def _tensors(recipe: Recipe, rows: npt.NDArray[np.uint8]) -> tuple[Tensors, Tensors]:
    """Return the weights and the buffers, each [S, ...], of flat models uint8 [S, row_bytes]."""
    layout = recipe.layout
    dtype = next(recipe.module.parameters()).dtype
    floats = torch.from_numpy(np.ascontiguousarray(layout.floats(rows))).to(
        recipe.accelerator, dtype
    )
    counters = torch.from_numpy(rows[:, 4 * layout.columns :].copy().view(np.int64)).to(
        recipe.accelerator
    )
    weights = Tensors()
    buffers = Tensors()
    for e in layout.entries:
        source = counters if e.section is Section.COUNTER else floats
        tensor = source[:, e.start : e.stop].clone(memory_format=torch.contiguous_format)
        (weights if e.section is Section.PARAMETER else buffers)[e.name] = tensor.reshape(
            len(rows), *e.shape
        )
    return weights, buffers


State = tuple[Tensor, Tensor]


class VmappedLayers:
    """The dropout layers and LSTMs of a module, and the generators of S devices' masks."""

    def __init__(self, module: nn.Module, seeds: Sequence[int], *, device: torch.device) -> None:
        self._dropouts = [layer for layer in module.modules() if isinstance(layer, Dropout)]
        self._lstms = [
            layer for layer in module.modules() if type(layer) is nn.LSTM and _is_unrollable(layer)
        ]
        self._sources = [
            torch.Generator(device).manual_seed(seed) for seed in seeds if self._dropouts
        ]

    @contextmanager
    def batched(self, step: VmappedStep) -> Iterator[None]:
        """Give the layers a form that vmap batches, meanwhile, for the devices of one step.

        If the step fails, the generators are as before, so that it can be taken again.
        """
        drawing = [self._sources[place] for place in step.places] if self._dropouts else []
        before = [source.get_state() for source in drawing]
        replaced: list[tuple[nn.Module, str, Callable[..., Any]]] = [
            *(
                (each, "mask", partial(_Masks.apply, each, drawing, step.counts.tolist()))
                for each in self._dropouts
            ),
            *((each, "forward", MethodType(_unrolled, each)) for each in self._lstms),
        ]
        for layer, name, function in replaced:
            setattr(layer, name, function)
        try:
            yield
        except RuntimeError:
            for source, state in zip(drawing, before, strict=True):
                source.set_state(state)
            raise
        finally:
            for layer, name, _ in replaced:
                delattr(layer, name)

    def part(self, start: int, stop: int) -> VmappedLayers:
        """Return those of the places from start to stop."""
        made = copy.copy(self)
        made._sources = self._sources[start:stop]
        return made


class _Masks(torch.autograd.Function):
    """The masks of A devices in one call of a dropout layer, each drawn as in the device's own
    training.
    """

    @staticmethod
    def forward(
        dropout: Dropout, sources: Sequence[torch.Generator], counts: Sequence[int], x: Tensor
    ) -> Tensor:
        """Draw for values that vmap does not batch, which no layer has."""
        raise RuntimeError("dropout of values that all devices share")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing: masks have no gradient."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        dropout: Dropout,
        sources: Sequence[torch.Generator],
        counts: Sequence[int],
        x: Tensor,
    ) -> tuple[Tensor, int]:
        """Return the masks [A, W, ...], and the place of A. Padding, behind a device's count, is
        kept.
        """
        x = x.movedim(in_dims[-1], 0)
        masks = x.new_ones(len(x), *dropout.mask_shape(x[0]))
        for mask, source, count in zip(masks, sources, counts, strict=True):
            mask[:count].bernoulli_(1 - dropout.p, generator=source)
        return masks, 0


def _is_unrollable(layer: nn.LSTM) -> bool:
    return is_plain(layer) and not (layer.bidirectional or layer.proj_size or layer.dropout)


def _unrolled(layer: nn.LSTM, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """Return what an LSTM returns for a batch of sequences (Hochreiter and Schmidhuber 1997), step
    by step.
    """
    x_BLF = inputs if layer.batch_first else inputs.transpose(0, 1)
    last: list[State] = []
    for number, names in enumerate(layer._all_weights):
        from_input, from_hidden, *biases = (getattr(layer, name) for name in names)
        bias = sum(biases) if biases else None
        gates_BLG = functional.linear(x_BLF, from_input, bias)
        zeros = x_BLF.new_zeros(len(x_BLF), layer.hidden_size)
        hidden, cell = (zeros, zeros) if state is None else (state[0][number], state[1][number])
        outputs = []
        for gates_BG in gates_BLG.unbind(1):
            add, keep, new, out = (gates_BG + functional.linear(hidden, from_hidden)).chunk(4, 1)
            cell = keep.sigmoid() * cell + add.sigmoid() * new.tanh()
            hidden = out.sigmoid() * cell.tanh()
            outputs.append(hidden)
        x_BLF = torch.stack(outputs, 1)
        last.append((hidden, cell))
    hiddens, cells = (torch.stack(each) for each in zip(*last, strict=True))
    return x_BLF if layer.batch_first else x_BLF.transpose(0, 1), (hiddens, cells)
