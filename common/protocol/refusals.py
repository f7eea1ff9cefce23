"""Refused messages: each is counted with its reason and changes nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from common.errors import Flooded, Misfit, TooLarge, WireError


class Refusal(Enum):
    """Why a message is refused."""

    MALFORMED = "malformed"
    STRANGER = "unknown sender"
    SESSION = "unknown session"
    MISFIT = "does not fit"
    FLOOD = "too many"
    LARGE = "too large"


def refusal_of(error: WireError) -> Refusal:
    """Return why a message with this error is refused."""
    found = {Misfit: Refusal.MISFIT, Flooded: Refusal.FLOOD, TooLarge: Refusal.LARGE}
    return found.get(type(error), Refusal.MALFORMED)


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """One of `count` messages of a sender that were refused for this reason so far; reported at 1, 2, 4, 8 ..."""

    refusal: Refusal
    sender: str
    reason: str
    count: int


class Refusals:
    """The refused messages of one session, by sender; all senders that are not peers are counted together."""

    def __init__(self, peers: Collection[str]) -> None:
        self._peers = peers
        self._counts: Counter[tuple[str, Refusal]] = Counter()

    def add(self, refusal: Refusal, sender: str, reason: str) -> MessageRefused | None:
        """Count one message; return the event if it is to be logged."""
        known = sender if sender in self._peers else ""
        self._counts[known, refusal] += 1
        count = self._counts[known, refusal]
        return MessageRefused(refusal, sender, reason, count) if count & (count - 1) == 0 else None

    @property
    def total(self) -> int:
        """The number of refused messages."""
        return self._counts.total()

    def of(self, refusal: Refusal) -> int:
        """Return the number of messages refused for this reason. May be called from another thread."""
        return sum(count for (_, kind), count in list(self._counts.items()) if kind is refusal)
