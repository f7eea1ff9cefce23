"""Layers that vmap cannot batch as they are: dropout, with each device's own masks, and LSTMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.learning.nets.layers import Dropout, is_plain
from device.vmapped.schedule import VmappedStep

State = tuple[Tensor, Tensor]


class VmappedLayers:
    """The dropout layers and LSTMs of a module, and the generators of S devices' masks."""

    def __init__(self, module: nn.Module, seeds: Sequence[int], *, device: torch.device) -> None:
        self._dropouts = [layer for layer in module.modules() if isinstance(layer, Dropout)]
        self._lstms = [layer for layer in module.modules() if type(layer) is nn.LSTM and _is_unrollable(layer)]
        self._sources = [torch.Generator(device).manual_seed(seed) for seed in seeds if self._dropouts]

    @contextmanager
    def batched(self, step: VmappedStep) -> Iterator[None]:
        """Give the layers a form that vmap batches, meanwhile, for the devices of one step.

        If the step fails, the generators are as before, so that it can be taken again.
        """
        drawing = [self._sources[place] for place in step.places] if self._dropouts else []
        before = [source.get_state() for source in drawing]
        replaced: list[tuple[nn.Module, str, Callable[..., Any]]] = [
            *((each, "mask", partial(_Masks.apply, each, drawing, step.counts.tolist())) for each in self._dropouts),
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
        made = object.__new__(VmappedLayers)
        made._dropouts, made._lstms, made._sources = self._dropouts, self._lstms, self._sources[start:stop]
        return made


class _Masks(torch.autograd.Function):
    """The masks of A devices in one call of a dropout layer, each drawn as in the device's own training."""

    @staticmethod
    def forward(dropout: Dropout, sources: Sequence[torch.Generator], counts: Sequence[int], x: Tensor) -> Tensor:
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
        """Return the masks [A, W, ...], and the place of A. Padding, behind a device's count, is kept."""
        x = x.movedim(in_dims[-1], 0)
        masks = x.new_ones(len(x), *dropout.mask_shape(x[0]))
        for mask, source, count in zip(masks, sources, counts, strict=True):
            mask[:count].bernoulli_(1 - dropout.p, generator=source)
        return masks, 0


def _is_unrollable(layer: nn.LSTM) -> bool:
    return is_plain(layer) and not (layer.bidirectional or layer.proj_size or layer.dropout)


def _unrolled(layer: nn.LSTM, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """Return what an LSTM returns for a batch of sequences (Hochreiter and Schmidhuber 1997), step by step."""
    x_BLF = inputs if layer.batch_first else inputs.transpose(0, 1)
    last: list[State] = []
    for number, names in enumerate(layer._all_weights):
        from_input, from_hidden, *biases = (getattr(layer, name) for name in names)
        gates_BLG = functional.linear(x_BLF, from_input, sum(biases) if biases else None)
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
