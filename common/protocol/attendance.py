"""What a parent knows from its children's presences: who can take part, their samples, farewells
and addresses.

It is kept so that a message costs no look at all children.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any, Final

from fedstrata.common.protocol.messages import LIVING, Failure, NodeState, Presence, Target
from fedstrata.common.protocol.topics import is_node

STAYING: Final = (NodeState.INIT, NodeState.READY, NodeState.FINISHED)
AWAITED: Final = (NodeState.LOST, NodeState.DISCONNECTED)
QUIET_S: Final = 5.0  # without a report of a child that prepares; it reports every two seconds
LOOK_S: Final = 1.0
LOOKS: Final = 4
VOUCHED: Final = 0.5  # of `idle_s`, after which a wait for a child counts as progress, once
# without a change, before a report: devices that join together are in one message
REPORT_S: Final = 1.0
# after the first change; each report goes to all children, as part of the presence
REPORT_MOST_S: Final = 10.0
HTTPS: Final = "https://"  # before the address of a server that others reach by TLS only
NOBODY: Final[Mapping[str, int]] = MappingProxyType({})
ADDRESS: Final = re.compile(r"(https://)?(\[[0-9A-Fa-f:.%]{2,45}\]|[\w.-]{1,253}):[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Which children can take part; those that the experiment names come first."""

    ready: frozenset[str]
    missing: Mapping[str, str]  # the others, each with the reason
    # of these, those that have prepared for `idle_s` without progress, or failed for lack of
    # progress below them
    hanging: frozenset[str]
    # of these, those that gave up or are of another release: somebody has to act
    failed: frozenset[str]

    @property
    def text(self) -> str:
        """The missing ones with their reasons, empty if there are none; first those for which
        somebody has to act.
        """
        act = self.failed | self.hanging
        found = sorted(self.missing.items(), key=lambda each: each[0] not in act)
        return "; ".join(f"{name} {reason}" for name, reason in found)


