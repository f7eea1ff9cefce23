"""Rows of a run's tables (rounds.csv, links.csv, devices.csv): each class writes its cells and reads them again.

A field is the column of its name (`from_`: `from`), a mapping is a column for each key. Annotations have the formats of
cells; None is an empty cell.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias, get_type_hints

from common.accounting.child_report import TrainingPath
from common.experiment.tiers import TIER_NAME
from common.protocol.timeline import GLOBAL_PHASES

BYTES: Final = rf"(?!(epochs|omega|spread)_){TIER_NAME}_(up|down)_bytes"  # the other names begin columns of nodes
BROKER: Final = "broker"  # kind of the rows in links.csv that count a parent's whole connection

Cell: TypeAlias = int | float | str


@dataclass(frozen=True, slots=True)
class _Column:
    """Format of a field. `text`: how a value is written, "" = by `str`."""

    parse: Callable[[str], Any]
    text: str = ""

    def names(self, field: str, value: Any) -> Iterable[str]:
        return (field.removesuffix("_"),)

    def cells(self, value: Any) -> Iterable[Cell]:
        return (self.cell(value),)

    def values(self, field: str, value: Any) -> dict[str, Any]:
        return {field.removesuffix("_"): _plain(value)}

    def read(self, field: str, cells: Mapping[str, str]) -> Any:
        return self.parse(cells[field.removesuffix("_")])

    def cell(self, value: Any) -> Cell:
        if isinstance(value, tuple):
            return " ".join(value)
        return "" if value is None else self.text.format(value) if self.text else value


@dataclass(frozen=True, slots=True)
class _Columns(_Column):
    """Format of a mapping. `pattern`: its columns' names; `keys`: its keys, if they are always the same.

    `columns`: otherwise those that match this.
    """

    pattern: str = "{}"
    keys: tuple[str, ...] = ()
    columns: str = ".*"

    def names(self, field: str, value: Mapping[str, Any]) -> Iterable[str]:
        return map(self.pattern.format, self.keys or value)

    def cells(self, value: Mapping[str, Any]) -> Iterable[Cell]:
        return [self.cell(value[key]) for key in self.keys or value]

    def values(self, field: str, value: Mapping[str, Any]) -> dict[str, Any]:
        return {self.pattern.format(key): _plain(value[key]) for key in self.keys or value}

    def read(self, field: str, cells: Mapping[str, str]) -> Any:
        prefix = self.pattern.removesuffix("{}")
        columns = (each for each in cells if each.startswith(prefix) and re.fullmatch(self.columns, each))
        keys = self.keys or [column.removeprefix(prefix) for column in columns]
        return {key: self.parse(cells[self.pattern.format(key)]) for key in keys}


def _plain(value: Any) -> Any:
    """Return what JSON can hold: None for a non-finite number, a list for a tuple."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value


def finite(cell: Any) -> float:
    """Return a finite number. Raises ValueError or TypeError."""
    found = float(cell)
    if not math.isfinite(found):
        raise ValueError(f"{cell!r} is not a finite number")
    return found


def _maybe(cell: str) -> float | None:
    """Return a number, or None for an empty cell or a non-finite loss."""
    found = float(cell) if cell else math.nan
    return found if math.isfinite(found) else None


def _count(cell: str) -> int | None:
    return int(cell) if cell else None


_Int: TypeAlias = Annotated[int, _Column(int)]
_Count: TypeAlias = Annotated[int | None, _Column(_count)]
_Text: TypeAlias = Annotated[str, _Column(str)]
_Names: TypeAlias = Annotated[tuple[str, ...], _Column(lambda cell: tuple(cell.split()))]
_Short: TypeAlias = Annotated[float | None, _Column(_maybe, "{:.6g}")]
_Rate: TypeAlias = Annotated[float | None, _Column(_maybe, "{:.4g}")]
_Milliseconds: TypeAlias = Annotated[float | None, _Column(_maybe)]
_Seconds: TypeAlias = Annotated[float, _Column(finite, "{:.6g}")]
_Path: TypeAlias = Annotated[TrainingPath, _Column(TrainingPath)]


