"""A parent's books: the bytes of its children's links over a run, each direction counted where it arrived.

A child counts since it first met the parent's books (`Presence.books`), within its own session. An institution
begins new books when it is restarted; a cloud keeps its own in the run's folder, so that a resumed run goes on with
them and no byte is lost or counted twice. What a killed child had counted since its last word is lost.
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
    """One child. `before` are the sums over its earlier sessions, `here` over earlier processes of our own."""

    session: str = ""
    link: Traffic = NOTHING
    link_before: Traffic = NOTHING
    below: Traffic = NOTHING
    below_before: Traffic = NOTHING
    here_before: Traffic = NOTHING
    reports: dict[str, ChildReport] = field(default_factory=dict)
    reports_before: dict[str, Traffic] = field(default_factory=dict)

    def turn(self, session: str) -> None:
        """Begin a new session of the child: it counts from zero."""
        if session == self.session:
            return
        self.link_before, self.below_before = self.link_before + self.link, self.below_before + self.below
        for name, report in self.reports.items():
            self.reports_before[name] = self.reports_before.get(name, NOTHING) + report.traffic
        self.session, self.link, self.below = session, NOTHING, NOTHING
        self.reports = {name: replace(report, traffic=NOTHING) for name, report in self.reports.items()}


class Ledger:
    """What each child counted on its own link and below it, and what arrived here, over all processes of both.

    `below`: the names of each child's own children, the only ones on which it may report.
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
        """Take a child's counts, which grow within a session. Raises WireError on counts that cannot be."""
        if max(_most(link), _most(below)) > BYTES_MOST:
            raise WireError(f"{child} counts more bytes than there are")  # their sums must fit in a message
        page = self._pages[child]
        page.turn(session)
        page.link, page.below = link, below

    def enter_reports(self, child: str, session: str, reports: Iterable[ChildReport]) -> None:
        """Take a child's reports on its own children, whose bytes grow within the child's session.

        Others than those that the experiment puts below it are left out.
        """
        page, known = self._pages[child], self._below.get(child, ())
        page.turn(session)
        page.reports = {report.name: report for report in reports if report.name in known}

    def links(self) -> dict[str, Traffic]:
        """Return each child's link: `received_*` as it arrived here (up), `sent_*` as it arrived there (down).

        `wire` stays as the child told it: it sent upward.
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
        """Return what our own connection to the children's broker carried, theirs all together."""
        return self._wire_before + self._wire()

    def brokers(self) -> dict[str, TcpStats]:
        """Return the same of each child that has children."""
        return {name: (page.below_before + page.below).wire for name, page in self._pages.items()}

    def below(self) -> Traffic:
        """Return the sum of the children's own children's links."""
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
        """Return the books as they stand, for `restore` in a later process."""
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
        """Go on with the books that an earlier process of ours kept. Raises ValueError, KeyError or TypeError."""
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
    """Return the largest count; a parent asks for each message, so not by astuple, which copies deeply."""
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
