"""A node's outbox: control messages and chunks for its peers, each sent at its link's pace and
counted then.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal, TypeAlias

from fedstrata.common.accounting.counters import Account, packet_bytes
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import Goodbye, Message, Result, Task
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.sender import Publication, Sender
from fedstrata.common.protocol.topics import ChunkTopic
from fedstrata.common.settings.links import LinkDirection, LinkSet

CHUNKS_IN_CLIENT: Final = 4
ASIDE_KEPT: Final = 4096  # blobs: two for each of 2,000 links
# in the counts: nodes that look for a run and are not in it, and those that watch
OTHERS: Final = "others"
# the event loop sleeps whole milliseconds: half of one early is as accurate as half late
EARLY_S: Final = 0.0005
CREDIT_S: Final = 0.02
LEAD_S: Final = 0.02


Aside: TypeAlias = Literal["probe", "frozen"]  # noise of a calibration, frozen arrays


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this message: at QoS 1 if it is retained, else at QoS 0, as everything is sent until
    it is answered.
    """

    topic: str
    body: bytes
    retain: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PublishChunk:
    """Publish this chunk at QoS 0, uncopied, and report when it has left."""

    topic: str
    chunk: Publication


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe to these topics at QoS 0; `first` on a new connection."""

    topics: tuple[str, ...]
    first: bool = False


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Unsubscribe from these topics."""

    topics: tuple[str, ...]


Output: TypeAlias = Publish | PublishChunk | Subscribe | Unsubscribe


@dataclass(frozen=True, slots=True, eq=False)
class _Departure:
    """An output that waits for its link; `parts`: its payload's bytes by kind."""

    output: Publish | PublishChunk
    peer: str
    size: int
    parts: Mapping[str, int]