class Attendance:
    """The last presences of a parent's children. `varying`: those whose samples may change, as they
    have children.
    """

    def __init__(self, children: Iterable[str], *, varying: Collection[str] = ()) -> None:
        self._children = tuple(children)
        self._entered: set[str] = set()  # of these, those that the experiment does not name here
        self._gone: set[str] = set()  # of these, those that are not present: nobody waits for them
        self._varying = frozenset(varying)
        self.last: dict[str, Presence | None] = {}
        self.samples: dict[str, int] = {}  # of the children that have reported them
        self.tests: dict[str, int] = {}  # of the same children
        self.farewells: set[str] = set()  # the children that have sent theirs
        # of those that have come from another parent, the task that this one used last
        self.after: dict[str, int] = {}
        self._ready: set[str] = set()
        self._owing: set[str] = set()
        self._met: dict[str, str] = {}  # the session of each child's last presence
        self._counted: dict[str, str] = {}  # the session that reported its samples
        self.waits_for: dict[str, str] = {}  # whom each child that prepares waits for
        self._prepared_at: dict[str, float] = {}

    def add(self, child: str) -> None:
        """Add a child that the experiment does not name here."""
        self._children = (*self._children, child)
        self._entered.add(child)
        self._gone.add(child)

    def has_entered(self, child: str) -> bool:
        """Return whether the experiment does not name this child here."""
        return child in self._entered

    def remove(self, child: str) -> None:
        """Forget a child that the experiment does not name here."""
        self._children = tuple(name for name in self._children if name != child)
        for names in (self._entered, self._gone, self._ready, self._owing, self.farewells):
            names.discard(child)
        found: dict[str, Any]
        for found in (
            self.last,
            self.samples,
            self.tests,
            self.after,
            self._met,
            self._counted,
            self.waits_for,
        ):
            found.pop(child, None)
        self._prepared_at.pop(child, None)

    def receive(
        self, child: str, session: str, presence: Presence | None, *, published: bool
    ) -> bool:
        """Note a child's presence; return whether it must be asked for its samples.

        What is published is possibly a stranger's: new samples of a session that was not met before
        are taken from an answer only.
        """
        met = session == self._met.get(child)
        self._met[child] = session
        self.last[child] = presence
        doubtful = False
        state = None
        if presence is not None:
            state = presence.state
            doubtful = self._count(child, session, presence, met=met, published=published)
            if presence.after:
                self.after[child] = presence.after
        for children, is_one in (
            (self._ready, state is NodeState.READY and child in self.samples),
            (self._owing, state in STAYING and child not in self.farewells),
            (self._gone, state not in LIVING and child in self._entered),
        ):
            if is_one:
                children.add(child)
            else:
                children.discard(child)
        return doubtful

    def _count(
        self, child: str, session: str, presence: Presence, *, met: bool, published: bool
    ) -> bool:
        """Take the samples in a presence; return whether they are doubtful."""
        samples = presence.samples
        reported = samples or presence.state is NodeState.READY  # a ready one may have none
        if not reported or (child not in self._varying and session == self._counted.get(child)):
            return False
        usual = samples if met else -1
        if published and self.samples.get(child, usual) != samples:
            return True
        self.samples[child] = samples
        self._counted[child] = session
        self.tests[child] = presence.tests
        return False

    def preparing(self, child: str, waits_for: str, now: float) -> None:
        """Note a report of a child that prepares, and for whom it waits."""
        self.waits_for[child] = waits_for
        self._prepared_at[child] = now

    def farewell(self, child: str) -> None:
        """Note that a child has sent its final counts."""
        self.farewells.add(child)
        self._owing.discard(child)

    @property
    def complete(self) -> bool:
        """Whether all children can take part now, but those that had entered and are gone."""
        return len(self._ready) + len(self._gone) == len(self._children)

    @property
    def owes_farewells(self) -> bool:
        """Whether a child that is present or has just finished has not sent its farewell."""
        return bool(self._owing)

    def present(self) -> list[str]:
        """Return the children that are present."""
        return [
            name for name, last in self.last.items() if last is not None and last.state in LIVING
        ]

    def quiet(self, now: float) -> list[str]:
        """Return the children that stopped reporting their preparation, each again after
        QUIET_S.
        """
        quiet = []
        for name, last in self.last.items():
            prepares = last is not None and last.state is NodeState.INIT
            if prepares and now >= self._prepared_at.setdefault(name, now) + QUIET_S:
                self._prepared_at[name] = now
                quiet.append(name)
        return quiet

    def readiness(
        self, *, hanging: set[str], other_releases: Mapping[str, str], idle_s: float
    ) -> Readiness:
        """Return which children can take part. Those that had entered and are gone are not missing.

        `hanging`: those that prepare without progress; `other_releases`: both versions of the
        protocol, for children of another release.
        """
        ready = set()
        failed = set()
        missing = {}
        for name in self._children:
            if name in self._gone:
                continue
            seen = self.last.get(name)
            if name in self._ready:
                ready.add(name)
            elif name in hanging:
                missing[name] = f"no progress in preparing for {idle_s:g} s"
            elif seen is not None and seen.state in LIVING:
                waits_for = self.waits_for.get(name)
                missing[name] = f"waits for {waits_for}" if waits_for else "prepares"
            elif seen is not None and seen.state is NodeState.FAILED:
                failed.add(name)
                missing[name] = f"gave up: {seen.reason}"
                if seen.failure is Failure.STALLED:
                    hanging.add(name)
            elif name not in self.last and name in other_releases:
                failed.add(name)
                missing[name] = f"is of another release: {other_releases[name]}"
            elif seen is not None and seen.failure is Failure.MOVED:
                missing[name] = seen.reason
            else:
                missing[name] = (
                    "has not joined yet" if name not in self.last else "was lost, or left"
                )
        return Readiness(frozenset(ready), missing, frozenset(hanging), frozenset(failed))


