"""A parent's byte ledger: the bytes of its children's links over a run, each direction counted on arrival.

A child counts from its first contact with the ledger (`Presence.ledger`), within its own session. A restarted
institution begins a new ledger. A cloud keeps its ledger in the run's folder, so a resumed run continues it and no byte
is lost or counted twice. The unreported counts of a killed child are lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Final

from common.accounting.child_report import ChildReport, TrainingPath
from common.accounting.counters import Account
from common.accounting.traffic import Measured, TcpStats, Traffic
from common.errors import WireError

BYTES_MOST: Final = 2**50
NOTHING: Final = Traffic()


@dataclass(slots=True)
class _Page:
    """One child. `before`: sums over the child's earlier sessions; `here`: over this node's earlier processes."""

    session: str = ""
    link: Traffic = NOTHING
    link_before: Traffic = NOTHING
    below: Traffic = NOTHING
    below_before: Traffic = NOTHING
    here_before: Traffic = NOTHING
    reports: dict[str, ChildReport] = field(default_factory=dict)
    reports_before: dict[str, Traffic] = field(default_factory=dict)

    def turn(self, session: str) -> None:
        """Begin a new session of the child, which counts from zero."""
        if session == self.session:
            return
        self.link_before, self.below_before = self.link_before + self.link, self.below_before + self.below
        for name, report in self.reports.items():
            self.reports_before[name] = self.reports_before.get(name, NOTHING) + report.traffic
        self.session, self.link, self.below = session, NOTHING, NOTHING
        self.reports = {name: replace(report, traffic=NOTHING) for name, report in self.reports.items()}


class Ledger:
    """Each child's counts of its own link and of the links below it, and the arrivals here, across all sessions.

    `below`: the names of each child's own children; a child may only report on these.
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

    def enter(self, child: str, session: str, *, link: Traffic, below: Traffic) -> None:
        """Record a child's counts, which grow within a session. Raises WireError on impossible counts."""
        if max(_most(link), _most(below)) > BYTES_MOST:
            raise WireError(f"{child} counts more bytes than there are")  # the sums must fit in a message
        page = self._pages[child]
        page.turn(session)
        page.link, page.below = link, below

    def enter_reports(self, child: str, session: str, reports: Iterable[ChildReport]) -> None:
        """Record a child's reports on its own children, whose counts grow within the child's session.

        Reports on nodes that the experiment does not assign to the child are ignored.
        """
        page, known = self._pages[child], self._below.get(child, ())
        page.turn(session)
        page.reports = {report.name: report for report in reports if report.name in known}

    def links(self) -> dict[str, Traffic]:
        """Return each child's link: `received_*` as counted here (up), `sent_*` as counted at the child (down).

        `wire` is in the child's own direction: it sends upward.
        """
        links = {}
        for name, page in self._pages.items():
            here, there = self._here(name), page.link_before + page.link
            links[name] = Traffic(
                there.received_model_payload,
                there.received_model_message,
                there.received_control_payload,
                there.received_control_message,
                here.received_model_payload,
                here.received_model_message,
                here.received_control_payload,
                here.received_control_message,
                there.wire,
            )
        return links

    def total(self) -> Traffic:
        """Return the sum of the children's links."""
        return sum(self.links().values(), NOTHING)

    def broker(self) -> TcpStats:
        """Return the bytes of this node's own connection to the children's broker, all children together."""
        return self._wire_before + self._wire()

    def brokers(self) -> dict[str, TcpStats]:
        """Return the bytes of each child's connection to its own children's broker."""
        return {name: (page.below_before + page.below).wire for name, page in self._pages.items()}

    def below(self) -> Traffic:
        """Return the sum of the links between the children and their own children."""
        return sum((page.below_before + page.below for page in self._pages.values()), NOTHING)

    def reports(self) -> dict[str, tuple[ChildReport, ...]]:
        """Return the children's last reports, with the bytes of the whole run."""
        return {
            name: tuple(
                replace(report, traffic=report.traffic + page.reports_before.get(report.name, NOTHING))
                for report in page.reports.values()
            )
            for name, page in self._pages.items()
        }

    def to_json(self) -> str:
        """Return the ledger as JSON, for `restore` in a later process."""
        pages = {}
        for name, page in self._pages.items():
            kept = {key: astuple(getattr(page, key)) for key in _TRAFFICS}
            pages[name] = kept | {
                "session": page.session,
                "here_before": astuple(self._here(name)),
                "reports": [astuple(report) for report in page.reports.values()],
                "reports_before": {device: astuple(traffic) for device, traffic in page.reports_before.items()},
            }
        return json.dumps({"broker": astuple(self.broker()), "pages": pages})

    def restore(self, text: str) -> None:
        """Continue the ledger of an earlier process of this node. Raises ValueError, KeyError or TypeError."""
        tree: Mapping[str, Any] = json.loads(text)
        self._wire_before = TcpStats(*tree["broker"])
        for name in self._pages:
            kept = tree["pages"][name]
            self._pages[name] = _Page(
                session=kept["session"],
                here_before=_traffic(kept["here_before"]),
                reports={row[0]: _report(row) for row in kept["reports"]},
                reports_before={device: _traffic(counts) for device, counts in kept["reports_before"].items()},
                **{key: _traffic(kept[key]) for key in _TRAFFICS},
            )

    def _here(self, child: str) -> Traffic:
        return self._pages[child].here_before + self._account.traffic(child)


def _most(traffic: Traffic) -> int:
    """Return the largest count. Called for each message, so without astuple, which copies deeply."""
    most: int = max(*_COUNTS(traffic), *_WIRE_COUNTS(traffic.wire))
    return most


def _traffic(row: list[Any]) -> Traffic:
    values = [*row[:-1], TcpStats(*row[-1])]
    return Traffic(*values)


def _report(row: list[Any]) -> ChildReport:
    values = [*row[:-3], TrainingPath(row[-3]), Measured(*row[-2]), _traffic(row[-1])]
    return ChildReport(*values)


_COUNTS: Final = attrgetter(*(f.name for f in fields(Traffic) if f.name != "wire"))
_WIRE_COUNTS: Final = attrgetter(*(f.name for f in fields(TcpStats)))
_TRAFFICS: Final = ("link", "link_before", "below", "below_before")