class Outbox:
    """One session's outbox. `aside`: the kinds of blobs that are no models, by (owner, blob)."""

    def __init__(
        self, identity: Identity, *, sender: Sender, counters: Account, ways: LinkSet
    ) -> None:
        self._identity = identity
        self._sender = sender
        self._counters = counters
        self._peers = ways.to.keys()
        shaped = ways.to if ways.shaped else {}
        self._shaper = Shaper(shaped)
        self._waiting: list[tuple[float, int, _Departure]] = []  # by time, then in order
        self._number = 0
        self._in_client = 0
        self._last_task: tuple[Task, bytes] | None = None
        self.packet_most = inf  # bytes of a message that the broker accepts
        # sent to nodes that may join: payload and message bytes
        self._early: dict[str, tuple[int, int]] = {}
        self.aside: dict[tuple[str, str], Aside] = {}

    def begin(self, begun: float) -> None:
        """Note when the run began: from then on links have the rates of their traces."""
        self._shaper.begin(begun)

    def add_aside(self, kind: Aside, owner: str, blob: str) -> None:
        """Count this blob's bytes as of this kind; with ASIDE_KEPT others the first one of noise is
        forgotten.

        Of its owner alone: another one's model may have the same id.
        """
        self.aside[owner, blob] = kind
        # frozen arrays stay: they may be fetched at any time
        if kind == "probe" and len(self.aside) > ASIDE_KEPT:
            del self.aside[next(key for key, each in self.aside.items() if each == "probe")]

    def expect(self, name: str) -> None:
        """Note what is sent to a node that may become a peer."""
        self._early.setdefault(name, (0, 0))

    def join(self, name: str) -> None:
        """Count for a new peer what was sent to it before it was one."""
        payload, message = self._early.pop(name)
        self._counters.reassign(OTHERS, name, payload=payload, message=message)

    def forget(self, peer: str) -> None:
        """Forget when a peer's link is free, and what was sent to a node that has not become
        one.
        """
        self._early.pop(peer, None)
        self._shaper.forget(peer)

    @property
    def empty(self) -> bool:
        """Whether nothing waits for its link."""
        return not self._waiting

    def send(self, peer: str, message: Message, now: float) -> float:
        """Send a control message to a peer's inbox; return when it leaves."""
        topic = self._identity.inbox_of(peer)
        body = self._encoded(message)
        if (
            isinstance(message, Task | Result)
            and message.inline is not None
            and len(body) > self.packet_most
        ):
            # its receiver fetches the model
            body = self._encoded(message := replace(message, inline=None))
        size = packet_bytes(topic, len(body), qos=0)
        due = self._shaper.reserve((peer,), size, now)
        counted = peer if peer in self._peers else OTHERS
        if (before := self._early.get(peer)) is not None:
            self._early[peer] = before[0] + len(body), before[1] + size
        self._put(due, _Departure(Publish(topic, body), counted, size, _parts_of(message, body)))
        return due

    def publish(self, topic: str, message: Message, now: float) -> int:
        """Publish a message for those that read a topic of this node; return its bytes. It waits
        for no peer's link.
        """
        body = self._encoded(message)
        size = packet_bytes(topic, len(body), qos=0)
        self._put(now, _Departure(Publish(topic, body), OTHERS, size, _parts_of(message, body)))
        return size

    def count_received(self, sender: str, topic: str, body: bytes, message: Message) -> None:
        """Count a peer's message, but no Goodbye: it answers the last count of this end, which
        cannot include it.
        """
        if not isinstance(message, Goodbye):
            size = packet_bytes(topic, len(body), qos=0)
            self._counters.add(sender, "received", message=size, **_parts_of(message, body))

    def count_chunk(self, chunk: ChunkTopic, topic: str, size: int, *, extras: int) -> None:
        """Count a chunk of `size` bytes that a peer has sent on a topic."""
        packet = packet_bytes(topic, size, qos=0)
        parts = self._chunk_parts(chunk.node, chunk.blob, size, extras)
        self._counters.add(chunk.node, "received", message=packet, **parts)

    def to_send(self, now: float) -> list[Output]:
        """Return what is due, including chunks that receivers lack and links have room for."""
        out: list[Output] = []
        self._release(now, out)
        while self._in_client < CHUNKS_IN_CLIENT:
            chunk = self._sender.next_publication(now, lambda peers: self._shaper.ready(peers, now))
            if chunk is None:
                self._shaper.passed()
                break
            self._reserve(chunk, now)
            self._release(now, out)
        return out

    def next_deadline(self, now: float) -> float:
        """Return when `to_send` may have output, inf for never."""
        at = self._waiting[0][0] if self._waiting else inf
        if self._in_client < CHUNKS_IN_CLIENT:
            at = min(at, self._sender.next_deadline(now), self._shaper.next_ready(now))
        return at

    def sent(self, chunk: Publication) -> None:
        """Note that a chunk has left the client, or was lost with its connection."""
        self._in_client -= 1
        self._sender.left(chunk)

    def drop(self, blob: str) -> None:
        """Drop a blob's chunks that wait for their link; its memory may be overwritten
        afterwards.
        """
        kept = [entry for entry in self._waiting if not _is_chunk_of(blob, entry[2].output)]
        if len(kept) < len(self._waiting):
            heapq.heapify(kept)
            self._waiting = kept

    def clear(self) -> None:
        """Drop everything that waits: the connection is lost, and needed messages are sent again on
        the next one.
        """
        for _, _, departure in self._waiting:
            if isinstance(departure.output, PublishChunk):
                self._sender.left(departure.output.chunk)
        self._waiting.clear()

    def _encoded(self, message: Message) -> bytes:
        """Return a message's bytes; tasks that follow one another and are equal share them, with
        the model inside.
        """
        if not isinstance(message, Task):
            return serialization.encode(message, self._identity.session)
        if self._last_task is None or self._last_task[0] != message:
            self._last_task = message, serialization.encode(message, self._identity.session)
        return self._last_task[1]

    def _reserve(self, chunk: Publication, now: float) -> None:
        identity = self._identity
        topic = topics.chunk(
            identity.lab,
            identity.run,
            identity.name,
            chunk.stream,
            chunk.blob,
            chunk.index,
            chunk.number,
        )
        size = packet_bytes(topic, len(chunk.data), qos=0)
        peer = chunk.receivers[0] if len(chunk.receivers) == 1 else topics.ALL
        due = self._shaper.reserve(chunk.receivers, size, now)
        parts = self._chunk_parts(identity.name, chunk.blob, len(chunk.data), chunk.extras)
        self._put(due, _Departure(PublishChunk(topic, chunk), peer, size, parts))

    def _put(self, due: float, departure: _Departure) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (due, self._number, departure))

    def _release(self, now: float, out: list[Output]) -> None:
        while self._waiting and self._waiting[0][0] <= now + EARLY_S:
            departure = heapq.heappop(self._waiting)[2]
            self._counters.add(departure.peer, "sent", message=departure.size, **departure.parts)
            if isinstance(departure.output, PublishChunk):
                # counted late, so that chunks for a slow link do not block other links
                self._in_client += 1
            out.append(departure.output)

    def _chunk_parts(self, owner: str, blob: str, size: int, extras: int) -> dict[str, int]:
        """Return the bytes of a chunk by kind; of its last bytes `extras` are no model."""
        if (kind := self.aside.get((owner, blob))) is not None:
            return {kind: size}
        return {"model": size - extras, "extras": extras}


