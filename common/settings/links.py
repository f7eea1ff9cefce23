"""The links of an experiment: a table for a tier or a node, or the name of a profile.

`profiles.toml` beside this file has the profiles that ship; an experiment may add or replace some
in `[profiles.NAME]`. A link that names a profile has its numbers as soon as the experiment is read,
so what travels to the nodes and what a run leaves behind does not depend on the profiles of the
release that reads it. So does one whose rates and delays are those of a trace, a CSV file.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from math import inf, nextafter
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.csv_table import CsvTable
from fedstrata.common.settings.tables import (
    Name,
    Positive,
    SettingsTable,
    named,
    proposal,
    with_own,
)

SMALL_MESSAGE_BYTES: Final = 1000  # fewer than a node exchanges before it takes part
TRACE_COLUMNS: Final = ("seconds", "up_mbit", "down_mbit", "delay_ms")
ROWS_MOST: Final = 5000
# those of `traces/`, each with the seconds after which it begins anew
SHIPPED_TRACES: Final[Mapping[str, float]] = {"wifi-synthetic": 300.0}

Column = list[Annotated[float, Field(ge=0)]]


@dataclass(frozen=True, slots=True)
class RateTrace:
    """The rates and delays of one direction, each from its start until the next one."""

    starts: tuple[float, ...]  # seconds
    rates: tuple[float, ...]  # bytes per second
    delays: tuple[float, ...]  # seconds
    # The trace begins anew after so many seconds; None: the last rate and delay hold.
    repeat_s: float | None = None

    def delay_at(self, t: float) -> float:
        """Return the delay at t seconds."""
        return self.delays[self._place(self._offset(t))]

    def rate_at(self, t: float) -> float:
        """Return the rate at t seconds."""
        return self.rates[self._place(self._offset(t))]

    def next_change(self, t: float) -> float:
        """Return the first start of a rate, or of a period, after t seconds; inf: none."""
        begin = 0.0
        change = inf
        if self.repeat_s is not None:
            begin = t - t % self.repeat_s
            change = self.repeat_s
        place = bisect_right(self.starts, self._offset(t))
        if place < len(self.starts):
            change = self.starts[place]
        return max(begin + change, nextafter(t, inf))

    def finish(self, begin: float, nbytes: float) -> float:
        """Return when the last of so many bytes has passed that leave from `begin` on, seconds."""
        if self.repeat_s is None:
            return self._finish(begin, nbytes)
        periods, offset = divmod(begin, self.repeat_s)
        # as if it began with the period
        each = self._carried(self.repeat_s)
        nbytes += self._carried(offset)
        whole = max(0, -(-nbytes // each) - 1)
        return (periods + whole) * self.repeat_s + self._finish(0.0, nbytes - whole * each)

    def mean(self) -> float:
        """Return the mean rate of a period, or until the last change."""
        end = self.starts[-1] if self.repeat_s is None else self.repeat_s
        if end:
            return self._carried(end) / end
        return self.rates[0]

    def _offset(self, t: float) -> float:
        """Return the seconds since the begin of the period."""
        if self.repeat_s is None:
            return t
        return t % self.repeat_s

    def _place(self, t: float) -> int:
        return max(0, bisect_right(self.starts, t) - 1)

    def _carried(self, until: float) -> float:
        """Return the bytes that pass from the beginning until then, within a period."""
        ends = (*self.starts[1:], until)
        pieces = zip(self.starts, ends, self.rates, strict=True)
        return sum(max(0.0, min(end, until) - start) * rate for start, end, rate in pieces)

    def _finish(self, begin: float, nbytes: float) -> float:
        t = begin
        left = nbytes
        place = self._place(t)
        for end in self.starts[place + 1 :]:
            carried = (end - t) * self.rates[place]
            if carried >= left and self.rates[place]:
                break
            t = end
            left -= carried
            place += 1
        if self.rates[place]:
            return t + left / self.rates[place]
        return t  # `left` is a rounding error


@dataclass(frozen=True, slots=True)
class LinkDirection:
    """One direction of a link."""

    # Chunks, windows and calibration go by the rate and the delay, also where there is a trace.
    rate: float | None = None  # bytes per second; None: unlimited
    delay_s: float = 0.0  # of each message
    trace: RateTrace | None = None  # of the run


@dataclass(frozen=True, slots=True)
class LinkSet:
    """The links of one end: directions to its peers and from them."""

    to: dict[str, LinkDirection]
    from_: dict[str, LinkDirection]
    shaped: bool  # whether this end enforces rates and delays
    # The lowest rate, bytes per second, at which each peer forwards chunks as they arrive, if it is
    # limited.
    onward: Mapping[str, float] = field(default_factory=dict)

    def chunk_rate(self, peer: str) -> float | None:
        """Return the rate for which chunks to a peer are cut, bytes per second; None: unlimited.

        That of the slowest link on their way: chunks are forwarded as they are.
        """
        rates = [rate for rate in (self.to[peer].rate, self.onward.get(peer)) if rate is not None]
        return min(rates, default=None)

    def add(self, peer: str, link: Profile) -> None:
        """Add the link to another child."""
        self.to[peer] = link.down
        self.from_[peer] = link.up

    def remove(self, peer: str) -> None:
        """Forget the link to a child."""
        del self.to[peer], self.from_[peer]


class LinkTrace(SettingsTable):
    """Rates and delays that change with time. The name of a CSV file, or of a trace that ships,
    stands for a table that has only `file`.

    The file has the columns seconds, up_mbit, down_mbit and delay_ms (which may be left out), and
    gives these keys. A rate of 0 is an outage. Time begins with the first task of the run.
    """

    file: str = ""  # relative to the experiment's folder
    # Seconds after which the trace begins anew; omitted: its last values hold.
    repeat_s: Positive | None = None
    # when each row begins, from 0 on
    seconds: Column = Field(default_factory=list, max_length=ROWS_MOST)
    up_mbit: Column = Field(default_factory=list)  # Mbit/s towards the cloud
    down_mbit: Column = Field(default_factory=list)  # Mbit/s towards the devices
    delay_ms: Column = Field(default_factory=list)  # milliseconds, one way

    def recorded(self) -> dict[str, Any]:
        """Return the trace without its rows; the digest, 16 hexadecimal digits, identifies them."""
        digest = blake2b(self.model_dump_json(exclude={"file"}).encode(), digest_size=8).hexdigest()
        return {
            "file": self.file,
            "repeat_s": self.repeat_s,
            "rows": len(self.seconds),
            "digest": digest,
        }

    def direction(self, mbit: list[float]) -> RateTrace:
        """Return the trace of one direction."""
        rates = tuple(each * (1e6 / 8) for each in mbit)
        delays = tuple(each * 1e-3 for each in self.delay_ms)
        return RateTrace(tuple(self.seconds), rates, delays or (0.0,) * len(rates), self.repeat_s)


class Profile(SettingsTable):
    """A link's numbers under a name. It adds to the profiles that ship, or replaces one of them."""

    up_mbit: Positive | None = None  # Mbit/s towards the cloud; omitted rates are unlimited
    down_mbit: Positive | None = None  # Mbit/s towards the devices
    # Milliseconds, one way; there and back they are less than `transfer.idle_s`.
    delay_ms: Annotated[float, Field(ge=0)] = 0.0

    @property
    def up(self) -> LinkDirection:
        """The direction towards the cloud."""
        return LinkDirection(_bytes_s(self.up_mbit), self.delay_ms / 1e3)

    @property
    def down(self) -> LinkDirection:
        """The direction towards the devices."""
        return LinkDirection(_bytes_s(self.down_mbit), self.delay_ms / 1e3)


