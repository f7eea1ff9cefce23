"""Rows of a run's tables (rounds.csv, links.csv, devices.csv): each class writes its cells and
reads them again.

A field is the column of its name (`from_`: `from`), a mapping is a column for each key. Annotations
have the formats of cells; None is an empty cell.

links.csv has, per link and direction, the bytes of models, of their extras, of frozen arrays, of
control messages, and of all.
The `all` rows have three counts: payload (blobs and message bodies), MQTT packets, and the bytes of
the child's broker connection, as its kernel counted them. That connection carries only this link.
So the kernel's count exceeds the others by logins, subscriptions, presences, acknowledgements and
pings. The child is the sender of the upward direction, and its kernel knows the retransmissions of
that direction only. A parent's connection carries all its links and has its own rows, `broker`.
Counts without kernel statistics are empty.

Payload and packets are counted on arrival. Wire bytes are those of the child's last report: during
a run they lag behind, and the unreported bytes of a killed child are missing. Before the run each
link was calibrated (`measured_mbit`) with `probe_bytes` of noise. The wire bytes include the noise,
the other counts and the overhead do not.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, repeat
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self, TypeAlias, get_type_hints

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.counters import LINK_KINDS, Direction
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.accounting.traffic import Measured, TcpStats, Traffic
from fedstrata.common.accounting.work import TrainingPath
from fedstrata.common.experiment.attackers import SUCCESS
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import TIER_NAME
from fedstrata.common.host.energy_meters import EnergySource
from fedstrata.common.protocol.round_state import GLOBAL_PHASES
from fedstrata.common.settings.topology import CLOUD

# The other names begin columns of nodes and tiers.
BYTES: Final = rf"(?!(epochs|omega|spread|epsilon)_){TIER_NAME}_(up|down)_bytes"
RARE: Final = ("extras", "frozen")  # kinds of bytes that most runs have not
BROKER: Final = "broker"  # kind of the rows in links.csv that count a parent's whole connection

# Of the devices that scored a model: their number, their samples, loss and score over all of these;
# then over devices the mean score, that of the worst tenth, and the standard deviation. Further
# scores are over all samples.
STATISTICS: Final = ("scored", "samples", "loss", "score", "mean", "worst", "spread")
DEVICES: Final = "devices"  # they scored the global model
DISPATCHED: Final = "dispatched"  # or each one of several models
PERSONALISED: Final = "personalised"  # or each the one that it had trained
HONEST: Final = "honest"  # that scored the global model, without adversaries
FURTHER: Final = r"score_(?!.*_(up|down)_bytes$).+"
OF_DEVICES: Final = (
    rf"({DEVICES}|{DISPATCHED}|{PERSONALISED}|{HONEST})_({'|'.join(STATISTICS)}|{FURTHER})"
)
OF_MODEL: Final = rf"(mixed_)?score|{SUCCESS}(_[0-9]+)?|{FURTHER}"
COSTS: Final = ("joules", "train_joules", "energy_source", "cpu_s", "memory_bytes", "celsius")
AGAINST: Final = ("adversary", "used", "refused")  # of a device in an experiment with adversaries
OF_DEVICE: Final = rf"{PERSONALISED}_(loss|score|s|{FURTHER})|test_{FURTHER}|{'|'.join(AGAINST)}"

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
        if value is None:
            return ""
        return self.text.format(value) if self.text else value


@dataclass(frozen=True, slots=True)
class _Columns(_Column):
    """Format of a mapping. `pattern`: its columns' names; `keys`: its keys, if they are always the
    same.

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
        keys = self.keys or _keys_in(tuple(cells), self.pattern.removesuffix("{}"), self.columns)
        return {key: self.parse(cells[self.pattern.format(key)]) for key in keys}


@lru_cache(maxsize=128)  # all rows of a table have the same names
def _keys_in(names: tuple[str, ...], prefix: str, columns: str) -> list[str]:
    """Return what follows a prefix in those names of columns that match an expression."""
    return [
        name.removeprefix(prefix)
        for name in names
        if name.startswith(prefix) and re.fullmatch(columns, name)
    ]


