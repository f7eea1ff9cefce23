"""Scrape targets: the /metrics addresses of the nodes below a parent, from their presences.

The cloud knows its institutions by their presence. It knows the devices, which may be on another broker, from the
institutions' presences. All of this is retained state, so it survives a restart of any node.
"""

from __future__ import annotations

import re
from math import inf
from typing import Final

from common.protocol.messages import NodeState, Presence, Target

STAYING: Final = (NodeState.INIT, NodeState.READY, NodeState.FINISHED)
AWAITED: Final = (NodeState.LOST, NodeState.DISCONNECTED)
REPORT_S: Final = 1.0  # a hundred devices that join together are reported in one or two messages
ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]{2,45}\]|[\w.-]{1,253}):[0-9]{1,5}")


class Targets:
    """The /metrics addresses of a parent's living children, and of those below them."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._below: dict[str, tuple[Target, ...]] = {}
        self._reported: tuple[Target, ...] = ()
        self.due = inf

    def receive(self, child: str, presence: Presence | None, *, now: float) -> None:
        """Handle a child's presence.

        An absent institution may return, and its devices wait for it: until then its last report of them remains valid.
        """
        if presence is not None and presence.state in STAYING:
            self._own[child], self._below[child] = presence.metrics, presence.targets
        else:
            self._own.pop(child, None)
            if presence is None or presence.state not in AWAITED:
                self._below.pop(child, None)
        if self.due == inf and self.own() != self._reported:
            self.due = now + REPORT_S

    def changed(self, now: float) -> tuple[Target, ...] | None:
        """Return the children's addresses if a report is due, at most once per REPORT_S."""
        if now < self.due:
            return None
        self.due, self._reported = inf, self.own()
        return self._reported

    def own(self) -> tuple[Target, ...]:
        """Return the addresses of the children that have one."""
        return tuple(Target(name, address) for name, address in sorted(self._own.items()) if ADDRESS.fullmatch(address))

    def below(self, child: str) -> tuple[Target, ...]:
        """Return a child's report of its own children."""
        return tuple(target for target in self._below.get(child, ()) if ADDRESS.fullmatch(target.metrics))
