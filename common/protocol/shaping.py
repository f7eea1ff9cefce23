"""Emulated links with a rate and a delay, enforced by the sender without privileges.

Each token bucket is stored as the time at which the emulated link will be free. A message of n bytes leaves when its
last bit would have arrived, n / rate after the link became free, so a transfer takes bytes / rate; the link's delay is
added. All messages to a peer pass its bucket, control messages too, and leave in the order in which they were reserved.
A late wake-up of the event loop is compensated by a short credit. Only a link that something waited for has credit: an
idle link accumulates none. A link with a trace has its rates and delays from the beginning of the run on; in an outage
its messages wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from common.experiment.links import LinkDirection

CREDIT_S: Final = 0.02
LEAD_S: Final = 0.02


class Shaper:
    """The links from one node to its peers; a peer without a link here is sent to at once."""

    def __init__(self, ways: Mapping[str, LinkDirection]) -> None:
        self._ways = ways
        self._begun: float | None = None
        self._free_at: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._waited: set[str] = set()
        self._waiting: set[str] = set()

    def begin(self, begun: float) -> None:
        """Replay the links' traces from this time on; the run's first global round began then."""
        self._begun = begun

    def passed(self) -> None:
        """Note that all bulk messages that may leave were considered: a waiting one has waited at the next call."""
        self._waited, self._waiting = self._waiting, set()

    def ready(self, peers: Iterable[str], now: float) -> bool:
        """Return whether the next bulk message to these peers may be reserved; if not, it waits for them."""
        busy = [peer for peer in peers if self._free_at.get(peer, 0.0) - LEAD_S > now]
        self._waiting.update(busy)
        return not busy

    def next_ready(self, now: float) -> float | None:
        """Return when the next busy link becomes ready."""
        return min((at for free_at in self._free_at.values() if (at := free_at - LEAD_S) > now), default=None)

    def reserve(self, peers: Iterable[str], nbytes: int, now: float) -> float:
        """Reserve the peers' links for a message and return when it leaves, in monotonic seconds.

        A message to several peers leaves when the last of their links has taken it.
        """
        ways = {peer: way for peer in peers if (way := self._ways.get(peer)) is not None}
        due = now
        for peer, way in ways.items():
            free_at, delay_s = now, way.delay_s
            if way.rate is not None:
                credit_s = CREDIT_S if peer in self._waited or peer in self._waiting else 0.0
                begin = max(self._free_at.get(peer, 0.0), now - credit_s)
                if way.trace is None or self._begun is None:
                    free_at = begin + nbytes / way.rate
                else:
                    passed_s = way.trace.finish(max(0.0, begin - self._begun), nbytes)
                    free_at, delay_s = self._begun + passed_s, way.trace.delay_at(passed_s)
                self._free_at[peer] = free_at
            due = max(due, max(free_at, now) + delay_s, self._last.get(peer, 0.0))
        self._last.update(dict.fromkeys(ways, due))
        return due