def _plain(value: Any) -> Any:
    """Return what JSON can hold: None for a non-finite number, a list for a tuple."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, tuple):
        return list(value)
    return value


def finite(cell: Any) -> float:
    """Return a finite number. Raises ValueError or TypeError."""
    found = float(cell)
    if not math.isfinite(found):
        raise ValueError(f"{cell!r} is not a finite number")
    return found


def _maybe(cell: str) -> float | None:
    """Return a number, or None for an empty cell or a non-finite loss."""
    found = float(cell) if cell else math.nan
    if math.isfinite(found):
        return found
    return None


def _count(cell: str) -> int | None:
    if cell:
        return int(cell)
    return None


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
    """Base of the rows.

    Every table must have the column of a plain field, whatever its default: a folder without it is
    refused as damaged. The columns of a mapping are optional.
    """

    __slots__ = ()
    _formats: ClassVar[Mapping[str, _Column]]  # of the fields, in order

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True).items()
        cls._formats = {field: hint.__metadata__[0] for field, hint in hints if field != "_formats"}

    def columns(self) -> list[str]:
        """Return the columns, in order."""
        found: list[str] = []
        for field, form in self._formats.items():
            found += form.names(field, getattr(self, field))
        return found

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
        return [
            field.removesuffix("_")
            for field, form in cls._formats.items()
            if not isinstance(form, _Columns)
        ]

    @classmethod
    def read(cls, cells: Mapping[str, str]) -> Self:
        """Read a row. Raises KeyError, ValueError."""
        return cls(**{field: form.read(field, cells) for field, form in cls._formats.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRoundRecord(Record):
    """A row of rounds.csv: one global round. The scores and losses of a model are None until it is
    evaluated.
    """

    global_round: _Int
    elapsed_s: Annotated[float, _Column(finite)]
    accuracy: _Short = None
    loss: _Short = None
    mixed_accuracy: _Short = None
    mixed_loss: _Short = None
    # Columns `score` and `mixed_score` of an experiment whose score is not accuracy, which then is
    # None, and a column of each further score, and of the success of each attack that has tests of
    # its own.
    other_scores: Annotated[
        Mapping[str, float | None], _Columns(_maybe, "{:.6g}", columns=OF_MODEL)
    ] = dataclasses.field(default_factory=dict)
    # The columns of `device_columns` where devices score. If they alone do, accuracy, or score, and
    # loss are those over all their samples.
    by_devices: Annotated[
        Mapping[str, float | None], _Columns(_maybe, "{:.6g}", columns=OF_DEVICES)
    ] = dataclasses.field(default_factory=dict)
    train_loss: _Short
    # seconds
    phases: Annotated[Mapping[str, float], _Columns(finite, pattern="{}_s", keys=GLOBAL_PHASES)]
    sgd_steps: _Int
    path_steps: _Int
    # MQTT bytes by `TIER_up_bytes`, `TIER_down_bytes`
    bytes_: Annotated[Mapping[str, int], _Columns(int, columns=BYTES)]
    missing: _Names  # children of the cloud without an upload, and with one that was refused
    refused: _Names
    # by child, None without a result, and `omega`
    epochs: Annotated[Mapping[str, int | None], _Columns(_count, pattern="epochs_{}")]
    omega: Annotated[Mapping[str, float | None], _Columns(_maybe, "{:.6g}", pattern="omega_{}")]
    # by node, None for a rule of one model
    spread: Annotated[Mapping[str, float | None], _Columns(_maybe, "{:.6g}", pattern="spread_{}")]
    # of the worst unit so far, by tier with privacy, None: infinite
    epsilon: Annotated[
        Mapping[str, float | None], _Columns(_maybe, "{:.6g}", pattern="epsilon_{}")
    ] = dataclasses.field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The score of the model, which the run's manifest names; accuracy by default."""
        return self.other_scores.get("score", self.accuracy)

    @property
    def scored(self) -> float | None:
        """How many devices have scored the model, None if none does or may yet."""
        return self.of_devices("scored")

    def of_devices(self, statistic: str, *, personalised: bool = False) -> float | None:
        """Return one of STATISTICS, None if devices have not scored the model, or those that they
        trained.
        """
        models = [PERSONALISED] if personalised else [DEVICES, DISPATCHED]
        for each in models:
            found = self.by_devices.get(f"{each}_{statistic}")
            if found is not None:
                return found
        return None

    def further(self, column: str) -> float | None:
        """Return a column that only some experiments have, None without it or before it is
        known.
        """
        return {**self.other_scores, **self.by_devices}.get(column)

    @property
    def seconds(self) -> float:
        """The sum of all phases, seconds."""
        return math.fsum(self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord(Record):
    """A row of links.csv: one direction of a link (`link_records`); None = not reported."""

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
    """A row of devices.csv: one device in one global round. `node`: its path,
    `cloud/institution-0/device-3`.

    `test_samples`, `test_loss`, `test_score`: of the model of this global round, None if the device
    did not score it; `evaluate_s`: the seconds of that, spent at the begin of the next round. A
    device that scored and did not take part has no local rounds. `more`: `personalised_loss`,
    `personalised_score` and `personalised_s`, of the model that the device trained in this round,
    and both models' further scores. In an experiment with adversaries also AGAINST: 1 for an
    adversary, else 0, and in how many local rounds the rule used, or left out, its result.

    The last fields are those of `DeviceCosts`.
    """

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
    test_samples: _Count = None
    test_loss: _Short = None
    test_score: _Short = None
    evaluate_s: _Short = None
    more: Annotated[Mapping[str, float | None], _Columns(_maybe, "{:.6g}", columns=OF_DEVICE)] = (
        dataclasses.field(default_factory=dict)
    )
    joules: _Short = None
    train_joules: _Short = None
    energy_source: Annotated[EnergySource, _Column(EnergySource)] = EnergySource.NONE
    cpu_s: _Short = None
    memory_bytes: _Count = None
    celsius: _Short = None

    @property
    def personalised_score(self) -> float | None:
        """The score of the model that the device trained."""
        return self.more.get(f"{PERSONALISED}_score")

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
    """Yield the cells of each row of a table, without a last row that a kill cut short. Raises
    csv.Error.
    """
    for row in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""), strict=True):
        if None in row or None in row.values():
            raise csv.Error("it has not as many cells as the table has columns")
        yield row


