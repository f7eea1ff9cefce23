"""A sender and receivers, joined in memory by a lossy, reordering line."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Ask, Gone, Manifest
from fedstrata.common.protocol.outbox import Shaper
from fedstrata.common.protocol.receiver import Fetched, Receiver, ReceiverEvent
from fedstrata.common.protocol.sender import Publication, Sender
from fedstrata.common.protocol.topics import ALL, ChunkTopic
from fedstrata.common.settings.links import LinkDirection

OWNER = "cloud"
CHUNK = 1024


def blob_of(chunks: int, seed: int = 0, *, chunk_bytes: int = CHUNK) -> tuple[Manifest, memoryview]:
    """Return a blob of so many chunks, the last one short."""
    data = random.Random(seed).randbytes(chunk_bytes * chunks - 300)
    return describe(
        memoryview(data), chunk_bytes=chunk_bytes, codec="fp32", layout="l"
    ), memoryview(data)


def chunk_topic(owner: str, blob: str, *, stream: str, index: int, number: int) -> ChunkTopic:
    """Return the topic of a chunk, in some run."""
    return ChunkTopic("lab", "run-1", owner, stream, blob, index, number)


@dataclass
class Peer:
    """One node that fetches; `slow_s` is what its link needs for a chunk, `kernel`: it can tell
    what comes in.
    """

    name: str
    core: Receiver
    slow_s: float = 0.0
    kernel: bool = False
    arriving: list[tuple[float, int]] = field(default_factory=list)
    buffers: dict[str, bytearray] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    has: dict[str, set[int]] = field(default_factory=dict)
    subscribed: set[tuple[str, str]] = field(default_factory=set)
    events: list[ReceiverEvent] = field(default_factory=list)
    connection: int = 0
    free_at: float = 0.0
    got: int = 0
    done: float = 0.0

    def carried(self, now: float) -> int:
        """Return what its kernel has received, -1 where it does not tell."""
        parts = (
            size * min(1.0, max(0.0, 1.0 - (end - now) / self.slow_s))
            for end, size in self.arriving
        )
        return int(sum(parts)) if self.kernel else -1

    @property
    def fetched(self) -> list[str]:
        return [event.blob for event in self.events if isinstance(event, Fetched)]


class Line:
    """Everything between one owner and its receivers, and the loop that an agent would run."""

    def __init__(
        self,
        *,
        seed: int = 0,
        loss: float = 0.0,
        duplicates: float = 0.0,
        delay_s: float = 0.005,
        jitter_s: float = 0.0,
        pace_s: float = 0.001,
        ways: Mapping[str, LinkDirection] | None = None,
    ) -> None:
        self.now = 1000.0
        self.loss, self.duplicates = loss, duplicates
        self.delay_s, self.jitter_s, self.pace_s = delay_s, jitter_s, pace_s
        self.owner = Sender(first_number=5000)
        self.shaper = Shaper(ways or {})
        self.receivers: dict[str, Peer] = {}
        self.published: list[Publication] = []
        self.asked: list[tuple[str, Ask]] = []
        self.finished: dict[str, float] = {}
        self.lose: Callable[[Publication], bool] = lambda publication: False
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._owner_free_at = 0.0

    def at(self, due: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (due, next(self._order), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def add(
        self,
        name: str,
        *,
        window: int = 8,
        slots: int = 4,
        slow_s: float = 0.0,
        kernel: bool = False,
    ) -> Peer:
        core = Receiver(window=window, slots=slots, exclusive=True)
        self.receivers[name] = Peer(name, core, slow_s, kernel)
        return self.receivers[name]

    def fetch(self, receiver: Peer, manifest: Manifest) -> None:
        receiver.manifests[manifest.blob] = manifest
        receiver.has.setdefault(manifest.blob, set())
        buffer = receiver.buffers.setdefault(manifest.blob, bytearray(manifest.size))
        receiver.core.fetch(OWNER, manifest, memoryview(buffer), now=self.now)
        self.wake()

    def wake(self) -> None:
        """Let the loop look at the cores at this moment."""
        self.at(self.now, lambda: None)

    def reconnect(self, receiver: Peer, *, noticed: bool) -> None:
        """Lose all that is under way to a receiver; `noticed`: the owner saw its will."""
        receiver.connection += 1
        if noticed:
            self.owner.forget(receiver.name)
        receiver.core.reconnected(self.now)
        self.wake()

    def restart_owner(self, first_number: int, *blobs: tuple[Manifest, memoryview]) -> None:
        self.owner = Sender(first_number=first_number)
        for manifest, data in blobs:
            self.owner.offer(manifest, data, self.receivers)

    def run(self, *, until_s: float = 600.0) -> None:
        """Play until nothing more will ever happen. Fails if that takes longer."""
        end = self.now + until_s
        while (due := self._next()) < inf:
            assert due < end, f"not at rest after {until_s} s"
            self.now = max(self.now, due)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for receiver in self.receivers.values():
                self._pump(receiver)
            self._publish()

    def _next(self) -> float:
        deadlines = [receiver.core.next_deadline() for receiver in self.receivers.values()]
        if self._events:
            deadlines.append(self._events[0][0])
        return min(self.owner.next_deadline(self.now), *deadlines)

    def _pump(self, receiver: Peer) -> None:
        core = receiver.core
        core.tick(self.now, carried=receiver.carried(self.now))
        while (event := core.next_event()) is not None:
            receiver.events.append(event)
            self.finished[receiver.name] = self.now
        receiver.subscribed = core.wanted()
        for owner, ask in core.to_send():
            assert owner == OWNER
            self._check(receiver, ask)
            self.asked.append((receiver.name, ask))
            self._carry(lambda ask=ask: self._asked(receiver, ask))  # type: ignore[misc]

    def _check(self, receiver: Peer, ask: Ask) -> None:
        """An ask names exactly the chunks that are not here."""
        manifest, has = receiver.manifests[ask.blob], receiver.has[ask.blob]
        bits = np.unpackbits(np.frombuffer(ask.lacking, np.uint8))
        assert {index for index, bit in enumerate(bits) if bit} == set(range(manifest.chunks)) - has

    def _asked(self, receiver: Peer, ask: Ask) -> None:
        answer = self.owner.receive(receiver.name, ask, now=self.now)
        if isinstance(answer, Gone):
            self._carry(lambda: receiver.core.gone(OWNER, ask.blob, now=self.now))

    def _publish(self) -> None:
        while self._owner_free_at <= self.now:
            publication = self.owner.next_publication(
                self.now, lambda peers: self.shaper.ready(peers, self.now)
            )
            if publication is None:
                if (ready_at := self.shaper.next_ready(self.now)) < inf:
                    self.at(ready_at, lambda: None)
                return
            self.published.append(publication)
            self.owner.left(publication)
            due = self.shaper.reserve(publication.receivers, len(publication.data), self.now)
            self._owner_free_at = self.now + self.pace_s
            self.at(self._owner_free_at, lambda: None)
            for receiver in self.receivers.values():
                if (OWNER, publication.blob) in receiver.subscribed and publication.stream in (
                    ALL,
                    receiver.name,
                ):
                    self._deliver(receiver, publication, due - self.now)

    def _deliver(self, receiver: Peer, publication: Publication, shaped_s: float) -> None:
        connection = receiver.connection

        def arrive() -> None:
            if connection == receiver.connection:
                receiver.got += 1
                if receiver.core.receive_chunk(
                    chunk_topic(
                        OWNER,
                        publication.blob,
                        stream=publication.stream,
                        index=publication.index,
                        number=publication.number,
                    ),
                    bytes(publication.data),
                    now=self.now,
                ):
                    receiver.has[publication.blob].add(publication.index)
                    receiver.done = self.now

        if self.lose(publication):
            return
        if receiver.slow_s:  # its link takes one after the other
            receiver.free_at = max(receiver.free_at, self.now) + receiver.slow_s
            receiver.arriving.append((receiver.free_at + self.delay_s, len(publication.data)))
            self._carry(arrive, extra_s=receiver.free_at - self.now)
        else:
            self._carry(arrive, extra_s=shaped_s)

    def _carry(self, action: Callable[[], None], extra_s: float = 0.0) -> None:
        for _ in range(1 + (self._random.random() < self.duplicates)):
            if self._random.random() >= self.loss:
                self.after(self.delay_s + extra_s + self._random.random() * self.jitter_s, action)


def broadcast(
    line: Line, chunks: int, names: Sequence[str], *, chunk_bytes: int = CHUNK, **how: float
) -> tuple[Manifest, memoryview]:
    """Offer one blob to receivers of these names, who all ask at once."""
    manifest, data = blob_of(chunks, chunk_bytes=chunk_bytes)
    line.owner.offer(manifest, data, names)
    for name in names:
        line.fetch(line.add(name, **how), manifest)  # type: ignore[arg-type]
    return manifest, data


def check_complete(line: Line, manifest: Manifest, data: memoryview) -> None:
    for receiver in line.receivers.values():
        assert receiver.fetched == [manifest.blob], receiver.name
        assert receiver.buffers[manifest.blob] == data
        assert not receiver.core.wanted() and receiver.core.next_deadline() == inf


def published(owner: Sender, now: float) -> list[Publication]:
    """Let an owner publish what it may now, on links with room for all of it; return that, which
    has left.
    """
    ready = partial(owner.next_publication, now, lambda peers: True)
    found = [publication for publication in iter(ready, None) if publication is not None]
    for publication in found:
        owner.left(publication)
    return found
