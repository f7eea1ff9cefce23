"""A sender and receivers of a blob, joined in memory by a lossy, reordering line, or by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import numpy as np

from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Ask, Gone, Manifest
from fedstrata.common.protocol.outbox import Shaper
from fedstrata.common.protocol.receiver import Fetched, Receiver, ReceiverEvent
from fedstrata.common.protocol.sender import Publication, Sender
from fedstrata.common.protocol.topics import ALL, ChunkTopic
from fedstrata.common.settings.links import LinkDirection
from tests.helpers.session_lab import CHUNK, names_of
from tests.helpers.virtual_line import VirtualLine

OWNER = "cloud"


def described(data: memoryview | bytes, chunk_bytes: int = CHUNK, **more: str) -> Manifest:
    how: dict[str, str] = {"codec": "fp32", "layout": "l"} | more
    return describe(memoryview(data), chunk_bytes=chunk_bytes, **how)


def blob_of(chunks: int, seed: int = 0, *, chunk_bytes: int = CHUNK) -> tuple[Manifest, memoryview]:
    """Return a blob of so many chunks, the last one short."""
    data = memoryview(random.Random(seed).randbytes(chunk_bytes * chunks - 300))
    return described(data, chunk_bytes), data


def room_for(manifest: Manifest) -> memoryview:
    return memoryview(bytearray(manifest.size))


def lacking(chunks: int, which: Collection[int]) -> bytes:
    """Return the bits of an ask that lacks these chunks, no byte if it lacks none."""
    return np.packbits([index in which for index in range(chunks)]).tobytes() if which else b""


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
    buffers: dict[str, memoryview] = field(default_factory=dict)
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


class Line(VirtualLine):
    """Everything between the owner of a blob and its receivers, and the loop that an agent would
    run. Receivers of these names, or so many, are announced; all of them, or the first so many,
    fetch it at once, with the options of `add`.
    """

    def __init__(
        self,
        chunks: int,
        names: int | Sequence[str] = 1,
        *,
        joined: int | None = None,
        chunk_bytes: int = CHUNK,
        pace_s: float = 0.001,
        ways: Mapping[str, LinkDirection] | None = None,
        line: Mapping[str, float] | None = None,
        to_come: np.ndarray[Any, Any] | None = None,
        source: memoryview | None = None,
        **how: Any,
    ) -> None:
        super().__init__(**line or {})  # type: ignore[arg-type]
        self.names = names_of(names) if isinstance(names, int) else list(names)
        self.manifest, self.data = blob_of(chunks, chunk_bytes=chunk_bytes)
        self.pace_s = pace_s
        self.owner = Sender(first_number=5000)
        self.shaper = Shaper(ways or {})
        self.receivers: dict[str, Peer] = {}
        self.published: list[Publication] = []
        self.asked: list[tuple[str, Ask]] = []
        self.lose: Callable[[Publication], bool] = lambda publication: False
        self.begun = self.now
        self._owner_free_at = 0.0
        self.owner.offer(self.manifest, source or self.data, self.names, to_come=to_come)
        for name in self.names[:joined]:
            self.join(name, **how)

    def add(self, name: str, *, slow_s: float = 0.0, kernel: bool = False, **how: Any) -> Peer:
        """Add a receiver."""
        core = Receiver(**{"window": 8, "slots": 4, "exclusive": True} | how)
        self.receivers[name] = Peer(name, core, slow_s, kernel)
        return self.receivers[name]

    def join(self, name: str, at_s: float = 0.0, **how: Any) -> None:
        """Add a receiver, which fetches the blob."""
        self.after(at_s, self.fetch, self.add(name, **how), self.manifest)

    def fetch(self, receiver: Peer, manifest: Manifest) -> None:
        receiver.manifests[manifest.blob] = manifest
        receiver.has.setdefault(manifest.blob, set())
        buffer = receiver.buffers.setdefault(manifest.blob, room_for(manifest))
        receiver.core.fetch(OWNER, manifest, buffer, now=self.now)
        self.wake()

    def wake(self) -> None:
        """Let the loop look at the cores at this moment."""
        self.at(self.now, lambda: None)

    def reconnect(self, name: str, noticed: bool) -> None:
        """Lose all that is under way to a receiver; `noticed`: the owner saw its will."""
        receiver = self.receivers[name]
        receiver.connection += 1
        if noticed:
            self.owner.forget(name)
        receiver.core.reconnected(self.now)
        self.wake()

    def restart_owner(self, first_number: int) -> None:
        self.owner = Sender(first_number=first_number)
        self.owner.offer(self.manifest, self.data, self.receivers)

    def run(self, *, until_s: float = 600.0) -> float:
        """Play until nothing more will ever happen, and all receivers have the blob; return the
        seconds that it took.
        """
        self.play(until_s=until_s)
        for receiver in self.receivers.values():
            assert receiver.fetched == [self.manifest.blob], receiver.name
            assert receiver.buffers[self.manifest.blob] == self.data
            assert not receiver.core.wanted() and receiver.core.next_deadline() == inf
        return self.now - self.begun

    def play(self, *, until_s: float = 600.0) -> None:
        """Play until nothing more will ever happen. Fails if that takes longer."""
        while (due := self._next()) < inf:
            assert due < self.begun + until_s, f"not at rest after {until_s} s"
            self.run_until(max(self.now, due))
            for receiver in self.receivers.values():
                self._pump(receiver)
            self._publish()

    def _next(self) -> float:
        deadlines = [receiver.core.next_deadline() for receiver in self.receivers.values()]
        deadlines += [due for due, *_ in self.due[:1]]
        return min(self.owner.next_deadline(self.now), *deadlines)

    def _pump(self, receiver: Peer) -> None:
        core = receiver.core
        core.tick(self.now, carried=receiver.carried(self.now))
        receiver.events += iter(core.next_event, None)
        receiver.subscribed = core.wanted()
        for owner, ask in core.to_send():
            # it names exactly the chunks that are not here
            manifest, has = receiver.manifests[ask.blob], receiver.has[ask.blob]
            lacks = set(range(manifest.chunks)) - has
            assert owner == OWNER and ask.lacking == lacking(manifest.chunks, lacks)
            self.asked.append((receiver.name, ask))
            self.carry(partial(self._asked, receiver, ask))

    def _asked(self, receiver: Peer, ask: Ask) -> None:
        answer = self.owner.receive(receiver.name, ask, now=self.now)
        if isinstance(answer, Gone):
            self.carry(lambda: receiver.core.gone(OWNER, ask.blob, now=self.now))

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
                wanted = (OWNER, publication.blob) in receiver.subscribed
                if wanted and publication.stream in (ALL, receiver.name):
                    self._deliver(receiver, publication, due - self.now)

    def _deliver(self, receiver: Peer, publication: Publication, shaped_s: float) -> None:
        connection, sent = receiver.connection, publication
        topic = chunk_topic(
            OWNER, sent.blob, stream=sent.stream, index=sent.index, number=sent.number
        )
        data = bytes(sent.data)

        def arrive() -> None:
            if connection == receiver.connection:
                receiver.got += 1
                if receiver.core.receive_chunk(topic, data, now=self.now):
                    receiver.has[sent.blob].add(sent.index)
                    receiver.done = self.now

        if self.lose(sent):
            return
        if receiver.slow_s:  # its link takes one after the other
            receiver.free_at = max(receiver.free_at, self.now) + receiver.slow_s
            receiver.arriving.append((receiver.free_at + self.delay_s, len(data)))
            shaped_s = receiver.free_at - self.now
        self.carry(arrive, shaped_s)


class OneOwner(Sender):
    """A sender in the hand of a test, which has offered a blob."""

    def __init__(self, chunks: int, *names: str) -> None:
        super().__init__(first_number=0)
        self.manifest, self.data = blob_of(chunks)
        self.offer(self.manifest, self.data, names)

    def ask(
        self,
        name: str,
        lacks: Iterable[int] | None = None,
        seen: int = 0,
        *,
        seen_own: int = 0,
        now: float = 0.0,
        window: int = 8,
        restart: bool = True,
    ) -> None:
        """Take an ask for chunks, without any for all; it is new unless something was seen."""
        chunks = self.manifest.chunks
        bits = lacking(chunks, range(chunks) if lacks is None else set(lacks))
        ask = Ask(self.manifest.blob, bits, seen, seen_own, window, restart)
        assert self.receive(name, ask, now=now) is None

    def publishes(self, now: float = 0.0) -> list[Publication]:
        """Publish what it may now, on links with room for all of it; return that, which has left."""
        ready = partial(self.next_publication, now, lambda peers: True)
        found = [publication for publication in iter(ready, None) if publication is not None]
        for publication in found:
            self.left(publication)
        return found


class Fetches(Receiver):
    """A receiver that fetches the same blob from each of some owners, in the hand of a test."""

    def __init__(
        self,
        *owners: str,
        slots: int = 1,
        chunks: int = 4,
        chunk_bytes: int = CHUNK,
        window: int = 8,
        **how: Any,
    ) -> None:
        self.manifest, self.data = blob_of(chunks, chunk_bytes=chunk_bytes)
        super().__init__(window=window, slots=slots, **how)
        self.window = window
        self.buffers = {owner: room_for(self.manifest) for owner in owners}
        self.buffer = self.buffers[owners[0]]
        self.now = 0.0
        self.number = 0
        for owner, buffer in self.buffers.items():
            self.fetch(owner, self.manifest, buffer, now=0.0)

    def asked(self) -> dict[str, Ask]:
        """Return the last ask that is due to each owner."""
        return dict(self.to_send())

    def ticks(self, now: float, *, carried: int = -1) -> list[Ask]:
        """Look at the time, with what a kernel has received; return what is asked."""
        self.tick(now, carried=carried)
        return [ask for _, ask in self.to_send()]

    def chunk(
        self, index: int, data: bytes | None = None, *, owner: str = OWNER, blob: str | None = None
    ) -> bool:
        """Receive the next publication of an owner: a chunk of its blob, or other bytes in its
        place.
        """
        self.number += 1
        body = bytes(self.data[self.manifest.span(index)]) if data is None else data
        blob = blob or self.manifest.blob
        topic = chunk_topic(owner, blob, stream=ALL, index=index, number=self.number)
        return self.receive_chunk(topic, body, now=self.now)

    def serve(self, owner: str) -> bool:
        """Receive all chunks from an owner; return whether all were new."""
        return all(self.chunk(index, owner=owner) for index in range(self.manifest.chunks))

    def wait(self, seconds: float, *, busy: bool = True) -> dict[str, Ask]:
        """Let time pass on a connection that others keep `busy`, or that is silent; return what is
        asked meanwhile.
        """
        asked: dict[str, Ask] = {}
        for _ in range(int(seconds)):
            self.now += 1.0
            if busy:
                self.note_arrival(self.now)
            self.tick(self.now)
            asked |= self.asked()
        return asked