def device_columns(experiment: Experiment) -> dict[str, tuple[str, ...]]:
    """Return the columns of rounds.csv with devices' scores, by the kind of the models; none if
    devices do not score.

    In each the STATISTICS come first, then the further scores.
    """
    if not experiment.evaluation.on_devices:
        return {}
    kinds = [DISPATCHED if experiment.several_models else DEVICES]
    kinds += [PERSONALISED] if experiment.evaluation.personalised else []
    kinds += [HONEST] if experiment.attackers else []
    names = (*STATISTICS, *experiment.score.columns.values())
    return {kind: _prefixed(kind, names) for kind in kinds}


def _prefixed(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{kind}_{name}" for name in names)


MEASURED: Final = "counted by the kernels (TCP_INFO)"
UNMEASURED: Final = "not available on this platform"


def link_records(
    reports: Mapping[str, ChildReport], wire: TcpStats, experiment: Experiment
) -> list[LinkRecord]:
    """Return the rows of all links in the run, from the cloud down, then those of the parents'
    connections.

    `reports`, `wire`: the cloud's byte ledger's reports on all nodes, and its own connection.
    """
    tree = experiment.tree
    tiers = experiment.tier_names
    table = [record for link in _links(reports, experiment) for record in _link_records(link)]
    table += _broker_records(tiers[0], CLOUD, wire)
    for name in tree.aggregators:
        if name in reports:
            table += _broker_records(tiers[tree.depth(name)], name, reports[name].broker)
    return table


def _broker_records(tier: str, parent: str, wire: TcpStats) -> tuple[LinkRecord, LinkRecord]:
    """Return the rows of a parent's whole connection."""
    sent = LinkRecord(tier=tier, from_=parent, to=BROKER, kind=BROKER)
    received = LinkRecord(tier=tier, from_=BROKER, to=parent, kind=BROKER)
    return _sent(sent, wire), _received(received, wire)


def tier_bytes(ledger: Ledger, tiers: Sequence[str]) -> dict[str, int]:
    """Return the MQTT bytes of all links by tier and direction, `wan_up_bytes`, `wan_down_bytes`,
    and so on.

    `tiers`: the tiers' names from the cloud down.
    """
    counted = chain(ledger.tiers(), repeat(Traffic()))  # nothing is known before the first report
    found = {}
    for tier, links in zip(tiers, counted, strict=False):
        found[f"{tier}_up_bytes"] = links.received
        found[f"{tier}_down_bytes"] = links.sent
    return found


def wire_status(reports: Mapping[str, ChildReport], experiment: Experiment) -> str:
    """Return whether all links have wire bytes, and which have none; "" before the first report of
    a child.
    """
    links = _links(reports, experiment)
    counted = {link.child: link.traffic.wire for link in links if link.traffic.wire.connections}
    missing = [child for child, wire in counted.items() if not wire.measured]
    if not missing:
        if counted:
            return MEASURED
        return ""
    if len(missing) == len(counted):
        return UNMEASURED
    return f"{UNMEASURED}: {', '.join(missing)}"


class _Link(NamedTuple):
    tier: str
    parent: str
    child: str
    traffic: Traffic
    measured: Measured


def _links(reports: Mapping[str, ChildReport], experiment: Experiment) -> Iterator[_Link]:
    tree = experiment.tree
    for name in tree.below(CLOUD):
        if name in reports:
            report = reports[name]
            tier = experiment.tier_above(name).name
            yield _Link(tier, tree.parent(name), name, report.traffic, report.measured)
    for report in reports.values():
        if report.parent:
            tier = experiment.tier_below(report.parent).name
            yield _Link(tier, report.parent, report.name, report.traffic, report.measured)


def _link_records(link: _Link) -> list[LinkRecord]:
    """Return a link's rows; `traffic.sent_*` is the downward direction, `received_*` the upward
    one.
    """
    tier, parent, child, traffic, before = link
    down = LinkRecord(tier=tier, from_=parent, to=child, kind="all")
    down = _received(_calibrated(down, before.down, before.down_bytes), traffic.wire)
    up = LinkRecord(tier=tier, from_=child, to=parent, kind="all")
    up = _sent(_calibrated(up, before.up, before.up_bytes), traffic.wire)
    return [*_direction(down, traffic, "sent"), *_direction(up, traffic, "received")]


def _direction(whole: LinkRecord, traffic: Traffic, direction: Direction) -> list[LinkRecord]:
    """Return the rows of one direction by kind, of extras and frozen arrays only if there were any,
    and of all.

    The overhead is the excess of wire bytes over payload; it is empty where the child's report lags
    behind.
    """
    parts = [
        LinkRecord(
            tier=whole.tier,
            from_=whole.from_,
            to=whole.to,
            kind=kind,
            payload_bytes=getattr(traffic, f"{direction}_{kind}_payload"),
            message_bytes=getattr(traffic, f"{direction}_{kind}_message"),
        )
        for kind in LINK_KINDS
    ]
    total = sum(part.payload_bytes or 0 for part in parts)
    message = sum(part.message_bytes or 0 for part in parts)
    carried = (whole.wire_bytes or 0) - (whole.probe_bytes or 0)
    overhead = 100 * (carried - total) / total if 0 < total <= carried else None
    whole = replace(whole, payload_bytes=total, message_bytes=message, overhead_percent=overhead)
    return [*(part for part in parts if part.message_bytes or part.kind not in RARE), whole]


def _calibrated(record: LinkRecord, rate: float, probe_bytes: int) -> LinkRecord:
    """Add the calibration before the run, `rate` in bytes per second."""
    if rate:
        return replace(record, measured_mbit=rate * 8e-6, probe_bytes=probe_bytes)
    return record


def _sent(record: LinkRecord, wire: TcpStats) -> LinkRecord:
    """Add the counts of the direction in which the node itself sends."""
    if not wire.measured:
        return record
    retransmitted = None if wire.retransmitted_unknown else wire.retransmitted
    return replace(
        _with_rtt(record, wire),
        wire_bytes=wire.sent,
        segments=wire.sent_segments,
        retransmitted_bytes=retransmitted,
        retransmitted_segments=wire.retransmitted_segments,
    )


def _received(record: LinkRecord, wire: TcpStats) -> LinkRecord:
    if not wire.measured:
        return record
    return replace(
        _with_rtt(record, wire), wire_bytes=wire.received, segments=wire.received_segments
    )


def _with_rtt(record: LinkRecord, wire: TcpStats) -> LinkRecord:
    return replace(
        record, rtt_ms=wire.rtt_us / 1000 or None, rtt_min_ms=wire.rtt_min_us / 1000 or None
    )
