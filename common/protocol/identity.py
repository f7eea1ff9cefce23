"""A node's identity, and its claim to its name."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from common.protocol.topics import DEFAULT_LAB

CHALLENGED_MOST: Final = 16  # sessions; a peer with access to the state topic can send any number


@dataclass(slots=True)
class Claim:
    """One process's claim to its name: the last sessions that it challenged, and whether it lost the name."""

    challenged: deque[str] = field(default_factory=lambda: deque(maxlen=CHALLENGED_MOST))
    lost: bool = False

    def challenge(self, session: str) -> None:
        """Note a challenged session; beyond the limit the oldest is dropped."""
        if session not in self.challenged:
            self.challenged.append(session)


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's identity in a run of a lab.

    `session` and `claim` are shared by its endpoints; `metrics` is its /metrics address. `ledger`: the id of the byte
    ledger that its children count for, empty: the session, because the ledger is not kept across restarts.
    """

    run: str
    name: str
    role: str
    session: str
    metrics: str = ""
    ledger: str = ""
    lab: str = DEFAULT_LAB
    claim: Claim = field(default_factory=Claim, compare=False)
