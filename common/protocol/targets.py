"""Where Prometheus finds the nodes below a parent: each publishes its address in its presence.

The cloud knows its institutions by their presence, and devices, which may be on another broker, by what their
institution's presence reports of them. All of it is state, so it survives a restart of anybody.
"""

from __future__ import annotations

import re
from math import inf
from typing import Final

from common.protocol.messages import NodeState, Presence, Target

STAYING: Final = (NodeState.INIT, NodeState.READY, NodeState.FINISHED)
AWAITED: Final = (NodeState.LOST, NodeState.DISCONNECTED)
REPORT_S: Final = 1.0  # a hundred devices that come together are reported in one message or two
ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]{2,45}\]|[\w.-]{1,253}):[0-9]{1,5}")


class Targets:
    """The /metrics of a parent's children that are alive, and of those below them."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._below: dict[str, tuple[Target, ...]] = {}
        self._reported: tuple[Target, ...] = ()
        self.due = inf

    def receive(self, child: str, presence: Presence | None, *, now: float) -> None:
        """Take a child's presence.

        An institution that is away may come back, and its devices wait for it: what it reported of them holds so long.
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
        """Return the children's addresses where they are due to be reported, at most once in REPORT_S."""
        if now < self.due:
            return None
        self.due, self._reported = inf, self.own()
        return self._reported

    def own(self) -> tuple[Target, ...]:
        """Return the addresses of the children, those that have one."""
        return tuple(Target(name, address) for name, address in sorted(self._own.items()) if ADDRESS.fullmatch(address))

    def below(self, child: str) -> tuple[Target, ...]:
        """Return what a child reported of its own."""
        return tuple(target for target in self._below.get(child, ()) if ADDRESS.fullmatch(target.metrics))
