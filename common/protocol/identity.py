"""Who a node is, and its claim to its name."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from common.protocol.topics import DEFAULT_LAB

CHALLENGED_MOST: Final = 16  # sessions; whoever may write to the node's state topic can send any number


@dataclass(slots=True)
class Claim:
    """One process's claim to its name: the last sessions that it asked to end, and whether it lost it to another."""

    challenged: deque[str] = field(default_factory=lambda: deque(maxlen=CHALLENGED_MOST))
    lost: bool = False

    def challenge(self, session: str) -> None:
        """Note a session that was asked to end; the oldest is dropped where there are too many."""
        if session not in self.challenged:
            self.challenged.append(session)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a node is in a run of a lab.

    `session` and `claim` are shared by its endpoints; `metrics` is its /metrics address.
    `ledger`: the account of bytes that its children count for, the session where it is not kept over restarts.
    """

    run: str
    name: str
    role: str
    session: str
    metrics: str = ""
    ledger: str = ""
    lab: str = DEFAULT_LAB
    claim: Claim = field(default_factory=Claim, compare=False)
