"""The parts of a model: which of its arrays nodes exchange, which are frozen, and which each device
keeps; their files.

Arrays have the names of the model's state. Frozen ones are the same at every node. The layout has
their digest: a node that builds others with its model fetches those of its parent, once, as a file
in safetensors' format. Personal ones are in no row that is sent. A device trains the exchanged and
the personal ones, whose row has the layout `whole`.

The first model of a run may be a file's, `model.initial`: its arrays must be those of the model
that the run trains.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from fedstrata.common.errors import InvalidExperiment, RefusedModel
from fedstrata.common.model import tensors
from fedstrata.common.model.layout import FrozenForm, ModelLayout, Row, Section
from fedstrata.common.model.tensors import Tensors
from fedstrata.common.settings.data import ModelSettings
from fedstrata.common.settings.tables import NAMED_MOST, proposal

INITIAL: Final = "model.initial"
NO_ARRAYS: Final[Tensors] = MappingProxyType({})
MARK_BYTES: Final = 4  # before a device's personal arrays: zeros if it has none yet


class Part(StrEnum):
    """What becomes of an array."""

    EXCHANGED = "exchanged"
    FROZEN = "frozen"
    PERSONAL = "personal"


def _fits(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def part_of_each(
    model: ModelSettings, arrays: Mapping[str, Sequence[str]], *, constant: Collection[str]
) -> dict[str, Part]:
    """Return the part of each array, by its first name; `arrays` has all names of each.

    `constant`: those that are frozen in any case. Raises InvalidExperiment for a pattern without an
    array, and an array of two parts.
    """
    found = dict.fromkeys(arrays, Part.EXCHANGED)
    for part, patterns in ((Part.FROZEN, model.frozen), (Part.PERSONAL, model.personal)):
        for pattern in patterns:
            key = f"model.{part}"
            named = [first for first, names in arrays.items() if _fits(names, pattern)]
            if not named:
                problem = f"{model.name} has no array of such a name"
                remedy = proposal(pattern, list(arrays), what="It has")
                raise InvalidExperiment(key, pattern, problem, remedy)
            for name in named:
                if part is Part.PERSONAL and found[name] is Part.FROZEN:
                    problem = f"{name} is frozen, too"
                    raise InvalidExperiment(key, pattern, problem, "Let the patterns differ.")
                found[name] = part
    return found | dict.fromkeys(constant, Part.FROZEN)


def read_frozen_file(path: Path, digest: str) -> dict[str, npt.NDArray[Any]]:
    """Return the frozen arrays of a file, by name. Raises RefusedModel if its content has another
    digest.
    """
    try:
        found, _ = tensors.read(path)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise RefusedModel(f"no file of arrays: {str(error)[:200]}") from None
    if tensors.content(found, {}) != digest:
        raise RefusedModel(f"these are not the frozen arrays with the digest {digest}")
    return found


def differences(found: Tensors, wanted: Tensors, *, known: Container[str] = ()) -> str:
    """Return how arrays differ from the wanted ones in names, shapes and types, "" for not at all.

    `known`: names that may be among the found ones.
    """
    wrong = [
        *(f"{name} is missing" for name in wanted if name not in found),
        *(f"{name} is unknown" for name in found if name not in wanted and name not in known),
        *(
            (
                f"{name} is {found[name].dtype} {list(found[name].shape)}, not {array.dtype} "
                f"{list(array.shape)}"
            )
            for name, array in wanted.items()
            if name in found
            and (found[name].shape, found[name].dtype) != (array.shape, array.dtype)
        ),
    ]
    more = f" and {len(wrong) - NAMED_MOST} more" if len(wrong) > NAMED_MOST else ""
    return "; ".join(wrong[:NAMED_MOST]) + more


def given_arrays(path: Path | None) -> dict[str, npt.NDArray[Any]]:
    """Return the frozen arrays of a file that is named by their digest, none without a file. Raises
    RefusedModel.
    """
    if path is None:
        return {}
    return read_frozen_file(path, path.name)


@dataclass(frozen=True, eq=False)
class ModelParts:
    """A model's layouts: of what is exchanged, and of the `whole` that a device trains; the same
    without personal ones.

    `frozen`: the arrays by name, of any type. `first`: the personal arrays with which a device
    begins, one after another in the order of `whole`, uint8. `constant`: names of parameters that
    are frozen because of `requires_grad`.
    """

    exchanged: ModelLayout
    whole: ModelLayout
    frozen: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    first: Row = field(default_factory=lambda: np.zeros(0, np.uint8))
    constant: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        arrays: Sequence[tuple[str, Sequence[int], Section]],
        parts: Mapping[str, Part],
        values: Mapping[str, npt.NDArray[Any]],
        *,
        constant: Collection[str] = (),
    ) -> ModelParts:
        """Return the parts of arrays, names with shapes in the order of the state; `values`: of
        those not exchanged.
        """
        frozen = {
            name: array.copy() for name, array in values.items() if parts[name] is Part.FROZEN
        }
        form = FrozenForm(tensors.content(frozen, {}), tensors.size(frozen, {})) if frozen else None
        listed = [(name, shape, section) for name, shape, section in arrays if name not in frozen]
        exchanged = [each for each in listed if parts[each[0]] is Part.EXCHANGED]
        layout = ModelLayout.build(exchanged, form)
        if len(exchanged) == len(listed):
            return cls(layout, layout, frozen, constant=frozenset(constant))
        made = cls(layout, ModelLayout.build(listed, form), frozen, constant=frozenset(constant))
        row = made.whole.empty()
        views = made.whole.views(row)
        for name in made.personal:
            views[name][...] = values[name]
        return cls(layout, made.whole, frozen, made.personal_of(row), frozenset(constant))

    @cached_property
    def personal(self) -> tuple[str, ...]:
        """The names of the personal arrays, in the order of `whole`."""
        exchanged = {entry.name for entry in self.exchanged.entries}
        return tuple(entry.name for entry in self.whole.entries if entry.name not in exchanged)

    @property
    def kept_bytes(self) -> int:
        """Bytes of what a device keeps of its personal arrays, 0 without any."""
        if self.personal:
            return MARK_BYTES + self.first.size
        return 0

    @cached_property
    def columns(self) -> npt.NDArray[np.int64]:
        """The places in `whole` of the exchanged trainable columns, int64 [D]."""
        places = {entry.name: np.arange(entry.start, entry.stop) for entry in self.whole.entries}
        named = [
            entry.name for entry in self.exchanged.entries if entry.section is Section.PARAMETER
        ]
        return np.concatenate([places[name] for name in named])

    def join(self, model: Row, kept: Row, whole: Row) -> None:
        """Write a row of `whole`: the exchanged arrays of a model, and the personal ones that a
        device has kept.
        """
        exchanged = self.exchanged.views(model)
        personal = kept[MARK_BYTES:] if kept[:MARK_BYTES].any() else self.first
        start = 0
        for name, view in self.whole.views(whole).items():
            if name in exchanged:
                view[...] = exchanged[name]
            else:
                stop = start + view.nbytes
                view[...] = np.frombuffer(personal[start:stop].tobytes(), view.dtype).reshape(
                    view.shape
                )
                start = stop

    def split(self, whole: Row, model: Row, kept: Row) -> None:
        """Write what is exchanged and what is kept of a row of `whole`."""
        views = self.whole.views(whole)
        for name, view in self.exchanged.views(model).items():
            view[...] = views[name]
        kept[:MARK_BYTES] = 1
        kept[MARK_BYTES:] = self.personal_of(whole)

    def personal_of(self, whole: Row) -> Row:
        """Return the personal arrays of a row of `whole`, one after another, uint8."""
        views = self.whole.views(whole)
        parts = [
            np.ascontiguousarray(views[name]).reshape(-1).view(np.uint8) for name in self.personal
        ]
        return np.concatenate(parts)