class LinkSettings(Profile):
    """The link between a node and its parent. The name of a profile stands for a table that has
    only `profile`.
    """

    profile: Name | None = None  # it gives the keys that the table leaves out
    # Rates and delays over time, or the name of its CSV file. The rates above decide the sizes of
    # chunks, and are measured before the run; omitted ones are the trace's mean.
    trace: LinkTrace | None = None

    @property
    def up(self) -> LinkDirection:
        """The direction towards the cloud."""
        return self._traced(super().up, "up_mbit")

    @property
    def down(self) -> LinkDirection:
        """The direction towards the devices."""
        return self._traced(super().down, "down_mbit")

    def recorded(self) -> dict[str, Any]:
        """Return what a run's manifest has of this link for each node: of a trace its file, length
        and digest.
        """
        found = self.model_dump(exclude={"trace"})
        if self.trace is None:
            return found
        return found | {"trace": self.trace.recorded()}

    def _traced(self, way: LinkDirection, column: str) -> LinkDirection:
        if self.trace is None:
            return way
        trace = self.trace.direction(getattr(self.trace, column))
        rate = way.rate or trace.mean() or max(trace.rates)
        return LinkDirection(rate, way.delay_s or trace.delays[0], trace)


class Links(SettingsTable):
    """What shapes the links, and the links of single nodes: `links.of.NODE` is that to its parent.

    A link is a table, or the name of a profile.
    """

    # What shapes the links: token buckets in the sending agents, the kernel, or nothing. The
    # declared rates decide the sizes of chunks and windows in any case.
    enforce: Literal["bucket", "kernel", "none"] = "bucket"
    # Whether a link off its declared rate ends the run; `off` measures none.
    check: Literal["error", "warn", "off"] = "error"
    # Share by which a measured rate may differ from the declared one.
    tolerance: Annotated[float, Field(gt=0, le=1)] = 0.1
    of: dict[Name, LinkSettings] = Field(default_factory=dict)


