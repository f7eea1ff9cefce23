"""Which dimensions of a model's tensors a permutation of a layer's neurons moves together.

A group is a layer's neurons (channels, hidden units): its own weights, bias and norm by their first
dimension, and the next layer's weights by their second one. If all places of a group are permuted
alike, the model computes the same.

The groups follow from names and shapes alone, for fedstrata's models: layers in the order of the
state, each reading the one before; residual blocks `stageN.M` and `layerN.M` with an optional
`shortcut`; LSTMs. A sum of channels belongs to one group. Where a shortcut pads with zeros (He's
option A), its channels stay where they are, as do all neurons that a layer of another form reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstrata import Entry, ModelLayout

Row: TypeAlias = "npt.NDArray[np.uint8]"

Indices: TypeAlias = "npt.NDArray[np.int64]"
BLOCK: Final = re.compile(r"((?:stage|layer)\d+\.\d+)\.")
SHORTCUT: Final = ".shortcut"
GATES: Final = 4  # of an LSTM


@dataclass(frozen=True, slots=True)
class NeuronPlace:
    """The first or second dimension of a tensor, which has `outer` times the group's neurons.

    `reads`: the group that the tensor's second dimension belongs to; None = none, or this place is
    that dimension.
    """

    entry: Entry
    axis: int
    outer: int = 1
    reads: NeuronGroup | None = None


@dataclass(eq=False, slots=True)
class NeuronGroup:
    """The neurons of a layer: their number, and the places where they are."""

    size: int
    places: list[NeuronPlace] = field(default_factory=list)

    def own(self) -> list[NeuronPlace]:
        """Return the places of the neurons' own weights, biases and norms."""
        return [place for place in self.places if place.axis == 0]


def groups_of(layout: ModelLayout) -> list[NeuronGroup]:
    """Return a model's groups, in the order of its layers; without those of the inputs, the classes
    and the padded.
    """
    reader = _Reader()
    entries = [entry for entry in layout.in_state_order if entry.section in ("parameter", "buffer")]
    for block, parts in groupby(entries, key=_block_of):
        modules = [list(each) for _, each in groupby(parts, key=lambda entry: entry.module)]
        if block:
            reader.read_block(modules)
        else:
            for module in modules:
                reader.read(module)
    return reader.finish()


def permute(layout: ModelLayout, row: Row, group: NeuronGroup, order: Indices) -> None:
    """Permute a group of a flat model in place: neuron i becomes the one that was `order[i]`."""
    floats = layout.floats(row)
    for place in group.places:
        values = folded(floats[place.entry.start : place.entry.stop], place, group.size)
        values[...] = values[:, :, order]


def folded(values: npt.NDArray[Any], place: NeuronPlace, size: int) -> npt.NDArray[Any]:
    """Return a tensor's values as [before, outer, size, rest], a view whose third dimension are the
    neurons.

    A layer that reads flattened channels has several values for each.
    """
    before = 1 if place.axis == 0 else place.entry.shape[0]
    return values.reshape(before, place.outer, size, -1)


def _block_of(entry: Entry) -> str:
    found = BLOCK.match(entry.name)
    if found:
        return found[1]
    return ""


class _Reader:
    """The groups of the layers read so far; `_now` is that of the last layer's outputs, None =
    inputs, or fixed.
    """

    def __init__(self) -> None:
        self._groups: list[NeuronGroup] = []
        self._now: NeuronGroup | None = None

    def read(self, module: Sequence[Entry]) -> None:
        """Read the tensors of one layer."""
        shapes = {entry.name.rpartition(".")[2]: entry.shape for entry in module}
        if "weight_hh_l0" in shapes:
            self._read_lstm(module)
        elif module[0].module == "embedding" or "weight" not in shapes:
            self._drop(self._now)
            self._now = None
        elif len(shapes["weight"]) == 1:
            self._fit(shapes["weight"][0])
            self._add(self._now, module)
        else:
            self._fit(shapes["weight"][1])
            inputs = self._now
            self._now = self._new(shapes["weight"][0])
            self._read_weights(module, inputs, self._now)

    def read_block(self, modules: Sequence[Sequence[Entry]]) -> None:
        """Read a residual block: its main path, then its shortcut."""
        stream = self._now
        main = [module for module in modules if SHORTCUT not in module[0].name]
        shortcut = [module for module in modules if SHORTCUT in module[0].name]
        for module in main:
            self.read(module)
        outputs = self._now
        if not shortcut:
            if stream is None or outputs is None or stream.size != outputs.size:
                self._drop(outputs, stream)
                self._now = None
            else:
                stream.places += outputs.places
                self._groups.remove(outputs)
                self._now = stream
            return
        for module in shortcut:
            if len(module[0].shape) == 1:
                self._add(outputs, module)
            else:
                self._read_weights(module, stream, outputs)

    def finish(self) -> list[NeuronGroup]:
        """Return the groups without the last one, of the classes."""
        self._drop(self._now)
        return self._groups

    def _new(self, size: int) -> NeuronGroup:
        self._groups.append(NeuronGroup(size))
        return self._groups[-1]

    def _fit(self, numbers: int) -> None:
        """Leave the last layer's neurons where they are if the next one does not read as many of
        each.
        """
        if self._now is not None and numbers % self._now.size:
            self._drop(self._now)
            self._now = None

    def _drop(self, *groups: NeuronGroup | None) -> None:
        self._groups = [group for group in self._groups if group not in groups]

    def _read_weights(
        self, module: Iterable[Entry], inputs: NeuronGroup | None, outputs: NeuronGroup | None
    ) -> None:
        for entry in module:
            reads = None
            if len(entry.shape) > 1 and inputs is not None:
                reads = inputs
                inputs.places.append(NeuronPlace(entry, 1))
            if outputs is not None:
                outputs.places.append(NeuronPlace(entry, 0, reads=reads))

    def _add(self, group: NeuronGroup | None, module: Iterable[Entry]) -> None:
        if group is not None:
            group.places += [NeuronPlace(entry, 0) for entry in module]

    def _read_lstm(self, module: Sequence[Entry]) -> None:
        for _, layer in groupby(module, key=lambda entry: entry.name.rpartition("_l")[2]):
            inputs = self._now
            entries = list(layer)
            self._now = hidden = self._new(entries[0].shape[0] // GATES)
            for entry in entries:
                reads = None
                if len(entry.shape) > 1:
                    reads = hidden if "_hh_" in entry.name else inputs
                if reads is not None:
                    reads.places.append(NeuronPlace(entry, 1))
                hidden.places.append(NeuronPlace(entry, 0, outer=GATES, reads=reads))