class ProgressBelow:
    """Progress below a node, as it reports it to its own parent.

    Its wait for a child counts as progress once, after half of `idle_s` without any. Its parent has
    the same patience, which would else end first where a lost child was the last that moved.
    """

    def __init__(self, *, idle_s: float) -> None:
        self.count = 0  # grows with any progress
        self.due = inf
        self._vouched_s = VOUCHED * idle_s

    def note(self, now: float) -> None:
        """Note progress, or a reason to wait without any."""
        self.count += 1
        self.vouch_later(now)

    def vouch_later(self, now: float) -> None:
        """Let the wait for the children begin anew."""
        self.due = now + self._vouched_s

    def tick(self, now: float) -> None:
        """Count the wait, if it is due."""
        if now >= self.due:
            self.due = inf
            self.count += 1


class AwayWatch:
    """Whether a round waits for devices all of which are away by their traces; `idle_s`, inf: there
    are no traces.

    It is looked at several times in `idle_s`, because the waiting is reported to this node's own
    parent.
    """

    def __init__(self, *, idle_s: float) -> None:
        self.due = 0.0 if idle_s < inf else inf
        self._pause_s = min(LOOK_S, idle_s / LOOKS)
        self._away: frozenset[str] = frozenset()

    def look(self, away: Collection[str], now: float) -> bool:
        """Note the devices for which the round waits; return whether there are others than at the
        last look.
        """
        self.due = now + self._pause_s
        before = self._away
        self._away = frozenset(away)
        return not self._away <= before


class Targets:
    """Scrape targets: the /metrics addresses of a parent's living children, and of all nodes below
    them.

    A parent knows its children by their presence. It knows the nodes below them, which may be on
    another broker, from the children's presences, and so on up to the cloud. All of this is
    retained state, so it survives a restart of any node. `below`: the names of all nodes below each
    child; a child may only report on these, and on so many `guests`.
    """

    def __init__(
        self, below: Mapping[str, Collection[str]], guests: Mapping[str, int] = NOBODY
    ) -> None:
        self._guests = guests
        self._below = {child: frozenset(names) for child, names in below.items()}
        self._own: dict[str, str] = {}
        self._reports: dict[str, dict[str, str]] = {}
        self._reported: tuple[Target, ...] = ()
        self._changed_at = inf
        self.due = inf

    def receive(self, child: str, presence: Presence | None, *, now: float) -> None:
        """Handle a child's presence.

        An absent child may return, and the nodes below wait for it: until then its last report on
        them remains valid.
        """
        before = self._own.get(child, ""), self._reports.get(child, {})
        own = ""
        report = before[1]
        if presence is not None and presence.state in STAYING:
            own = presence.metrics
            report = self._report(child, presence.targets)
        elif presence is None or presence.state not in AWAITED:
            report = {}
        if (own, report) != before:
            self._own[child] = own
            self._reports[child] = report
            self._changed_at = min(self._changed_at, now)
            self.due = min(self._changed_at + REPORT_MOST_S, now + REPORT_S)

    def _report(self, child: str, targets: Iterable[Target]) -> dict[str, str]:
        """Return a child's report on the nodes that may be below it."""
        below = self._below.get(child, ())
        named = {}
        guests = []
        for target in targets:
            if target.name in below:
                named[target.name] = target.metrics
            elif is_node(target.name):
                guests.append((target.name, target.metrics))
        return named | dict(guests[: self._guests.get(child, 0)])

    def remove(self, child: str, *, now: float) -> None:
        """Forget a child."""
        self.receive(child, None, now=now)
        self._own.pop(child, None)
        self._reports.pop(child, None)

    def changed(self, now: float) -> tuple[Target, ...] | None:
        """Return all addresses if they have changed and a report is due."""
        if now < self.due:
            return None
        self.due = self._changed_at = inf
        before = self._reported
        self._reported = self.addresses()
        if self._reported == before:
            return None
        return self._reported

    def addresses(self) -> tuple[Target, ...]:
        """Return the address of each node below that has one. May be called from another thread."""
        found = dict(self._own)
        for report in list(self._reports.values()):
            found |= report
        return tuple(
            Target(name, address)
            for name, address in sorted(found.items())
            if ADDRESS.fullmatch(address)
        )
