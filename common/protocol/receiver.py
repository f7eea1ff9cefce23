"""The receiver's side of transfers: fetches blobs, asks for missing chunks, checks each chunk on
arrival.

An `Ask` is sent at the start, after each quarter of a window, when a gap in the publication numbers
shows a loss, and when the connection falls silent. It always has the complete state, so any ask may
be lost.

Silence is relative to the link's own pace: if publications arrive in order every 8 s, 2 s of
silence are no loss. A connection on which bytes flow, by the kernel's count, is not silent either,
even if no message is complete: a chunk of 1 MB takes two minutes on a link of 64 kbit/s. A
connection that is kept busy by others is never silent. So a fetch that received nothing for
`PATIENCE_S` asks again, unless everything on the connection is for this fetch.

Pauses between asks become longer, up to `PATIENCE_MOST_S`, but `ASKS_LEAST` of them fit into the
time without progress after which a node is given up: several losses in a row must not end a run.

Damaged or unknown chunks are refused and change nothing. While valid chunks arrive, a fetch
continues, whatever else is published under its owner's name. A fetch that got only damaged chunks
for `SPOILT_S` has failed.

No owner can block a slot: a starved fetch moves to the end of the queue when others wait for a
slot. It keeps its chunks and still accepts further ones, because on a slow link a chunk may be in
transit for minutes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstrata.common.protocol.manifest import chunk_digest, missing, window_for
from fedstrata.common.protocol.messages import Ask, Manifest
from fedstrata.common.protocol.topics import ALL, ChunkTopic
from fedstrata.common.settings.links import LinkDirection

PATIENCE_S: Final = 15.0
REPAIR_S: Final = 2.0
CHUNKS_OF_SILENCE: Final = 3.0
REPAIR_MOST_S: Final = 15.0
PATIENCE_MOST_S: Final = 60.0
ASKS_LEAST: Final = 6  # for each `idle_s`
DAMAGED_MOST: Final = 3
SPOILT_S: Final = 30.0  # a disturbance of some seconds may damage every chunk
ASKS_PER_WINDOW: Final = 2
# 250 Mbit/s: a link with a lower declared rate uses a fraction of a slot
SLOT_BYTES_S: Final = 31_250_000
LOST_LEAST: Final = 8
LOST_SHARE: Final = 0.01
# more than the acknowledgements and pings of a connection without models, TLS included
FLOW_BYTES_S: Final = 256
OWN: Final = "own"  # a receiver's own stream
BLOBS_KNOWN: Final = 4  # of each owner, of those with extras


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blob `blob` of `owner` is complete in its buffer, with every chunk checked.

    `rate`: bytes per second between the arrivals of the first and the last chunk, None if they
    arrived together.
    """

    owner: str
    blob: str
    rate: float | None = None


class FetchFailure(Enum):
    """Why a blob is not available."""

    GONE = "its owner no longer holds it"
    DAMAGED = "wrong digests"


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The blob is not available from this owner."""

    owner: str
    blob: str
    cause: FetchFailure
    reason: str


ReceiverEvent: TypeAlias = Fetched | FetchFailed


@dataclass(slots=True)
class Fetch:
    """The transfer of one blob from its owner."""

    owner: str
    manifest: Manifest
    buffer: memoryview
    lacking: npt.NDArray[np.bool_]
    left: int
    window: int
    pace_s: float = 0.0  # the time of a chunk on the owner's link, if its rate is declared
    share: float = 1.0  # of a slot
    seen: dict[str, int] = field(default_factory=dict)
    # streams with a number since the last restart, which undoes others'
    trusted: set[str] = field(default_factory=set)
    since_ask: int = 0
    due: bool = True
    restart: bool = True
    damaged: int = 0  # since the last valid one
    spoilt_at: float = 0.0
    waits_since: float = 0.0  # before it asks again
    progressed: float = 0.0  # since then it has a slot, or has received nothing valid
    patience_s: float = PATIENCE_S
    starved: int = 0  # times since the last valid chunk
    first_at: float | None = None
    since_first: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Its owner and blob, of which there is one fetch at a time."""
        return self.owner, self.manifest.blob

    def rate(self, now: float) -> float | None:
        """Return bytes per second from the first chunk's arrival to now, None if unknown."""
        if self.since_first and self.first_at is not None and now > self.first_at:
            return self.since_first / (now - self.first_at)
        return None