@cache
def shipped() -> Mapping[str, Mapping[str, Any]]:
    """Return the built-in profiles by name."""
    return tomllib.loads(Path(__file__).with_name("profiles.toml").read_text(encoding="utf-8"))


def with_profiles(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's tree whose links have the numbers of the profiles that they name.

    A link's own keys go before those of its profile. Values of a wrong type are left for the
    tables' own check.
    Raises InvalidExperiment where no profile has the name.
    """
    profiles = with_own(shipped(), tree)
    return _with_links(tree, lambda key, link: named(key, link, profiles))


def with_traces(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return an experiment's tree with the numbers of the traces that its links name: files, or
    those that ship. Raises InvalidExperiment.
    """

    def with_trace(key: str, link: Any) -> Any:
        if not isinstance(link, Mapping) or link.get("trace") is None:
            return link
        asked = _shipped_trace(link["trace"])
        given = link["trace"] if asked is None else asked
        trace = with_file(
            f"{key}.trace",
            given,
            folder,
            numbers="seconds",
            columns=TRACE_COLUMNS[:-1],
            optional=TRACE_COLUMNS[-1:],
            convert=_numbers,
        )
        if asked is not None:
            trace["file"] = Path(asked["file"]).stem
        return {**link, "trace": trace}

    return _with_links(tree, with_trace)


def _shipped_trace(asked: Any) -> dict[str, Any] | None:
    """Return the table of a trace that ships, None if another one is asked for."""
    if isinstance(asked, str):
        asked = {"file": asked}
    if not isinstance(asked, Mapping) or "seconds" in asked:
        return None
    name = asked.get("file")
    if not isinstance(name, str) or name not in SHIPPED_TRACES:
        return None
    file = Path(__file__).with_name("traces") / f"{name}.csv"
    return {"repeat_s": SHIPPED_TRACES[name], **asked, "file": str(file)}


def _with_links(tree: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return an experiment's tree with each of its links changed, from its key and its table."""
    changed = dict(tree)
    tiers = tree.get("tiers")
    if isinstance(tiers, list):
        changed["tiers"] = [*tiers]
        for place, tier in enumerate(tiers):
            if isinstance(tier, Mapping) and "link" in tier:
                key = f"tiers.{tier.get('name', place)}.link"
                changed["tiers"][place] = {**tier, "link": change(key, tier["link"])}
    if isinstance(tree.get("links"), Mapping):
        links = changed["links"] = dict(tree["links"])
        for key in ("wan", "lan"):
            if key in links:
                links[key] = change(f"links.{key}", links[key])
        of = links.get("of")
        if isinstance(of, Mapping):
            links["of"] = {key: change(f"links.of.{key}", link) for key, link in of.items()}
    return changed


def _bytes_s(mbit: float | None) -> float | None:
    if mbit is None:
        return None
    return mbit * 1e6 / 8


def check_speed(key: str, link: LinkSettings, *, idle_s: float) -> None:
    """Check that a message comes through, and its answer, before nodes give up. Raises
    InvalidExperiment.
    """
    limit = f"transfer.idle_s, now {idle_s:g}."
    for name, way in (("up_mbit", link.up), ("down_mbit", link.down)):
        if way.rate is not None and SMALL_MESSAGE_BYTES / way.rate >= idle_s:
            message_s = f"{SMALL_MESSAGE_BYTES / way.rate:.3g} s"
            problem = f"a message of 1 kB takes {message_s}, so no node ever joins"
            remedy = f"Use more, or a longer {limit}"
            raise InvalidExperiment(f"{key}.{name}", way.rate * 8 / 1e6, problem, remedy)
    answer_s = 2 * link.up.delay_s
    if answer_s >= idle_s:
        problem = f"a message and its answer take {answer_s:g} s, so no node ever joins"
        remedy = f"Use less, or more than that for {limit}"
        raise InvalidExperiment(f"{key}.delay_ms", link.up.delay_s * 1e3, problem, remedy)


def check_trace(key: str, trace: LinkTrace) -> None:
    """Raise InvalidExperiment if a trace cannot be replayed."""
    times = trace.seconds
    count = len(times)
    file = trace.file or "the table"
    same = len(trace.up_mbit) == len(trace.down_mbit) == count
    if not count or not same or len(trace.delay_ms) not in (0, count):
        problem = "seconds, up_mbit, down_mbit and delay_ms have not as many rows"
        remedy = f"Give a number in each row and column of {file}."
        raise InvalidExperiment(key, count, problem, remedy)
    if times[0] != 0:
        remedy = f"Begin {file} at 0."
        raise InvalidExperiment(f"{key}.seconds", times[0], "does not grow from 0 on", remedy)
    for row, (before, after) in enumerate(pairwise(times), 2):
        if after <= before:
            problem = f"row {row} does not grow, after {before:g}"
            raise InvalidExperiment(f"{key}.seconds", after, problem, f"Sort the rows of {file}.")
    if trace.repeat_s is not None and trace.repeat_s <= times[-1]:
        remedy = f"Repeat after more than {times[-1]:g} s."
        raise InvalidExperiment(f"{key}.repeat_s", trace.repeat_s, "the trace is longer", remedy)
    for name, mbit in (("up_mbit", trace.up_mbit), ("down_mbit", trace.down_mbit)):
        lasting = mbit if trace.repeat_s else mbit[-1:]
        if not any(lasting):
            remedy = f"End {file} with a rate above 0, or set repeat_s."
            raise InvalidExperiment(f"{key}.{name}", 0, "the link would be out for ever", remedy)


def with_file(
    key: str,
    trace: Any,
    folder: Path,
    *,
    numbers: str,
    columns: Sequence[str],
    optional: Sequence[str] = (),
    convert: Callable[[CsvTable], dict[str, Any]],
) -> Any:
    """Return a trace's table with the numbers of the file that it names, or the file's name that
    stands for it.

    `numbers`: the key that shows that it has them already. `columns`, `optional`: those of the
    file. `convert` returns the keys of its rows. Values of a wrong type are left for the tables'
    own checks. Raises InvalidExperiment.
    """
    if isinstance(trace, str):
        trace = {"file": trace}
    if not isinstance(trace, Mapping) or numbers in trace or not isinstance(trace.get("file"), str):
        return trace
    path = folder / trace["file"]
    try:
        with CsvTable.open(key, path) as table:
            table.places(columns)
            known = (*columns, *optional)
            for name in table.header:
                if name not in known:
                    remedy = proposal(name, known, what="There are")
                    raise table.wrong(f"has an unknown column {name!r}", remedy)
            return {**trace, **convert(table)}
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        problem = getattr(error, "strerror", None) or str(error)
        raise InvalidExperiment(key, str(path), problem, "Name a CSV file.") from None


def _numbers(table: CsvTable) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in table.header}
    for row in table:
        for place, column in enumerate(found.values()):
            column.append(table.number(row, place))
    return found
