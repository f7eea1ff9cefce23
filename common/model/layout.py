"""Layout of a model's state in one flat buffer.

    row = [ trainable float32 columns | float32 buffers | int64 buffers | float32 extras ]
            D                            Db               Q               E

Entries keep the order of the model's state_dict *within* each section. So the trainable columns are
contiguous: norms and similarities read `row[:D]` and never need a mask. Extras are vectors that
some methods send behind the model, such as SCAFFOLD's control variates; without them the row is the
model. This module depends only on numpy; `common.learning.models.layout_of` creates layouts of
torch modules.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Final, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from fedstrata.common.errors import InvalidExperiment, RefusedModel, WireError
from fedstrata.common.lazy import np, npt

Row: TypeAlias = "npt.NDArray[np.uint8]"

MOST_DIMENSIONS: Final = 32  # numpy 1.26's limit
NAME_MOST: Final = 512  # characters
EXTRAS: Final = "extras."  # of the names of entries
ROW_BYTES_MOST: Final = 1 << 35  # of an announced layout; nothing is allocated for a larger one
_SHARED: Final = WeakValueDictionary[str, Row]()  # models of this process, by blob


class Section(StrEnum):
    """The section of the row that an entry belongs to."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    COUNTER = "counter"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the state: `start` and `stop` are columns in the numbering of its section.

    PARAMETER and BUFFER share the numbering 0 .. D+Db of the float32 part. COUNTER has its own, 0
    .. Q, and EXTRA its own, 0 .. E.
    """

    name: str
    shape: tuple[int, ...]
    section: Section
    start: int
    stop: int

    @property
    def module(self) -> str:
        """The layer of the entry: its name up to the last dot."""
        return self.name.rpartition(".")[0]


class FrozenForm(NamedTuple):
    """A model's frozen arrays: the digest of their content, 16 hexadecimal digits, and the bytes of
    a file of them.
    """

    digest: str
    nbytes: int


@dataclass(frozen=True)
class ModelLayout:
    """Names, shapes and places of a model's exchanged tensors; equal layouts have equal digests.

    `frozen`: of the arrays that no row holds because all nodes have them (`parts.py`), None without
    any.
    """

    entries: tuple[Entry, ...]
    frozen: FrozenForm | None = None

    @classmethod
    def build(
        cls,
        tensors: Iterable[tuple[str, Sequence[int], Section | str]],
        frozen: FrozenForm | None = None,
    ) -> ModelLayout:
        """Place the tensors, given in state_dict order, into the row."""
        listed = [(name, shape, Section(kind)) for name, shape, kind in tensors]
        entries: list[Entry] = []
        used = Counter[Section]()
        for section in Section:
            numbering = Section.PARAMETER if section is Section.BUFFER else section
            for name, shape, kind in listed:
                if kind is section:
                    start = used[numbering]
                    used[numbering] += prod(shape)
                    entries.append(Entry(name, tuple(shape), section, start, used[numbering]))
        if not any(entry.section is Section.PARAMETER for entry in entries):
            raise InvalidExperiment(
                "model.name", "", "the model has no trainable parameter", "Choose another model."
            )
        return cls(tuple(entries), frozen)

    @classmethod
    def from_json(cls, text: str) -> ModelLayout:
        """Read what `to_json` wrote. Raises WireError."""
        try:
            read = json.loads(text)
            listed, frozen = (
                (read["exchanged"], _frozen(*read["frozen"]))
                if isinstance(read, dict)
                else (read, None)
            )
            tensors = [(name, shape, Section(kind)) for name, shape, kind in listed]
            if not all(_is_name(name) and _is_shape(shape) for name, shape, _ in tensors):
                raise ValueError("no name or no shape")
            if len({name for name, _, _ in tensors}) < len(tensors):
                raise ValueError("duplicate name")
            if 8 * sum(prod(shape) for _, shape, _ in tensors) > 2 * ROW_BYTES_MOST:
                raise ValueError(f"more than {ROW_BYTES_MOST >> 30} GiB")
            return cls.build(tensors, frozen)
        except (ValueError, TypeError, KeyError, RecursionError, InvalidExperiment) as error:
            raise WireError(f"not a model layout: {str(error)[:200]}") from None

    def to_json(self) -> str:
        """Return the layout as JSON, the form for nodes without torch."""
        listed = [[e.name, e.shape, e.section] for e in self.entries]
        found: object = listed
        if self.frozen:
            found = {"exchanged": listed, "frozen": self.frozen}
        return json.dumps(found, separators=(",", ":"))

    @cached_property
    def parameters(self) -> int:
        """D: trainable columns."""
        return max(e.stop for e in self.entries if e.section is Section.PARAMETER)

    @cached_property
    def columns(self) -> int:
        """D + Db: all float32 columns."""
        return max(e.stop for e in self.entries if e.section in (Section.PARAMETER, Section.BUFFER))

    @cached_property
    def counters(self) -> int:
        """Q: int64 columns."""
        return max((e.stop for e in self.entries if e.section is Section.COUNTER), default=0)

    @cached_property
    def extras(self) -> int:
        """E: float32 columns of extras."""
        return max((e.stop for e in self.entries if e.section is Section.EXTRA), default=0)

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of the model at the start of a row: 4 * (D + Db) + 8 * Q."""
        return 4 * self.columns + 8 * self.counters

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row: those of the model, and 4 * E."""
        return self.model_bytes + 4 * self.extras

    def with_extras(self, vectors: Mapping[str, Sequence[int]]) -> ModelLayout:
        """Return the layout of this model with vectors of these names and shapes behind it."""
        if not vectors:
            return self  # the same object: each device of a process has several
        listed = [(entry.name, entry.shape, entry.section) for entry in self.entries]
        added = [(f"{EXTRAS}{name}", shape, Section.EXTRA) for name, shape in vectors.items()]
        return self.build([*listed, *added], self.frozen)

    def differs_in_frozen(self, other: ModelLayout) -> bool:
        """Return whether two layouts are equal but for the content of their frozen arrays, which
        have one size.
        """
        if self.frozen is None or other.frozen is None or self.frozen.nbytes != other.frozen.nbytes:
            return False
        return self.entries == other.entries and self.frozen != other.frozen

    @cached_property
    def in_state_order(self) -> tuple[Entry, ...]:
        """The entries in the order of torch's state: by module, parameters before buffers and
        counters.

        Modules are in the order of their first entry here, so modules without a parameter come
        last.
        """
        modules: dict[str, int] = {}
        for entry in self.entries:
            modules.setdefault(entry.module, len(modules))
        return tuple(sorted(self.entries, key=lambda entry: modules[entry.module]))

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits over names, shapes and sections, and over the frozen arrays."""
        text = ";".join(f"{e.name}:{e.section}:{','.join(map(str, e.shape))}" for e in self.entries)
        if self.frozen:
            text += f";frozen:{self.frozen.digest}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def head(self) -> tuple[Entry, Entry | None]:
        """The weight [C, F] and the bias [C] of the model's last linear layer. Raises
        InvalidExperiment.
        """
        named = {entry.name: entry for entry in self.entries if entry.section is Section.PARAMETER}
        weights = [
            entry
            for entry in named.values()
            if entry.name.endswith("weight") and len(entry.shape) == 2
        ]
        if not weights:
            problem = "it has no linear layer, whose inputs are the features"
            remedy = "Use another model."
            raise InvalidExperiment("model.name", "", problem, remedy)
        return weights[-1], named.get(f"{weights[-1].name.removesuffix('weight')}bias")

    def empty(self) -> Row:
        """Return an uninitialised row, uint8 [row_bytes]."""
        return np.empty(self.row_bytes, np.uint8)

    def floats(self, row: Row) -> npt.NDArray[np.float32]:
        """Return the float32 part of a row, or of rows [K, row_bytes], as a view [..., D + Db]."""
        return row[..., : 4 * self.columns].view(np.float32)

    def integers(self, row: Row) -> npt.NDArray[np.int64]:
        """Return the counters of a row, int64 [Q], as a view (possibly unaligned)."""
        return np.frombuffer(row, np.int64, self.counters, 4 * self.columns)

    def extra_columns(self, row: Row) -> npt.NDArray[np.float32]:
        """Return the extras of a row, or of rows [K, row_bytes], as a view [..., E]."""
        return row[..., self.model_bytes :].view(np.float32)

    @cached_property
    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the vectors behind the model, by name."""
        return {
            e.name.removeprefix(EXTRAS): e.shape for e in self.entries if e.section is Section.EXTRA
        }

    def extras_of(self, rows: Row) -> dict[str, npt.NDArray[np.float32]]:
        """Return the vectors behind the model of a row, or of rows [K, row_bytes], as views [...,
        *shape], by name.
        """
        columns = self.extra_columns(rows)
        return {
            e.name.removeprefix(EXTRAS): columns[..., e.start : e.stop].reshape(
                *columns.shape[:-1], *e.shape
            )
            for e in self.entries
            if e.section is Section.EXTRA
        }

    def views(self, row: Row) -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int64]]:
        """Return each entry as a view of the row in its own shape, by name."""
        floats = self.floats(row)
        sections: dict[Section, npt.NDArray[np.float32] | npt.NDArray[np.int64]]
        sections = {Section.COUNTER: self.integers(row), Section.EXTRA: self.extra_columns(row)}
        return {
            e.name: sections.get(e.section, floats)[e.start : e.stop].reshape(e.shape)
            for e in self.entries
        }

    def flatten(self, state: Mapping[str, npt.NDArray[np.generic]], row: Row) -> None:
        """Write named arrays into a row. Raises RefusedModel on a missing name or another shape."""
        for name, view in self.views(row).items():
            source = state.get(name)
            if source is None or source.shape != view.shape:
                have = "missing" if source is None else f"of shape {source.shape}"
                raise RefusedModel(
                    f"entry {name} is {have}, the model's layout requires {view.shape}"
                )
            np.copyto(view, source, casting="same_kind")

    def check_finite(self, row: Row) -> None:
        """Refuse a row with NaN or Inf. Raises RefusedModel naming the entry."""
        # large finite values overflow here, and pass below
        with np.errstate(over="ignore", invalid="ignore"):
            # One pass, no temporary: any NaN or Inf survives the sum.
            sums = [
                np.dot(columns, columns) for columns in (self.floats(row), self.extra_columns(row))
            ]
        if np.isfinite(sums).all():
            return
        for name, values in self.views(row).items():
            if not np.isfinite(values).all():
                raise RefusedModel(f"entry {name} holds NaN or Inf")


@dataclass(frozen=True, slots=True)
class LinkLayouts:
    """What the rows of a tier's links hold: the model, and the model with the extras that go down
    and up.
    """

    model: ModelLayout
    down: ModelLayout
    up: ModelLayout

    @classmethod
    def plain(cls, model: ModelLayout) -> LinkLayouts:
        """Return the layouts without extras."""
        return cls(model, model, model)


def shared_row(blob: str, data: bytes) -> Row:
    """Return a model's bytes as a row, read-only, without a copy; equal ones of this process share
    one.

    An institution's devices get the same model. The row's `base` is the bytes that are shared. They
    are freed with the last such row.
    """
    row = _SHARED.get(blob)
    if row is None or row.base != data:  # equal ids prove nothing
        row = _SHARED[blob] = np.frombuffer(data, np.uint8)
    return row


def _frozen(digest: object, nbytes: object) -> FrozenForm:
    if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{16}", digest)):
        raise ValueError("no digest of frozen arrays")
    if not (type(nbytes) is int and 0 < nbytes <= ROW_BYTES_MOST):
        raise ValueError(f"frozen arrays of no size, or of more than {ROW_BYTES_MOST >> 30} GiB")
    return FrozenForm(digest, nbytes)


def _is_name(value: object) -> bool:
    # no lone surrogate is
    return isinstance(value, str) and len(value) <= NAME_MOST and value.isprintable()


def _is_shape(value: object) -> bool:
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS:
        return False
    return all(type(d) is int and 0 <= d <= ROW_BYTES_MOST for d in value)