@dataclass(slots=True)
class Landing:
    """A chunk that is being written to its destination; `view` is set to None when its fetch
    ends.
    """

    topic: ChunkTopic
    view: memoryview | None


class Receiver:
    """All fetches of one node over one connection, at most `slots` of them active at a time; slow
    links share slots.

    `window`: limit of the chunks in flight; less if they would delay the keep-alive on the owner's
    link. `exclusive`: the connection serves one owner only, so everything it carries is a reply to
    this node's asks. `idle_s`: seconds without progress after which this node is given up.
    """

    def __init__(
        self,
        *,
        window: int,
        slots: int,
        ways: Mapping[str, LinkDirection] | None = None,
        keepalive_s: float = inf,
        exclusive: bool = False,
        idle_s: float = inf,
    ) -> None:
        self._most_s = min(PATIENCE_MOST_S, idle_s / ASKS_LEAST)
        self._window = window
        self._ways = ways or {}
        self._keepalive_s = keepalive_s
        self._slots = slots
        self.exclusive = exclusive
        self._active: OrderedDict[tuple[str, str], Fetch] = OrderedDict()
        self._parked: dict[tuple[str, str], Fetch] = {}  # queued fetches that were active before
        self._queued: deque[Fetch] = deque()
        self._completed: deque[tuple[str, Ask]] = deque()
        self._events: deque[ReceiverEvent] = deque()
        self._landing: Landing | None = None
        self._with_extras: dict[str, deque[Manifest]] = {}  # by owner
        self._last_arrival = self._arrived = 0.0
        self._gap_s = 0.0
        self._repair_s = REPAIR_S
        # at the last message, at the last check, and its time
        self._carried: tuple[int, int, float] | None = None
        self.chunks_refused = 0
        self.chunks_arrived = 0
        self.chunks_lost = 0  # by gaps in the numbers of what arrived

    def fetch(
        self,
        owner: str,
        manifest: Manifest,
        buffer: memoryview,
        *,
        now: float,
        lacking: npt.NDArray[np.bool_] | None = None,
    ) -> bool:
        """Start or queue a fetch into `buffer`, uint8 [manifest.size]; return False if a known
        fetch continues.

        `lacking`, bool [chunks], marks the missing chunks, None: all. It is kept up to date, so
        that others may follow the fetch.
        """
        key = (owner, manifest.blob)
        if key in self._active or any(fetch.key == key for fetch in self._queued):
            return False
        if manifest.extras:
            self._with_extras.setdefault(owner, deque(maxlen=BLOBS_KNOWN)).append(manifest)
        if lacking is None:
            lacking = np.ones(manifest.chunks, np.bool_)
        way = self._ways.get(owner, LinkDirection())
        fetch = Fetch(
            owner,
            manifest,
            buffer.cast("B"),
            lacking,
            left=int(lacking.sum()),
            window=window_for(way, manifest.chunk_bytes, self._window, self._keepalive_s),
            patience_s=min(PATIENCE_S, self._most_s),
        )
        if way.rate:
            fetch.pace_s = manifest.chunk_bytes / way.rate
            fetch.share = min(1.0, way.rate / SLOT_BYTES_S)
        self._queued.append(fetch)
        if not fetch.left:  # complete from the start: only report that to the owner
            self._complete(fetch, now)
        self._promote(now)
        return True

    def take(self, owner: str, manifest: Manifest, buffer: memoryview | None, data: bytes) -> None:
        """Handle a blob that was sent inside its announcement; without a buffer it is used where it
        is.
        """
        view = memoryview(data)
        if len(data) != manifest.size or missing(manifest, view).any():
            self.chunks_refused += 1
            reason = "wrong digest of an inline model"
            self._events.append(FetchFailed(owner, manifest.blob, FetchFailure.DAMAGED, reason))
            return
        if buffer is not None:
            buffer.cast("B")[:] = view
        self._events.append(Fetched(owner, manifest.blob))

    def drop(self, owner: str, *, blob: str | None = None, now: float) -> None:
        """Drop the fetches from an owner, or one of them. Their buffers are not written any
        more.
        """
        landing = self._landing
        if (
            landing is not None
            and landing.topic.node == owner
            and blob in (None, landing.topic.blob)
        ):
            self._landing = landing.view = None
        for fetches in (self._active, self._parked):
            for key in [k for k in fetches if k[0] == owner and blob in (None, k[1])]:
                del fetches[key]
        self._queued = deque(
            f for f in self._queued if f.owner != owner or blob not in (None, f.manifest.blob)
        )
        self._promote(now)

    def yield_slot(self, owner: str, *, now: float) -> None:
        """Move an owner's fetches behind those that wait for a slot; they keep their chunks."""
        if self._queued:
            for key in [key for key in self._active if key[0] == owner]:
                self._park(key)
        self._promote(now)

    def ask_again(self, owner: str, *, now: float) -> None:
        """Ask an owner with a new connection again: none of its chunks is in flight."""
        for fetch in self._under_way():
            if fetch.owner == owner:
                fetch.due = fetch.restart = True
                fetch.waits_since = now

    def lacks(self, owner: str, blob: str) -> int:
        """Return the number of missing chunks of a fetch, 0 if there is no such fetch."""
        fetch = self._begun((owner, blob))
        if fetch:
            return fetch.left
        return 0

    def arrived(self) -> dict[str, tuple[int, int]]:
        """Return by owner how many chunks of each fetch under way have arrived, and how many it
        has.
        """
        return {
            fetch.owner: (fetch.manifest.chunks - fetch.left, fetch.manifest.chunks)
            for fetch in self._under_way()
        }

    def extras_in(self, topic: ChunkTopic) -> int:
        """Return how many bytes of a chunk are extras, even if it is late; 0 for a blob that was
        not fetched lately.
        """
        for manifest in self._with_extras.get(topic.node, ()):
            if manifest.blob == topic.blob and topic.index < manifest.chunks:
                return manifest.extras_in(topic.index)
        return 0

    def wanted(self) -> set[tuple[str, str]]:
        """Return the (owner, blob) pairs whose streams must be subscribed."""
        return self._active.keys() | self._parked.keys()

    def place(self, topic: ChunkTopic, size: int) -> Landing | None:
        """Return the destination of an arriving chunk, None if it is not wanted.

        Only one at a time: a connection carries its messages one after another.
        """
        fetch = self._begun((topic.node, topic.blob))
        index = topic.index
        if fetch is None or index >= fetch.manifest.chunks or not fetch.lacking[index]:
            return None
        span = fetch.manifest.span(index)
        if size != span.stop - span.start:
            return None
        self._landing = Landing(topic, fetch.buffer[span])
        return self._landing

    def receive_chunk(self, topic: ChunkTopic, data: bytes | memoryview, *, now: float) -> bool:
        """Handle one publication; return whether it was new. Never raises on unknown input.

        `data` may be the view of its `place`, which is already in its destination.
        """
        landing = self._landing
        self._landing = None
        silent_s = now - self._arrived
        fetch = self._begun((topic.node, topic.blob))
        index = topic.index
        if fetch is None or index >= fetch.manifest.chunks:
            self.note_arrival(now)
            self.chunks_refused += 1
            return False
        span = fetch.manifest.span(index)
        size = span.stop - span.start
        sound = len(data) == size and chunk_digest(data) == fetch.manifest.digest(index)
        if not sound:
            self._damaged(fetch, index, now)
        stream = ALL if topic.stream == ALL else OWN
        self._count(fetch, stream, topic.number, silent_s, sound=sound)
        if not sound:
            return False  # damaged chunks alone are silence: they are asked for less and less often
        self.note_arrival(now)
        fetch.waits_since = now
        fetch.damaged = 0
        # repeats must not block a slot that others wait for
        if fetch.lacking[index] or not self._queued:
            fetch.progressed = now
            fetch.starved = 0
        if not fetch.lacking[index]:
            return False
        if landing is None or data is not landing.view:
            fetch.buffer[span] = data
        fetch.lacking[index] = False
        fetch.left -= 1
        if fetch.first_at is None:
            fetch.first_at = now
        else:
            fetch.since_first += size
        if fetch.left == 0:
            self._complete(fetch, now)
        return True

    def gone(self, owner: str, blob: str, *, now: float) -> None:
        """Handle the owner's report that it does not hold the blob."""
        if (fetch := self._begun((owner, blob))) is not None:
            self._fail(fetch, FetchFailure.GONE, FetchFailure.GONE.value, now)

    def note_arrival(self, now: float) -> None:
        """Note the arrival of bytes: the connection is not silent."""
        self._repair_s = min(max(self._least_repair_s(), 2 * self._gap_s), self._most_s)
        self._last_arrival = self._arrived = now
        self._carried = None

    def reconnected(self, now: float) -> None:
        """Ask for everything again: the chunks in flight were lost with the old connection."""
        self._listen(now)
        for fetch in self._under_way():
            fetch.due = fetch.restart = True
            fetch.waits_since = fetch.progressed = now
            fetch.damaged = 0

    def tick(self, now: float, *, carried: int = -1) -> None:
        """Ask again if the connection has been silent: only silence shows the loss of the last
        chunks.

        `carried`: bytes that the present connection has received so far, -1 if unknown.
        """
        if self._carried is None:
            self._carried = carried, carried, now
        if now >= self.next_deadline():
            self._look(carried, now)
        silent = now >= self._last_arrival + self._repair_s
        for key, fetch in list(self._active.items()):
            starved = now >= self._starves_at(fetch)
            if starved:
                fetch.starved += 1
                fetch.patience_s = min(2 * fetch.patience_s, self._most_s)
                if self._queued:
                    self._park(key)
                    continue
            if silent or starved:
                fetch.due = fetch.restart = True
                if starved or not self._queued:  # silence must not block the slot either
                    fetch.waits_since = now
        if silent:
            self._last_arrival = now
            self._repair_s = max(
                self._repair_s, min(2 * self._repair_s, REPAIR_MOST_S, self._most_s)
            )
        self._promote(now)

    def next_deadline(self) -> float:
        """Return when `tick` has something to do, inf without fetches."""
        if not self._active:
            return inf
        return min(
            self._last_arrival + self._repair_s, *map(self._starves_at, self._active.values())
        )

    def is_due(self) -> bool:
        """Return whether an ask is due, or an event has not been taken."""
        return bool(self._completed or self._events) or any(
            fetch.due for fetch in self._active.values()
        )

    def to_send(self) -> list[tuple[str, Ask]]:
        """Return the asks that are due, each with its receiving owner."""
        asks = list(self._completed)
        self._completed.clear()
        for fetch in self._active.values():
            if fetch.due:
                asks.append((fetch.owner, self._ask(fetch)))
                if fetch.restart:
                    fetch.trusted.clear()
                fetch.due = fetch.restart = False
                fetch.since_ask = 0
        return asks

    @property
    def loses(self) -> bool:
        """Whether the broker drops chunks: a connection loses none of what the broker sends."""
        return self.chunks_lost >= max(LOST_LEAST, LOST_SHARE * self.chunks_arrived)

    def next_event(self) -> ReceiverEvent | None:
        """Return the next finished or failed fetch."""
        if self._events:
            return self._events.popleft()
        return None

    def _look(self, carried: int, now: float) -> None:
        """Treat bytes that have arrived since the last check as a sign of life.

        Messages arrive one after another. So more than about one chunk since the last message is no
        chunk.
        """
        first, before, since = self._carried or (carried, carried, now)
        self._carried = first, carried, now
        most = 2 * max(fetch.manifest.chunk_bytes for fetch in self._active.values())
        flows = carried - before > FLOW_BYTES_S * max(REPAIR_S, now - since)
        if flows and before >= 0 and carried - first <= most:
            self._last_arrival = now
            for fetch in self._active.values() if self.exclusive else ():
                fetch.waits_since = fetch.progressed = now

    def _listen(self, now: float) -> None:
        self._carried = None
        self._last_arrival = self._arrived = now
        self._gap_s = 0.0
        self._repair_s = self._least_repair_s()

    def _least_repair_s(self) -> float:
        """Return the shortest silence that counts: a broker forwards whole chunks, each as slow as
        its link.
        """
        slowest = max(
            (fetch.pace_s for fetch in (*self._active.values(), *self._queued)), default=0.0
        )
        return min(max(REPAIR_S, CHUNKS_OF_SILENCE * slowest), self._most_s)

    def _promote(self, now: float) -> None:
        while self._queued and sum(fetch.share for fetch in self._active.values()) < self._slots:
            if not self._active:
                self._listen(now)
            fetch = self._queued.popleft()
            # A parked fetch may have chunks in flight: they are requested again after it starved in
            # two turns.
            was_parked = self._parked.pop(fetch.key, None) is not None
            fetch.restart = fetch.restart or not was_parked or fetch.starved > 1
            fetch.waits_since = fetch.progressed = now
            fetch.due = True
            self._active[fetch.key] = fetch

    def _park(self, key: tuple[str, str]) -> None:
        """Move an active fetch behind those that wait for a slot."""
        fetch = self._parked[key] = self._active.pop(key)
        self._queued.append(fetch)

    def _under_way(self) -> tuple[Fetch, ...]:
        return (*self._active.values(), *self._parked.values())

    def _begun(self, key: tuple[str, str]) -> Fetch | None:
        return self._active.get(key) or self._parked.get(key)

    def _starves_at(self, fetch: Fetch) -> float:
        """Return when a fetch must ask again, or release its slot, because it has received nothing
        valid.

        Its own repeated asks do not extend its hold on a slot that others wait for.
        """
        if self._queued:
            return fetch.progressed + max(PATIENCE_S, fetch.pace_s)
        return fetch.waits_since + max(fetch.patience_s, fetch.pace_s)

    def _ask(self, fetch: Fetch) -> Ask:
        lacking = np.packbits(fetch.lacking).tobytes() if fetch.left else b""
        seen = fetch.seen
        return Ask(
            fetch.manifest.blob,
            lacking,
            seen.get(ALL, 0),
            seen.get(OWN, 0),
            fetch.window,
            fetch.restart,
        )

    def _count(
        self, fetch: Fetch, stream: str, number: int, silent_s: float, *, sound: bool
    ) -> None:
        """Count a publication's number: it occupies the window until it is reported, and a gap is a
        loss.
        """
        last = fetch.seen.get(stream)
        in_order = last is None or number == last + 1
        if not sound and (not in_order or fetch.damaged > DAMAGED_MOST):
            return  # possibly not the owner's, or an owner that is not asked again forever
        self._gap_s /= 2
        if in_order:
            self._gap_s = max(silent_s, self._gap_s)
        self.chunks_arrived += 1
        if last is not None and stream in fetch.trusted:
            self.chunks_lost += min(max(0, number - last - 1), fetch.window)
        fetch.seen[stream] = max(number, last or 0) if stream in fetch.trusted else number
        fetch.trusted.add(stream)
        fetch.since_ask += 1  # a duplicate too
        gap = last is not None and number > last + 1
        if gap or not sound or fetch.since_ask >= max(1, fetch.window // ASKS_PER_WINDOW):
            fetch.due = True

    def _complete(self, fetch: Fetch, now: float) -> None:
        self._events.append(Fetched(fetch.owner, fetch.manifest.blob, fetch.rate(now)))
        self._completed.append((fetch.owner, self._ask(fetch)))
        self.drop(fetch.owner, blob=fetch.manifest.blob, now=now)

    def _damaged(self, fetch: Fetch, index: int, now: float) -> None:
        self.chunks_refused += 1
        if fetch.lacking[index]:
            fetch.damaged += 1
            if fetch.damaged == 1:
                fetch.spoilt_at = now
            elif fetch.damaged > DAMAGED_MOST and now >= fetch.spoilt_at + SPOILT_S:
                reason = (
                    f"{FetchFailure.DAMAGED.value}: {fetch.damaged} damaged chunks and no valid one"
                )
                self._fail(fetch, FetchFailure.DAMAGED, reason, now)

    def _fail(self, fetch: Fetch, cause: FetchFailure, reason: str, now: float) -> None:
        self._events.append(FetchFailed(fetch.owner, fetch.manifest.blob, cause, reason))
        self.drop(fetch.owner, blob=fetch.manifest.blob, now=now)