class Record:
    """Base of the rows."""

    __slots__ = ()
    _formats: ClassVar[Mapping[str, _Column]]  # of the fields, in order

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True).items()
        cls._formats = {field: hint.__metadata__[0] for field, hint in hints if field != "_formats"}

    def columns(self) -> list[str]:
        """Return the columns, in order."""
        return [name for field, form in self._formats.items() for name in form.names(field, getattr(self, field))]

    def cells(self) -> list[Cell]:
        """Return the cells, in the order of the columns."""
        found: list[Cell] = []
        for field, form in self._formats.items():
            found += form.cells(getattr(self, field))
        return found

    def values(self) -> dict[str, Any]:
        """Return the numbers, texts and lists by column, in order; None where a cell is empty."""
        found: dict[str, Any] = {}
        for field, form in self._formats.items():
            found |= form.values(field, getattr(self, field))
        return found

    @classmethod
    def required(cls) -> list[str]:
        """Return the columns that every table of these rows has, in order."""
        return [field.removesuffix("_") for field, form in cls._formats.items() if not isinstance(form, _Columns)]

    @classmethod
    def read(cls, cells: Mapping[str, str]) -> Self:
        """Read a row. Raises KeyError, ValueError."""
        return cls(**{field: form.read(field, cells) for field, form in cls._formats.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRoundRecord(Record):
    """A row of rounds.csv: one global round. The scores and losses of a model are None until it is evaluated.

    `other_scores`: columns `score` and `mixed_score` of an experiment whose score is not accuracy, which then is None.

    `phases`: seconds by GLOBAL_PHASES; `bytes_`: MQTT bytes by `TIER_up_bytes`, `TIER_down_bytes`; `missing`,
    `refused`: children of the cloud without an upload. `epochs`, `omega`: by child, None without a result; `spread`: by
    node, None for a rule of one model.
    """

    global_round: _Int
    elapsed_s: Annotated[float, _Column(finite)]
    accuracy: _Short = None
    loss: _Short = None
    mixed_accuracy: _Short = None
    mixed_loss: _Short = None
    other_scores: Annotated[Mapping[str, float | None], _Columns(_maybe, "{:.6g}", columns=r"(mixed_)?score")] = (
        dataclasses.field(default_factory=dict)
    )
    train_loss: _Short
    phases: Annotated[Mapping[str, float], _Columns(finite, pattern="{}_s", keys=GLOBAL_PHASES)]
    sgd_steps: _Int
    path_steps: _Int
    bytes_: Annotated[Mapping[str, int], _Columns(int, columns=BYTES)]
    missing: _Names
    refused: _Names
    epochs: Annotated[Mapping[str, int | None], _Columns(_count, pattern="epochs_{}")]
    omega: Annotated[Mapping[str, float | None], _Columns(_maybe, "{:.6g}", pattern="omega_{}")]
    spread: Annotated[Mapping[str, float | None], _Columns(_maybe, "{:.6g}", pattern="spread_{}")]

    @property
    def score(self) -> float | None:
        """The score of the model, which the run's manifest names; accuracy by default."""
        return self.other_scores["score"] if self.other_scores else self.accuracy

    @property
    def seconds(self) -> float:
        """The sum of all phases, seconds."""
        return math.fsum(self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord(Record):
    """A row of links.csv: one direction of a link (`cloud.links`); None = not reported."""

    tier: _Text
    from_: _Text
    to: _Text
    kind: _Text
    payload_bytes: _Count = None
    message_bytes: _Count = None
    wire_bytes: _Count = None
    overhead_percent: _Rate = None
    segments: _Count = None
    retransmitted_bytes: _Count = None
    retransmitted_segments: _Count = None
    rtt_ms: _Milliseconds = None
    rtt_min_ms: _Milliseconds = None
    measured_mbit: _Rate = None
    probe_bytes: _Count = None

    @property
    def goes(self) -> str:
        """`from to`, the key of a link's direction in a prediction."""
        return f"{self.from_} {self.to}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord(Record):
    """A row of devices.csv: one device in one global round. `node`: its path, `cloud/institution-0/device-3`."""

    global_round: _Int
    node: _Text
    samples: _Int
    local_rounds: _Int
    epochs: _Int
    sgd_steps: _Int
    loss: _Short
    train_s: _Seconds
    wait_s: _Seconds
    pause_s: _Seconds
    path: _Path

    @property
    def device(self) -> str:
        """The device's name."""
        return self.node.rpartition("/")[2]

    @property
    def parent(self) -> str:
        """The name of the device's parent."""
        return self.node.split("/")[-2]


def to_csv(records: Sequence[Record], *, header: bool) -> str:
    """Return the lines of rows, under a line with their columns if `header`."""
    text = io.StringIO()
    table = csv.writer(text)
    if header and records:
        table.writerow(records[0].columns())
    table.writerows(record.cells() for record in records)
    return text.getvalue()


def rows_of(text: str) -> Iterator[dict[str, str]]:
    """Yield the cells of each row of a table, without a last row that a kill cut short. Raises csv.Error."""
    for row in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""), strict=True):
        if None in row or None in row.values():
            raise csv.Error("it has not as many cells as the table has columns")
        yield row
