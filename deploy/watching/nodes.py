"""A node of a watched run, as its parent's last status record has it, with the records that it
publishes itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final

from fedstrata.common.protocol.messages import (
    LIVING,
    ChildCount,
    ChildStatus,
    Key,
    NodeState,
    Status,
    Step,
)
from fedstrata.common.protocol.status import STEPS

LEAST_S: Final = 0.1  # between two records
# over which a rate is taken; a working child reports its bytes every two seconds
RATE_S: Final = 5.0
UNKNOWN: Final = "unknown"  # the state of a node that nobody has reported
AT_WORK: Final = STEPS[STEPS.index(Step.ASSIGNED) : STEPS.index(Step.DONE)]


@dataclass(slots=True)
class Node:
    """One node.

    Its state is the one in its parent's last record; where that only counts the node, the state
    before. A parent that no record has, such as the cloud, has the state of its presence.
    """

    name: str
    role: str
    parent: Node | None = None
    children: dict[str, Node] = field(default_factory=dict)
    state: str = UNKNOWN
    entry: ChildStatus | None = None  # what its parent's last record has on it
    rates: tuple[float, float] | None = None  # bytes per second up and down its link
    records: deque[Status] = field(default_factory=deque)  # its own last ones
    received_at: float = -inf  # when the last of these arrived
    seen_at: float = -inf  # when it last sent something, or its parent reported it as present
    session: str = ""  # of its last presence
    reason: str = ""  # in that presence

    @property
    def alive(self) -> bool:
        """Whether it is initialising or ready."""
        return self.state in LIVING

    @property
    def proven(self) -> bool:
        """Whether it was seen since the watch began, so that it is not only a retained presence."""
        return self.seen_at > -inf

    @property
    def reported(self) -> bool:
        """Whether its parent's last record names it, or its state is known although its parent
        publishes none.
        """
        above = None if self.parent is None else self.parent.status
        return self.entry is not None or (above is None and self.state != UNKNOWN)

    @property
    def text(self) -> str:
        """Why it is not at work."""
        if self.entry is None:
            return self.reason
        return self.entry.text

    @property
    def step(self) -> Step | None:
        """Its step in its parent's last round, None if it is not known."""
        if self.entry is None:
            return None
        return self.entry.step

    @property
    def done(self) -> float:
        """Its progress within its step, 0 to 1; 0 if that is not known."""
        if self.entry is not None and self.entry.total:
            return min(1.0, self.entry.done / self.entry.total)
        return 0.0

    @property
    def works(self) -> bool:
        """Whether its parent's open round waits for it."""
        above = None if self.parent is None else self.parent.status
        return above is not None and above.open and self.step in AT_WORK and not is_gone(self.state)

    # Its own records

    @property
    def status(self) -> Status | None:
        """Its last record, None if it has published none."""
        if self.records:
            return self.records[-1]
        return None

    @property
    def key(self) -> Key | None:
        """Its children's last round, None if it is not known."""
        if self.status is None:
            return None
        return self.status.key

    @property
    def tally(self) -> list[ChildCount]:
        """The numbers of its children by state and step, in its last record."""
        if self.status is None:
            return []
        return [
            *(ChildCount(each.state, each.step, 1) for each in self.status.children),
            *self.status.others,
        ]

    @property
    def participants(self) -> tuple[int, int]:
        """How many of its children have answered in its last round, and how many take part; 0 of 0
        if unknown.
        """
        if self.key is None:
            return 0, 0
        part = [
            each for each in self.tally if each.step is not Step.IDLE and not is_gone(each.state)
        ]
        total = sum(each.count for each in part)
        return total - sum(each.count for each in part if each.step in AT_WORK), total

    def take(self, status: Status, now: float) -> bool:
        """Take a record of its own; return False for one that is not newer than the last one."""
        last_s = self.records[-1].at_s if self.records else -inf
        if not isfinite(status.at_s) or 0 <= last_s - status.at_s < RATE_S:
            return False
        if status.at_s < last_s:
            self.records.clear()  # of another clock
        self.records.append(status)
        while len(self.records) > 2 and status.at_s - self.records[0].at_s > RATE_S:
            self.records.popleft()
        self.received_at = self.seen_at = now
        return True

    def span(self) -> tuple[Status, Status, float]:
        """Return the first and the last of its kept records, and the seconds between them, at least
        LEAST_S.
        """
        first = self.records[0]
        last = self.records[-1]
        return first, last, max(LEAST_S, last.at_s - first.at_s)


def is_gone(state: str | None) -> bool:
    """Return whether this is the state of a node that was there."""
    return state in (NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED)
