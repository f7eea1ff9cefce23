"""The owner's side of transfers: holds the blobs it announced and selects the chunk to publish
next.

For each blob a cursor passes once over its chunks on the broadcast stream, as long as most of the
asking receivers lack the chunk. A chunk that a single receiver lost, or missed because it started
late, is sent on the receiver's own stream. So a broadcast model crosses each link once, and a slow
receiver delays nobody: the fastest receiver sets the pace.

A chunk whose publication number is above the last one that a receiver saw is in flight. With a
smaller number, and still missing, it is lost and published again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from fedstrata.common.protocol.manifest import WINDOW_MOST
from fedstrata.common.protocol.messages import Ask, Gone, Manifest
from fedstrata.common.protocol.topics import ALL

GATHER_S: Final = 0.1
# between two restarts of one receiver; limits the cost of a flood of restarts
RESTART_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Publication:
    """One chunk to publish; `receivers` are those that lack it and get it by this stream.

    `extras`: how many of its last bytes are no model.
    """

    stream: str
    blob: str
    index: int
    number: int
    data: memoryview
    receivers: tuple[str, ...]
    extras: int = 0


@dataclass(slots=True)
class _Asker:
    lacking: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.bool_]
    own: npt.NDArray[np.int64]
    window: int
    seen_all: int
    seen_own: int
    last_own: int
    restarted_at: float
    repeats: int = 0  # of chunks that it had on its own stream, since `repeats_from`
    repeats_from: float = -inf

    def may_repeat(self, now: float) -> bool:
        """Return whether it may get another repeat: at most one window of repeats per RESTART_S."""
        if now >= self.repeats_from + RESTART_S:
            self.repeats = 0
            self.repeats_from = now
        return self.repeats < WINDOW_MOST


class _Blob:
    def __init__(
        self,
        manifest: Manifest,
        data: memoryview,
        receivers: frozenset[str],
        first: int,
        to_come: npt.NDArray[np.bool_] | None,
    ) -> None:
        self.manifest = manifest
        self.to_come = to_come
        self.data = data.cast("B")
        self.awaited = set(receivers)
        self.askers: dict[str, _Asker] = {}
        self.published = np.full(manifest.chunks, -1, np.int64)
        self.first = first
        self.last_all = first
        # outlives an asker: its receiver remembers the numbers that it saw
        self.last_own: dict[str, int] = {}
        self.cursor = 0
        self.leaving: set[tuple[str, int]] = set()
        self.gather_until: float | None = None

    def has(self, index: int) -> bool:
        return self.to_come is None or not self.to_come[index]


class Sender:
    """All blobs of one node on one connection. `first_number`: from a clock, so that numbers grow
    over restarts.
    """

    def __init__(self, *, first_number: int) -> None:
        self._first = first_number
        self._blobs: dict[str, _Blob] = {}
        self._turn = 0
        self.chunks_published = 0
        self.chunks_repeated = 0
        self.chunks_delivered = 0

    def offer(
        self,
        manifest: Manifest,
        data: memoryview,
        receivers: Iterable[str],
        *,
        to_come: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Offer a blob to these receivers; `data` must not change until `retire`.

        `to_come`, bool [chunks], marks chunks of a blob that is still arriving: they are published
        once the fetch has cleared their marks.
        """
        if manifest.blob in self._blobs:
            self._blobs[manifest.blob].awaited |= set(receivers)
        else:
            self._blobs[manifest.blob] = _Blob(
                manifest, data, frozenset(receivers), self._first, to_come
            )

    def retire(self, blob: str) -> None:
        """Stop serving a blob and release its memory."""
        self._blobs.pop(blob, None)

    def holds(self, blob: str) -> bool:
        """Return whether a blob is served."""
        return blob in self._blobs

    def receive(self, receiver: str, ask: Ask, *, now: float) -> Gone | None:
        """Handle an ask; return the reply if the blob is not held."""
        blob = self._blobs.get(ask.blob)
        if blob is None:
            if ask.lacking:
                return Gone(ask.blob)
            return None
        blob.awaited.discard(receiver)
        if not ask.lacking:
            if (asker := blob.askers.pop(receiver, None)) is not None:
                self.chunks_delivered += int(asker.lacking.sum())
            return None
        chunks = blob.manifest.chunks
        bits = np.frombuffer(ask.lacking, np.uint8)
        if bits.size != -(-chunks // 8):
            return None  # not a bitmap of this blob
        if blob.gather_until is None:
            blob.gather_until = now + GATHER_S
        lacking = np.unpackbits(bits, count=chunks).astype(np.bool_)
        asker = blob.askers.get(receiver)
        if asker is None:
            own = np.full(chunks, -1, np.int64)
            last_own = blob.last_own.get(receiver, blob.first)
            asker = _Asker(
                lacking, np.zeros(chunks, np.bool_), own, 1, blob.last_all, last_own, last_own, -inf
            )
            blob.askers[receiver] = asker
        restart = ask.restart and now >= asker.restarted_at + RESTART_S
        self.chunks_delivered += max(0, int(asker.lacking.sum()) - int(lacking.sum()))
        # a late ask must not undo a newer one
        asker.lacking = lacking if restart else lacking & asker.lacking
        asker.window = min(max(ask.window, 1), WINDOW_MOST)
        asker.seen_all = max(asker.seen_all, min(ask.seen_all, blob.last_all))
        asker.seen_own = max(asker.seen_own, min(ask.seen_own, asker.last_own))
        if restart:
            asker.restarted_at = now
            asker.seen_all = blob.last_all
            asker.seen_own = asker.last_own
        passed = np.arange(chunks) < blob.cursor
        in_flight = (blob.published > asker.seen_all) | (asker.own > asker.seen_own)
        in_flight[[index for stream, index in blob.leaving if stream in (ALL, receiver)]] = True
        asker.lost = asker.lacking & passed & ~in_flight
        return None

    def left(self, publication: Publication) -> None:
        """Note that a publication has left this node, or was lost with its connection.

        Before that no receiver can have it, so it is not repeated for receivers that ask for it
        again.
        """
        blob = self._blobs.get(publication.blob)
        if blob is not None:
            blob.leaving.discard((publication.stream, publication.index))

    def forget(self, receiver: str) -> None:
        """Drop a dead receiver; when it returns it asks again."""
        for blob in self._blobs.values():
            blob.askers.pop(receiver, None)
            blob.awaited.discard(receiver)

    def serving(self, receiver: str) -> bool:
        """Return whether a blob is being sent to this receiver."""
        return any(receiver in blob.askers for blob in self._blobs.values())

    def next_publication(
        self, now: float, ready: Callable[[Iterable[str]], bool]
    ) -> Publication | None:
        """Return the chunk to publish now, taking blobs in turn; `ready` returns whether links have
        room.
        """
        blobs = list(self._blobs.values())
        for offset in range(len(blobs)):
            blob = blobs[(self._turn + offset) % len(blobs)]
            publication = self._repair(blob, now, ready) or self._advance(blob, now, ready)
            if publication is not None:
                self._turn = (self._turn + offset + 1) % len(blobs)
                self.chunks_published += 1
                return publication
        return None

    def next_deadline(self, now: float) -> float:
        """Return when a broadcast may start without receivers that have not asked, or a delayed
        repeat is due; inf for never.
        """
        waits: list[float] = []
        for blob in self._blobs.values():
            if blob.awaited and blob.gather_until is not None:
                waits.append(blob.gather_until)
            for asker in blob.askers.values():
                if asker.repeats >= WINDOW_MOST:
                    waits.append(asker.repeats_from + RESTART_S)
        return min((at for at in waits if at > now), default=inf)

    def _advance(
        self, blob: _Blob, now: float, ready: Callable[[Iterable[str]], bool]
    ) -> Publication | None:
        askers = blob.askers
        if not askers or (blob.awaited and blob.cursor == 0 and now < (blob.gather_until or now)):
            return None
        while blob.cursor < blob.manifest.chunks and blob.has(blob.cursor):
            index = blob.cursor
            lacking = [name for name, asker in askers.items() if asker.lacking[index]]
            if 2 * len(lacking) > len(askers):
                if any(self._room(blob, askers[name]) for name in lacking):
                    if not ready(askers):
                        return None
                    blob.cursor += 1
                    return self._publish_all(blob, index, lacking)
                if not any(
                    asker.lacking[index:].any() and self._room(blob, asker)
                    for asker in askers.values()
                ):
                    return None
            # few lack it, or none with room: each gets it on its own stream, or by a repair
            blob.cursor += 1
            for name in lacking:
                askers[name].lost[index] = True
        return self._repair(blob, now, ready)

    def _repair(
        self, blob: _Blob, now: float, ready: Callable[[Iterable[str]], bool]
    ) -> Publication | None:
        for name, asker in blob.askers.items():
            if not asker.lost.any() or not self._room(blob, asker):
                continue
            index = int(asker.lost.argmax())
            losers = [other for other, state in blob.askers.items() if state.lost[index]]
            if 2 * len(losers) > len(blob.askers) and len(losers) > 1:
                if ready(blob.askers):
                    return self._publish_all(blob, index, losers)
            elif asker.own[index] >= 0 and not asker.may_repeat(now):
                continue
            elif ready((name,)):
                self.chunks_repeated += bool(blob.published[index] >= 0 or asker.own[index] >= 0)
                asker.repeats += bool(asker.own[index] >= 0)
                asker.last_own = blob.last_own[name] = asker.last_own + 1
                asker.own[index] = asker.last_own
                asker.lost[index] = False
                blob.leaving.add((name, index))
                return _publication(blob, name, index, asker.last_own, (name,))
        return None

    def _publish_all(self, blob: _Blob, index: int, receivers: list[str]) -> Publication:
        self.chunks_repeated += bool(blob.published[index] >= 0)
        blob.last_all += 1
        blob.published[index] = blob.last_all
        for name in receivers:
            blob.askers[name].lost[index] = False
        blob.leaving.add((ALL, index))
        return _publication(blob, ALL, index, blob.last_all, tuple(blob.askers))

    @staticmethod
    def _room(blob: _Blob, asker: _Asker) -> bool:
        in_flight = (blob.last_all - asker.seen_all) + (asker.last_own - asker.seen_own)
        return in_flight < asker.window


def _publication(
    blob: _Blob, stream: str, index: int, number: int, receivers: tuple[str, ...]
) -> Publication:
    manifest = blob.manifest
    data = blob.data[manifest.span(index)]
    return Publication(
        stream, manifest.blob, index, number, data, receivers, manifest.extras_in(index)
    )