class Shaper:
    """Emulated links from one node to its peers, without privileges; a peer without a link here is
    sent to at once.

    Each token bucket is stored as the time at which the emulated link will be free. A message of n
    bytes leaves when its last bit would have arrived, n / rate after the link became free, so a
    transfer takes bytes / rate; the link's delay is added. All messages to a peer pass its bucket,
    control messages too, and leave in the order in which they were reserved. A late wake-up of the
    event loop is compensated by a short credit. Only a link that something waited for has credit:
    an idle link accumulates none. A link with a trace has its rates and delays from the beginning
    of the run on; in an outage its messages wait.
    """

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

    def forget(self, peer: str) -> None:
        """Forget a peer's link."""
        self._free_at.pop(peer, None)
        self._last.pop(peer, None)
        self._waited.discard(peer)
        self._waiting.discard(peer)

    def passed(self) -> None:
        """Note that all bulk messages that may leave were considered: a waiting one has waited at
        the next call.
        """
        self._waited = self._waiting
        self._waiting = set()

    def ready(self, peers: Iterable[str], now: float) -> bool:
        """Return whether the next bulk message to these peers may be reserved; if not, it waits for
        them.
        """
        busy = [peer for peer in peers if self._free_at.get(peer, 0.0) - LEAD_S > now]
        self._waiting.update(busy)
        return not busy

    def next_ready(self, now: float) -> float:
        """Return when the next busy link becomes ready, inf if none is busy."""
        times = (free_at - LEAD_S for free_at in self._free_at.values())
        return min((at for at in times if at > now), default=inf)

    def reserve(self, peers: Iterable[str], nbytes: int, now: float) -> float:
        """Reserve the peers' links for a message and return when it leaves, in monotonic seconds.

        A message to several peers leaves when the last of their links has taken it.
        """
        ways = {peer: way for peer in peers if (way := self._ways.get(peer)) is not None}
        due = now
        for peer, way in ways.items():
            free_at = now
            delay_s = way.delay_s
            if way.rate is not None:
                credit_s = CREDIT_S if peer in self._waited or peer in self._waiting else 0.0
                begin = max(self._free_at.get(peer, 0.0), now - credit_s)
                if way.trace is None or self._begun is None:
                    free_at = begin + nbytes / way.rate
                else:
                    passed_s = way.trace.finish(max(0.0, begin - self._begun), nbytes)
                    free_at = self._begun + passed_s
                    delay_s = way.trace.delay_at(passed_s)
                self._free_at[peer] = free_at
            due = max(due, max(free_at, now) + delay_s, self._last.get(peer, 0.0))
        self._last.update(dict.fromkeys(ways, due))
        return due


def _is_chunk_of(blob: str, output: Publish | PublishChunk) -> bool:
    return isinstance(output, PublishChunk) and output.chunk.blob == blob


def _parts_of(message: Message, body: bytes) -> dict[str, int]:
    """Return the bytes of a control message by kind: a model and its extras may be inside."""
    if not isinstance(message, (Task, Result)) or message.inline is None:
        return {"control": len(body)}
    size = len(message.inline)
    extras = min(message.model.extras, len(message.inline))
    return {"control": len(body) - size, "model": size - extras, "extras": extras}
