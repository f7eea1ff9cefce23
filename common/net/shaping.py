"""A link of so many bytes a second, kept at the sender without any privilege.

The bucket is written as the time at which the emulated link will be free: a message of n bytes leaves when
its last bit would have arrived, n / rate after the link became free, so a transfer takes bytes / rate.
A short credit makes up for late wake-ups of the event loop; the long-run rate is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CREDIT_S: Final = 0.02
LEAD_S: Final = 0.02


class Shaper:
    """The links of one node in one direction, one for each peer; `rate` in bytes per second, None = not shaped."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_at: dict[str, float] = {}

    def ready(self, peers: Iterable[str], now: float) -> bool:
        """Return whether the next bulk message to these peers may be reserved."""
        return self.ready_at(peers) <= now

    def ready_at(self, peers: Iterable[str]) -> float:
        """Return when `ready` becomes true, monotonic seconds."""
        return max((self._free_at.get(peer, 0.0) - LEAD_S for peer in peers), default=0.0) if self.rate else 0.0

    def reserve(self, peers: Iterable[str], nbytes: int, now: float) -> float:
        """Put a message on the peers' links and return when it is to be sent, monotonic seconds."""
        if self.rate is None:
            return now
        due = now
        for peer in peers:
            free_at = max(self._free_at.get(peer, 0.0), now - CREDIT_S) + nbytes / self.rate
            self._free_at[peer] = free_at
            due = max(due, free_at)
        return due
