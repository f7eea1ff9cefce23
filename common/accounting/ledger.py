"""A parent's byte ledger: the bytes of all links below it over a run, each direction counted on
arrival.

A child counts from its first contact with the ledger (`Presence.ledger`), within its own session:
its own link, and the links below it. A restarted parent in the middle begins a new ledger. A cloud
keeps its ledger in the run's folder, so a resumed run continues it and no byte is lost or counted
twice. The unreported counts of a killed child are lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import repeat, zip_longest
from operator import add, attrgetter, sub
from typing import Any, Final

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.traffic import (
    BYTE_FIELDS,
    BYTES,
    NOTHING,
    WIRE_COUNTS,
    Measured,
    TcpStats,
    Traffic,
)
from fedstrata.common.errors import WireError

BYTES_MOST: Final = 2**50
# nodes that had entered and left, of which counts are kept: one that returns goes on from them
LEFT_MOST: Final = 1000
REPORTS_MOST: Final = 1_000_000  # of nodes below a child, over its sessions


@dataclass(slots=True)
class _Page:
    """One child. `before`: sums over the child's earlier sessions; `here`: over this node's earlier
    processes.
    """

    session: str = ""
    link: Traffic = NOTHING
    link_before: Traffic = NOTHING
    below: tuple[Traffic, ...] = ()
    below_before: tuple[Traffic, ...] = ()
    here_before: Traffic = NOTHING
    reports: dict[str, ChildReport] = field(default_factory=dict)
    reports_before: dict[str, ChildReport] = field(default_factory=dict)
    latest: frozenset[str] = frozenset()  # the links in its last list of reports
    parent: str = ""  # of a child that entered
    left: bool = False  # it gave back its place

    def turn(self, session: str) -> None:
        """Begin a new session of the child, which counts from zero."""
        if session == self.session:
            return
        self.link_before += self.link
        self.below_before = added(self.below_before, self.below)
        for link, report in self.reports.items():
            if link in self.reports_before or len(self.reports_before) < REPORTS_MOST:
                self.reports_before[link] = self.whole(report)
        self.session = session
        self.link = NOTHING
        self.below = ()
        self.reports = {name: report.without_bytes() for name, report in self.reports.items()}

    def whole(self, report: ChildReport) -> ChildReport:
        """Return a report with the bytes of the whole run."""
        before = self.reports_before.get(report.link)
        if before is None:
            return report
        return report.with_bytes_of(before)


class Ledger:
    """Each child's counts of its own link and of the links below it, and the arrivals here, across
    all sessions.

    `below`: the names of all nodes below each child; a child may only report on these.
    """

    def __init__(
        self,
        children: Iterable[str],
        account: Account,
        *,
        wire: Callable[[], TcpStats] = TcpStats,
        below: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._account = account
        self._below = below or {}
        self._wire = wire
        self._wire_before = TcpStats()
        self.measured: dict[str, Measured] = {}
        self._pages = {name: _Page() for name in children}
        self._there: Sequence[int] = BYTES(NOTHING)  # the sums of what the children count
        self._here_before = NOTHING

    def add(self, child: str, *, parent: str) -> None:
        """Add a child that entered below this node, `parent`."""
        self._pages.setdefault(child, _Page(parent=parent)).left = False

    def retire(self, child: str) -> None:
        """Note that a child that had entered has given back its place. Beyond LEFT_MOST the first
        one is forgotten.

        Its bytes stay in the sums.
        """
        page = self._pages[child] = self._pages.pop(child)  # the last one that left is the last one
        page.left = True
        left = [name for name, other in self._pages.items() if other.left]
        if len(left) > LEFT_MOST:
            del self._pages[left[0]]
            self._account.forget(left[0])

    def enter(
        self, child: str, session: str, *, link: Traffic, below: tuple[Traffic, ...] = ()
    ) -> None:
        """Record a child's counts, which grow within a session; `below`: of the tiers below it, the
        highest first.

        Raises WireError on impossible counts.
        """
        if len(below) > len(self._below.get(child, ())):
            raise WireError(f"{child} counts {len(below)} tiers below it")
        for counts in (link, *below):
            _check(child, counts, counts.wire)
        page = self._pages[child]
        page.turn(session)
        # an earlier message may come again
        if _size(link, *below) >= _size(page.link, *page.below):
            self._there = [*map(add, self._there, map(sub, BYTES(link), BYTES(page.link)))]
            page.link = link
            page.below = below

    def enter_reports(self, child: str, session: str, reports: Iterable[ChildReport]) -> None:
        """Record a child's reports on the nodes below it, whose counts grow within the child's
        session.

        Reports on nodes that the experiment does not assign to the child are ignored. Raises
        WireError on impossible counts.
        """
        page = self._pages[child]
        known = self._below.get(child, ())
        found = {report.link: report for report in reports if report.name in known or report.parent}
        for report in found.values():
            _check(child, report.traffic, report.traffic.wire, report.broker)
        page.turn(session)
        page.latest = frozenset(found)
        for link, report in found.items():
            before = page.reports.get(link)
            # an earlier list may come again
            if before is None or _size(report.traffic) >= _size(before.traffic):
                page.reports[link] = report
        left = [
            link
            for link, report in page.reports.items()
            if report.parent and link not in page.latest
        ]
        for link in left[: max(0, len(left) - LEFT_MOST)]:
            del page.reports[link]

    def links(self) -> dict[str, Traffic]:
        """Return each child's link: `received_*` as counted here (up), `sent_*` as counted at the
        child (down).

        `wire` is in the child's own direction: it sends upward.
        """
        return {name: self.link(name) for name in self._pages}

    def link(self, child: str) -> Traffic:
        """Return one child's link, see `links`."""
        page = self._pages[child]
        there = page.link_before + page.link
        return _link(BYTES(there), self._here(child), there.wire)

    def tiers(self) -> tuple[Traffic, ...]:
        """Return the sums of the links to the children, then of those of each tier below.

        `wire` is that of the parents' connections, all links together. No sum exceeds what a parent
        accepts: a child that counts too much must not silence this node. Those of the links to the
        children are kept: a node reports twice a second, and may have thousands.
        """
        counts: list[tuple[Traffic, ...]] = []
        for page in self._pages.values():
            counts += (page.below_before, page.below)
        below = added(*filter(None, counts))
        link = _link(self._there, self._here_before + self._account.total(), self.broker())
        return tuple(map(_bounded, (link, *below)))

    def broker(self) -> TcpStats:
        """Return the bytes of this node's own connection to the children's broker, all children
        together.
        """
        return self._wire_before + self._wire()

    def reports(self, *, present: bool = False) -> dict[str, ChildReport]:
        """Return the last report on each node below by its link, children first, with the bytes of
        the whole run.

        The work of the children themselves is not in the ledger. `present`: not on those that had
        entered and have given back their places.
        """
        links = self.links()
        found: dict[str, ChildReport] = {}
        for name, page in self._pages.items():
            if present and page.left:
                continue
            below = added(page.below_before, page.below)
            wire = below[0].wire if below else TcpStats()
            measured = self.measured.get(name, Measured())
            report = ChildReport(
                name, measured=measured, traffic=links[name], broker=wire, parent=page.parent
            )
            found[report.link] = report
        for page in self._pages.values():
            for link, report in page.reports.items():
                if link in page.latest or not present:
                    found[link] = page.whole(report)
        return {link: _bounded_report(report) for link, report in found.items()}

    def to_json(self) -> str:
        """Return the ledger as JSON, for `restore` in a later process."""
        pages = {
            name: {
                "session": page.session,
                "link": _traffic_row(page.link),
                "link_before": _traffic_row(page.link_before),
                "below": list(map(_traffic_row, page.below)),
                "below_before": list(map(_traffic_row, page.below_before)),
                "here_before": _traffic_row(self._here(name)),
                "reports": list(map(_report_row, page.reports.values())),
                "reports_before": list(map(_report_row, page.reports_before.values())),
                "parent": page.parent,
            }
            for name, page in self._pages.items()
        }
        return json.dumps({"broker": WIRE_COUNTS(self.broker()), "pages": pages})

    def restore(self, text: str) -> None:
        """Continue the ledger of an earlier process of this node. Raises ValueError, KeyError or
        TypeError.
        """
        tree: Mapping[str, Any] = json.loads(text)
        self._wire_before = TcpStats(*tree["broker"])
        for name, kept in tree["pages"].items():
            self._pages[name] = _Page(
                session=kept["session"],
                link=_traffic(kept["link"]),
                link_before=_traffic(kept["link_before"]),
                below=tuple(map(_traffic, kept["below"])),
                below_before=tuple(map(_traffic, kept["below_before"])),
                here_before=_traffic(kept["here_before"]),
                reports=_reports(kept["reports"]),
                reports_before=_reports(kept["reports_before"]),
                parent=kept["parent"],
            )
        pages = self._pages.values()
        self._there = BYTES(sum((page.link_before + page.link for page in pages), NOTHING))
        self._here_before = sum((page.here_before for page in pages), NOTHING)

    def _here(self, child: str) -> Traffic:
        return self._pages[child].here_before + self._account.traffic(child)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a child had counted when it began to count for a new ledger of its parent."""

    link: Traffic = NOTHING
    below: tuple[Traffic, ...] = ()
    reports: Mapping[str, ChildReport] = field(default_factory=dict)

    def since(self, below: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
        """Return the sums of the tiers below, counted from here."""
        return tuple(map(sub, below, (*self.below, *repeat(NOTHING, len(below) - len(self.below)))))

    def reports_since(self, reports: Iterable[ChildReport]) -> tuple[ChildReport, ...]:
        """Return reports with the bytes counted from here."""
        found = []
        for report in reports:
            before = self.reports.get(report.link)
            found.append(report)
            if before is not None:
                found[-1] = report.without_bytes_of(before)
        return tuple(found)


def _link(there: Sequence[int], here: Traffic, wire: TcpStats) -> Traffic:
    """Return a link, or the sum of several, by the counts of the children and those here."""
    counted = (*there, *BYTES(here))
    return Traffic.of([counted[place] for place in _OF_LINK], wire)


def added(*counts: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    """Return the sums by tier."""
    return tuple(sum(tier, NOTHING) for tier in zip_longest(*counts, fillvalue=NOTHING))


def _size(*counts: Traffic) -> int:
    """Return the sum of all bytes, which grows within a session."""
    return sum(sum(BYTES(traffic)) for traffic in counts)


def _bounded(traffic: Traffic) -> Traffic:
    """Return counts of which none exceeds BYTES_MOST."""
    if max(*BYTES(traffic), *WIRE_COUNTS(traffic.wire)) <= BYTES_MOST:
        return traffic
    counts = (min(count, BYTES_MOST) for count in BYTES(traffic))
    return Traffic.of(counts, _bounded_wire(traffic.wire))


def _bounded_wire(wire: TcpStats) -> TcpStats:
    counts = WIRE_COUNTS(wire)
    if max(counts) <= BYTES_MOST:
        return wire
    return TcpStats(*(min(count, BYTES_MOST) for count in counts))


def _bounded_report(report: ChildReport) -> ChildReport:
    traffic = _bounded(report.traffic)
    broker = _bounded_wire(report.broker)
    same = traffic is report.traffic and broker is report.broker
    if same:
        return report
    return replace(report, traffic=traffic, broker=broker)


def _check(child: str, traffic: Traffic, *wires: TcpStats) -> None:
    """Check counts. Raises WireError."""
    if max(*BYTES(traffic), *(count for wire in wires for count in WIRE_COUNTS(wire))) > BYTES_MOST:
        # the sums must fit in a message
        raise WireError(f"{child} counts more bytes than there are")


def _traffic(row: list[Any]) -> Traffic:
    if row:
        return replace(Traffic(*row[:-1]), wire=TcpStats(*row[-1]))
    return NOTHING


def _traffic_row(traffic: Traffic) -> tuple[Any, ...]:
    """Return what `astuple` does, which copies deeply: it would take seconds for thousands of
    nodes. Nothing is ().
    """
    if traffic == NOTHING:
        return ()
    return (*BYTES(traffic), WIRE_COUNTS(traffic.wire))


def _report_row(report: ChildReport) -> tuple[Any, ...]:
    """Return a report without its work, which is of one round."""
    measured = _MEASURED(report.measured)
    return (
        report.name,
        report.parent,
        measured,
        _traffic_row(report.traffic),
        WIRE_COUNTS(report.broker),
    )


def _reports(rows: list[list[Any]]) -> dict[str, ChildReport]:
    return {report.link: report for report in map(_report, rows)}


def _report(row: list[Any]) -> ChildReport:
    name, parent, measured, traffic, broker = row
    return ChildReport(
        name,
        measured=Measured(*measured),
        traffic=_traffic(traffic),
        broker=TcpStats(*broker),
        parent=parent,
    )


_MEASURED: Final = attrgetter(*(f.name for f in fields(Measured)))
# The place of each count of a link among those of the child, where `sent` is what it received, and
# those here.
_OF_LINK: Final = tuple(
    BYTE_FIELDS.index(name.replace("sent", "received"))
    + len(BYTE_FIELDS) * name.startswith("received")
    for name in BYTE_FIELDS
)
