"""What a parent knows of all its children together, kept so that a message costs no look at all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from typing import Final, Generic, TypeVar

from common.protocol.messages import Failure, NodeState, Presence
from common.protocol.parent_events import Readiness
from common.protocol.round_state import LIVING
from common.protocol.targets import STAYING

LOOK_S: Final = 1.0
LOOKS: Final = 4

_C = TypeVar("_C")


class Attendance:
    """Which children are ready, and which are present, or have just finished, and owe their farewell."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.owing: set[str] = set()

    def note(self, child: str, presence: Presence | None, *, counted: bool, farewell: bool) -> None:
        """Note a child's presence; `counted`: its samples are known. `farewell`: it has sent it."""
        ready = presence is not None and presence.state is NodeState.READY and counted
        owing = presence is not None and presence.state in STAYING and not farewell
        for children, is_one in ((self.ready, ready), (self.owing, owing)):
            if is_one:
                children.add(child)
            else:
                children.discard(child)


class AwayWatch:
    """Whether a round waits for devices all of which are away by their traces; `idle_s`, inf: there are no traces.

    It is looked at several times in `idle_s`, because the waiting is reported to this node's own parent.
    """

    def __init__(self, *, idle_s: float) -> None:
        self.due = 0.0 if idle_s < inf else inf
        self._pause_s = min(LOOK_S, idle_s / LOOKS)
        self._away: frozenset[str] = frozenset()

    def look(self, away: Collection[str], now: float) -> bool:
        """Note the devices for which the round waits; return whether there are others than at the last look."""
        self.due = now + self._pause_s
        before, self._away = self._away, frozenset(away)
        return not self._away <= before


class Lacking(Generic[_C]):
    """The children that lack something. Asking costs little, as the next one to look at stays the same meanwhile."""

    def __init__(self, children: Iterable[_C] = ()) -> None:
        self._children = list(children)

    def add(self, child: _C) -> None:
        """Add a child that lacks it again."""
        self._children.append(child)

    def any(self, lacks: Callable[[_C], bool]) -> bool:
        """Return whether a child lacks it; those that do not are removed."""
        while self._children and not lacks(self._children[-1]):
            self._children.pop()
        return bool(self._children)


def readiness(
    peers: Iterable[str],
    *,
    last: Mapping[str, Presence | None],
    counted: Collection[str],
    hanging: set[str],
    waits_for: Mapping[str, str],
    other_releases: Mapping[str, str],
    idle_s: float,
) -> Readiness:
    """Return which children can take part, from their `last` presences.

    `counted`: those that have reported their samples; `hanging`: those that prepare without progress. `waits_for`: for
    whom a child waits; `other_releases`: both versions of the protocol, for children of another release.
    """
    ready, failed, missing = set(), set(), {}
    for name in peers:
        seen = last.get(name)
        if seen is not None and seen.state is NodeState.READY and name in counted:
            ready.add(name)
        elif name in hanging:
            missing[name] = f"no progress in preparing for {idle_s:g} s"
        elif seen is not None and seen.state in LIVING:
            missing[name] = f"waits for {waits_for[name]}" if waits_for.get(name) else "prepares"
        elif seen is not None and seen.state is NodeState.FAILED:
            failed.add(name)
            missing[name] = f"gave up: {seen.reason}"
            if seen.failure is Failure.STALLED:
                hanging.add(name)
        elif name not in last and name in other_releases:
            missing[name] = f"is of another release: {other_releases[name]}"
        else:
            missing[name] = "has not joined yet" if name not in last else "was lost, or left"
    return Readiness(frozenset(ready), missing, frozenset(hanging), frozenset(failed))
