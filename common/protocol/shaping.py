"""Links of so many bytes a second and so much delay, kept at the sender without any privilege.

The bucket is written as the time at which the emulated link will be free: a message of n bytes leaves when
its last bit would have arrived, n / rate after the link became free, so a transfer takes bytes / rate; the delay of
the way comes on top. Whatever goes to a peer goes through its bucket, control too, and leaves in the order in which it
was handed over. A short credit makes up for late wake-ups of the event loop; the long-run rate is exact.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from common.links import Way

CREDIT_S: Final = 0.02
LEAD_S: Final = 0.02
EARLY_S: Final = 0.0005  # the event loop sleeps whole milliseconds: half of one too early is as good as too late


class Shaper:
    """The ways from one node to its peers; a peer that has none here is sent to at once."""

    def __init__(self, ways: Mapping[str, Way]) -> None:
        self._ways = ways
        self._free_at: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def ready(self, peers: Iterable[str], now: float) -> bool:
        """Return whether the next bulk message to these peers may be reserved."""
        return self.ready_at(peers) <= now

    def ready_at(self, peers: Iterable[str]) -> float:
        """Return when `ready` becomes true, monotonic seconds."""
        return max((self._free_at.get(peer, 0.0) - LEAD_S for peer in peers), default=0.0)

    def next_ready(self, now: float) -> float | None:
        """Return when the next of the busy links becomes ready."""
        return min((at for free_at in self._free_at.values() if (at := free_at - LEAD_S) > now), default=None)

    def reserve(self, peers: Iterable[str], nbytes: int, now: float) -> float:
        """Put a message on the peers' links and return when it is to leave, monotonic seconds.

        One message to several peers leaves when the last of their links has taken it.
        """
        ways = {peer: way for peer in peers if (way := self._ways.get(peer)) is not None}
        due = now
        for peer, way in ways.items():
            if way.rate is None:
                free_at = now
            else:
                free_at = max(self._free_at.get(peer, 0.0), now - CREDIT_S) + nbytes / way.rate
                self._free_at[peer] = free_at
            due = max(due, max(free_at, now) + way.delay_s, self._last.get(peer, 0.0))
        self._last.update(dict.fromkeys(ways, due))
        return due


class Departures:
    """What waits for its time to leave; of what is due, the earlier goes first, then what was handed over first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._none_left = asyncio.Event()
        self._none_left.set()

    def at(self, due: float, leave: Callable[[], None]) -> None:
        """Call `leave` at this time, before this returns where it has come."""
        heapq.heappush(self._waiting, (due, next(self._count), leave))
        self._release()

    async def empty(self) -> None:
        """Wait until nothing waits."""
        await self._none_left.wait()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._waiting[0][0] <= self._loop.time() + EARLY_S:
            heapq.heappop(self._waiting)[2]()
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][0], self._release)
            self._none_left.clear()
        else:
            self._none_left.set()
