"""Scrape targets: the /metrics addresses of the nodes below a parent, from their presences.

A parent knows its children by their presence. It knows the nodes below them, which may be on another broker, from the
children's presences, and so on up to the cloud. All of this is retained state, so it survives a restart of any node.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import inf
from typing import Final

from common.protocol.messages import NodeState, Presence, Target

STAYING: Final = (NodeState.INIT, NodeState.READY, NodeState.FINISHED)
AWAITED: Final = (NodeState.LOST, NodeState.DISCONNECTED)
REPORT_S: Final = 1.0  # without a change, before a report: devices that join together are in one message
REPORT_MOST_S: Final = 10.0  # after the first change; each report goes to all children, as part of the presence
HTTPS: Final = "https://"  # before the address of a server that others reach by TLS only
ADDRESS: Final = re.compile(r"(https://)?(\[[0-9A-Fa-f:.%]{2,45}\]|[\w.-]{1,253}):[0-9]{1,5}")


class Targets:
    """The /metrics addresses of a parent's living children, and of all nodes below them.

    `below`: the names of all nodes below each child; a child may only report on these.
    """

    def __init__(self, below: Mapping[str, Collection[str]]) -> None:
        self._below = {child: frozenset(names) for child, names in below.items()}
        self._own: dict[str, str] = {}
        self._reports: dict[str, dict[str, str]] = {}
        self._reported: tuple[Target, ...] = ()
        self._changed_at = inf
        self.due = inf

    def receive(self, child: str, presence: Presence | None, *, now: float) -> None:
        """Handle a child's presence.

        An absent child may return, and the nodes below wait for it: until then its last report on them remains valid.
        """
        before = self._own.get(child, ""), self._reports.get(child, {})
        own, report = "", before[1]
        if presence is not None and presence.state in STAYING:
            below = self._below.get(child, ())
            own = presence.metrics
            report = {target.name: target.metrics for target in presence.targets if target.name in below}
        elif presence is None or presence.state not in AWAITED:
            report = {}
        if (own, report) != before:
            self._own[child], self._reports[child] = own, report
            self._changed_at = min(self._changed_at, now)
            self.due = min(self._changed_at + REPORT_MOST_S, now + REPORT_S)

    def changed(self, now: float) -> tuple[Target, ...] | None:
        """Return all addresses if they have changed and a report is due."""
        if now < self.due:
            return None
        self.due = self._changed_at = inf
        before, self._reported = self._reported, self.addresses()
        return None if self._reported == before else self._reported

    def addresses(self) -> tuple[Target, ...]:
        """Return the address of each node below that has one. May be called from another thread."""
        found = dict(self._own)
        for report in list(self._reports.values()):
            found |= report
        return tuple(Target(name, address) for name, address in sorted(found.items()) if ADDRESS.fullmatch(address))
