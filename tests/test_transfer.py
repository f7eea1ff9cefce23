"""Pulling: owner and receivers joined in memory by a line that loses, duplicates and reorders, on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import RefusedModel
from common.experiment.links import LinkDirection
from common.protocol.manifest import ModelForm, chunk_bytes_for, chunk_digest, describe, window_for
from common.protocol.messages import Ask, Gone, Manifest
from common.protocol.outbox import Shaper
from common.protocol.receiver import (
    ASKS_LEAST,
    LOST_LEAST,
    PATIENCE_MOST_S,
    PATIENCE_S,
    REPAIR_MOST_S,
    REPAIR_S,
    SPOILT_S,
    Fetched,
    FetchFailed,
    FetchFailure,
    Receiver,
    ReceiverEvent,
)
from common.protocol.sender import RESTART_S, Publication, Sender
from common.protocol.topics import ALL
from tests.helpers.examples import examples

OWNER = "cloud"
CHUNK = 1024


def blob_of(chunks: int, seed: int = 0, *, chunk_bytes: int = CHUNK) -> tuple[Manifest, memoryview]:
    """Return a blob of so many chunks, the last one short."""
    data = random.Random(seed).randbytes(chunk_bytes * chunks - 300)
    return describe(memoryview(data), chunk_bytes=chunk_bytes, codec="fp32", layout="l"), memoryview(data)


@dataclass
class Peer:
    """One node that fetches; `slow_s` is what its link needs for a chunk, `kernel`: it can tell what comes in."""

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
        parts = (size * min(1.0, max(0.0, 1.0 - (end - now) / self.slow_s)) for end, size in self.arriving)
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

    def add(self, name: str, *, window: int = 8, slots: int = 4, slow_s: float = 0.0, kernel: bool = False) -> Peer:
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
        while (due := self._next()) is not None:
            assert due < end, f"not at rest after {until_s} s"
            self.now = max(self.now, due)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for receiver in self.receivers.values():
                self._pump(receiver)
            self._publish()

    def _next(self) -> float | None:
        times = [self._events[0][0]] if self._events else []
        deadlines = [receiver.core.next_deadline() for receiver in self.receivers.values()]
        deadlines.append(self.owner.next_deadline(self.now))
        return min((at for at in (*times, *deadlines) if at is not None), default=None)

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
            publication = self.owner.next_publication(self.now, lambda peers: self.shaper.ready(peers, self.now))
            if publication is None:
                if (ready_at := self.shaper.next_ready(self.now)) is not None:
                    self.at(ready_at, lambda: None)
                return
            self.published.append(publication)
            self.owner.left(publication)
            due = self.shaper.reserve(publication.receivers, len(publication.data), self.now)
            self._owner_free_at = self.now + self.pace_s
            self.at(self._owner_free_at, lambda: None)
            for receiver in self.receivers.values():
                if (OWNER, publication.blob) in receiver.subscribed and publication.stream in (ALL, receiver.name):
                    self._deliver(receiver, publication, due - self.now)

    def _deliver(self, receiver: Peer, publication: Publication, shaped_s: float) -> None:
        connection = receiver.connection

        def arrive() -> None:
            if connection == receiver.connection:
                receiver.got += 1
                if receiver.core.receive_chunk(
                    OWNER, publication.blob, stream=publication.stream, index=publication.index,
                    number=publication.number, data=bytes(publication.data), now=self.now,
                ):  # fmt: skip
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
        assert not receiver.core.wanted() and receiver.core.next_deadline() is None


def names_of(count: int) -> list[str]:
    return [f"device-{i}" for i in range(count)]


# Without loss


@pytest.mark.parametrize("receivers", range(1, 9))
@pytest.mark.parametrize("chunks", [1, 7, 8, 9, 40])
def test_a_broadcast_crosses_each_link_once(receivers: int, chunks: int) -> None:
    line = Line()
    manifest, data = broadcast(line, chunks, names_of(receivers))
    line.run()
    check_complete(line, manifest, data)
    assert [(p.stream, p.index) for p in line.published] == [(ALL, index) for index in range(chunks)]
    assert all(receiver.got == chunks for receiver in line.receivers.values())
    assert line.owner.chunks_published == chunks and line.owner.chunks_repeated == 0
    assert line.owner.chunks_delivered == receivers * chunks
    assert not any(line.owner.serving(name) for name in line.receivers)


def test_a_broadcast_waits_for_those_announced_but_not_for_ever() -> None:
    line = Line()
    manifest, data = blob_of(5)
    line.owner.offer(manifest, data, names_of(3))
    for name in names_of(2):
        line.fetch(line.add(name), manifest)
    begun = line.now
    line.lose = lambda publication: not begun + 0.1 <= line.now <= begun + 0.2  # nothing before a tenth of a second
    line.run()
    check_complete(line, manifest, data)
    assert len(line.published) == 5


def test_a_broadcast_starts_when_all_announced_have_asked() -> None:
    line = Line()
    manifest, data = blob_of(5)
    line.owner.offer(manifest, data, names_of(3))
    fetches = [line.add(name) for name in names_of(3)]
    for delay, receiver in zip((0.0, 0.02, 0.05), fetches, strict=True):
        line.after(delay, lambda receiver=receiver: line.fetch(receiver, manifest))  # type: ignore[misc]
    begun = line.now
    line.run()
    check_complete(line, manifest, data)
    assert len(line.published) == 5 and line.now - begun < 0.1


@pytest.mark.parametrize("window", [2, 3, 8, 64])
def test_a_window_bounds_what_is_in_flight(window: int) -> None:
    line = Line(delay_s=0.1)
    manifest, data = broadcast(line, 100, ["device-0"], window=window)
    receiver = line.receivers["device-0"]
    most = 0

    def watch(publication: Publication) -> bool:
        nonlocal most
        most = max(most, len(line.published) - receiver.got)
        return False

    line.lose = watch
    line.run()
    check_complete(line, manifest, data)
    assert most == min(window, 64) and len(line.published) == 100


def test_a_window_of_any_size_is_clamped() -> None:
    manifest, data = blob_of(200)
    for window, most in ((0, 1), (1, 1), (10**12, 64)):
        owner = Sender(first_number=1)
        owner.offer(manifest, data, ["a"])
        owner.receive("a", Ask(manifest.blob, b"\xff" * 25, 0, 0, window, True), now=0.0)
        published = 0
        while owner.next_publication(0.0, lambda peers: True):
            published += 1
        assert published == most


def test_slow_receivers_stop_nobody_and_cost_nothing() -> None:
    line = Line()
    manifest, data = blob_of(60)
    line.owner.offer(manifest, data, names_of(10))
    for number, name in enumerate(names_of(10)):
        line.fetch(line.add(name, slow_s=0.0 if number < 6 else 0.5), manifest)
    begun, done = line.now, {}
    for name, receiver in line.receivers.items():
        inner = receiver.core.receive_chunk

        def note(*what: object, name: str = name, inner: Callable[..., bool] = inner, **more: object) -> bool:
            done[name] = line.now - begun
            return inner(*what, **more)

        receiver.core.receive_chunk = note  # type: ignore[method-assign]
    line.run()
    check_complete(line, manifest, data)
    assert len(line.published) == 60  # each chunk once, whoever is slow
    assert max(done[name] for name in names_of(6)) < 0.5
    assert min(done[name] for name in names_of(10)[6:]) >= 30.0


@pytest.mark.parametrize("slow_s", [1.0, 2.05, 4.1, 10.0])
def test_a_link_that_is_declared_slow_is_not_asked_twice(slow_s: float) -> None:
    """128 kbit/s and less, upward: a broker passes on whole chunks, so the parent's connection is silent meanwhile."""
    line = Line()
    manifest, data = blob_of(30)
    line.owner.offer(manifest, data, ["parent"])
    ways = {OWNER: LinkDirection(CHUNK / slow_s)}
    core = Receiver(window=8, slots=4, ways=ways, keepalive_s=120.0)
    line.receivers["parent"] = Peer("parent", core, slow_s)
    line.fetch(line.receivers["parent"], manifest)
    line.run(until_s=4000.0)
    check_complete(line, manifest, data)
    assert len(line.published) == 30


@pytest.mark.parametrize("slow_s", [1.0, 3.0, 4.0, 10.0, 20.0])
def test_a_link_slower_than_the_repair_time_is_not_flooded(slow_s: float) -> None:
    line = Line()
    manifest, data = broadcast(line, 100, ["device-0"], slow_s=slow_s)
    line.run(until_s=4000.0)
    check_complete(line, manifest, data)
    assert len(line.published) <= 100 + 4 * 8  # what the first silences cost, and nothing for each chunk


@given(
    rate=st.floats(1000.0, 1e7),
    chunk_bytes=st.integers(32_768, 1_900_000),
    chunks=st.integers(1, 12),
    window=st.integers(2, 64),
)
@examples(50)
@example(rate=8000.0, chunk_bytes=1_000_000, chunks=12, window=8)  # 64 kbit/s: 125 s for a chunk
def test_no_chunk_is_asked_for_twice_while_bytes_flow(rate: float, chunk_bytes: int, chunks: int, window: int) -> None:
    line = Line()
    slow_s = chunk_bytes / rate
    manifest, data = broadcast(
        line, chunks, ["device-0"], chunk_bytes=chunk_bytes, slow_s=slow_s, kernel=True, window=window
    )
    line.run(until_s=10 + (chunks + 1) * slow_s)
    check_complete(line, manifest, data)
    assert len(line.published) == chunks
    assert [ask.restart for _, ask in line.asked] == [True] + [False] * (len(line.asked) - 1)
    assert line.receivers["device-0"].core.chunks_asked_again == 0


@given(rate=st.floats(1000.0, 1e7), chunk_bytes=st.integers(32_768, 1_900_000), chunks=st.integers(1, 12))
@examples(50)
@example(rate=8000.0, chunk_bytes=1_000_000, chunks=12)
def test_when_bytes_stop_it_is_asked_again(rate: float, chunk_bytes: int, chunks: int) -> None:
    line = Line()
    slow_s = chunk_bytes / rate
    manifest, data = broadcast(line, chunks, ["device-0"], chunk_bytes=chunk_bytes, slow_s=slow_s, kernel=True)
    line.lose = lambda publication: len(line.published) == chunks  # the last, which only silence shows
    line.run(until_s=10 + PATIENCE_MOST_S + (chunks + 2) * slow_s)
    check_complete(line, manifest, data)
    assert [p.index for p in line.published] == [*range(chunks), chunks - 1]


def test_a_late_receiver_gets_what_it_missed_on_its_own_stream() -> None:
    line = Line(pace_s=0.01)
    manifest, data = broadcast(line, 50, names_of(3))
    line.after(0.25, lambda: line.fetch(line.add("late"), manifest))
    line.run()
    check_complete(line, manifest, data)
    own = [p.index for p in line.published if p.stream != ALL]
    assert {p.stream for p in line.published} == {ALL, "late"}
    assert len(own) == len(set(own)) < 30 and len(line.published) == 50 + len(own)


@examples(40)
@given(st.integers(1, 30), st.integers(1, 4), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.2]))
def test_chunks_are_passed_on_as_they_come_and_never_before(
    chunks: int, receivers: int, draw: random.Random, loss: float
) -> None:
    """Cut-through: the owner is itself still fetching; its chunks come in any order, over a second."""
    line = Line(seed=draw.randrange(1000), loss=loss)
    manifest, data = blob_of(chunks)
    here, lacking = bytearray(manifest.size), np.ones(chunks, np.bool_)
    line.owner.offer(manifest, memoryview(here), names_of(receivers), to_come=lacking)
    publish = line.owner.next_publication

    def watched(now: float, ready: Callable[[Iterable[str]], bool]) -> Publication | None:
        publication = publish(now, ready)
        assert publication is None or not lacking[publication.index]
        return publication

    line.owner.next_publication = watched  # type: ignore[method-assign]

    def arrive(index: int) -> None:
        here[manifest.span(index)] = data[manifest.span(index)]
        lacking[index] = False

    order = list(range(chunks))
    draw.shuffle(order)
    for place, index in enumerate(order):
        line.after((place + 1) / chunks, lambda index=index: arrive(index))  # type: ignore[misc]
    for name in names_of(receivers):
        line.fetch(line.add(name), manifest)
    line.run()
    check_complete(line, manifest, data)
    if not loss:
        assert len(line.published) == chunks


def test_a_model_on_its_way_reaches_the_next_tier_a_chunk_later() -> None:
    line = Line(pace_s=0.01)
    manifest, data = blob_of(40)
    lacking = np.ones(40, np.bool_)
    line.owner.offer(manifest, data, ["device"], to_come=lacking)
    for index in range(40):
        line.after(0.05 * (index + 1), lambda index=index: lacking.__setitem__(index, False))  # type: ignore[misc]
    line.fetch(line.add("device"), manifest)
    start = line.now
    line.run()
    check_complete(line, manifest, data)
    assert line.finished["device"] - start <= 0.05 * 40 + 0.01 + 2 * line.delay_s


def test_what_has_not_left_its_owner_is_not_published_twice() -> None:
    """An undeclared slow way out: the receiver receives nothing for long and asks again from the start."""
    owner = Sender(first_number=0)
    manifest, data = blob_of(6)
    owner.offer(manifest, data, ["a"])
    everything = Ask(manifest.blob, b"\xfc", 0, 0, 3, True)
    owner.receive("a", everything, now=0.0)
    under_way = [owner.next_publication(1.0, lambda peers: True) for _ in range(3)]
    owner.receive("a", everything, now=9.0)
    assert owner.next_publication(9.0, lambda peers: True).index == 3  # type: ignore[union-attr]
    for publication in under_way:
        assert publication is not None
        owner.left(publication)
    owner.receive("a", everything, now=20.0)  # they did leave, and did not arrive
    again = [owner.next_publication(20.0, lambda peers: True) for _ in range(3)]
    assert [publication.index for publication in again if publication] == [0, 1, 2]


def test_two_blobs_take_turns() -> None:
    line = Line()
    receiver = line.add("device-0", slots=2)
    blobs = [blob_of(20, seed) for seed in (1, 2)]
    for manifest, data in blobs:
        line.owner.offer(manifest, data, ["device-0"])
        line.fetch(receiver, manifest)
    line.run()
    assert set(receiver.fetched) == {manifest.blob for manifest, _ in blobs}
    assert all(receiver.buffers[manifest.blob] == data for manifest, data in blobs)
    order = [p.blob for p in line.published]
    assert len(order) == 40 and len(set(order[:8])) == 2


FAST, SLOW = [f"fast-{i}" for i in range(6)], [f"slow-{i}" for i in range(2)]
WAYS = dict.fromkeys(FAST, LinkDirection(1e6)) | dict.fromkeys(SLOW, LinkDirection(2e4))


def broadcast_to(names: Sequence[str], *streams: Sequence[str], chunks: int = 100) -> tuple[Line, dict[str, float]]:
    """Send a blob over links of their own rates, one stream for each group; return the seconds that each took."""
    line = Line(ways=WAYS)
    for number, group in enumerate(streams):
        data = memoryview(random.Random(0).randbytes(CHUNK * chunks))
        manifest = describe(data, chunk_bytes=CHUNK, codec="fp32", layout="l", salt=str(number))
        line.owner.offer(manifest, data, group)
        for name in group:
            line.fetch(line.add(name), manifest)
    begun = line.now
    line.run()
    assert all(len(receiver.fetched) == 1 for receiver in line.receivers.values())
    return line, {name: line.receivers[name].done - begun for name in names}


def test_unequal_links_do_not_wait_for_each_other() -> None:
    """Six fast and two slow receivers, with a stream for each group as a parent makes them."""
    _, alone = broadcast_to(FAST, FAST)
    _, slow_alone = broadcast_to(SLOW, SLOW)
    line, together = broadcast_to([*FAST, *SLOW], FAST, SLOW)
    assert max(together[name] for name in FAST) <= 1.5 * max(alone.values())
    assert max(together[name] for name in SLOW) <= 1.05 * max(slow_alone.values())
    assert max(slow_alone.values()) == pytest.approx(100 * CHUNK / 2e4, rel=0.05)
    assert [p.stream for p in line.published] == [ALL] * 200  # no copy for a single one
    first_half = [set(p.receivers) for p in line.published[:100]]
    assert first_half.count(set(FAST)) > 90  # the fast are served when the slow have hardly begun


def test_on_one_stream_the_slowest_link_sets_the_pace() -> None:
    """Why a parent makes groups."""
    _, alone = broadcast_to(FAST, FAST)
    _, together = broadcast_to(FAST, [*FAST, *SLOW])
    assert max(together.values()) > 20 * max(alone.values())


def test_a_delay_of_the_link_is_no_loss() -> None:
    line = Line(ways={"device-0": LinkDirection(1e5, 0.4)})
    manifest, data = broadcast(line, 60, ["device-0"], window=64)
    begun = line.now
    line.run()
    check_complete(line, manifest, data)
    assert len(line.published) == 60 and line.now - begun < 60 * CHUNK / 1e5 + 0.6


def test_nothing_is_published_while_links_have_no_room() -> None:
    manifest, data = blob_of(9)
    owner = Sender(first_number=1)
    owner.offer(manifest, data, ["a", "b"])
    for name in ("a", "b"):
        owner.receive(name, Ask(manifest.blob, b"\xff\x80", 0, 0, 8, True), now=0.0)
    seen: list[set[str]] = []

    def busy(peers: object) -> bool:
        seen.append(set(peers))  # type: ignore[call-overload]
        return False

    assert owner.next_publication(0.0, busy) is None and seen == [{"a", "b"}]
    publication = owner.next_publication(0.0, lambda peers: True)
    assert publication is not None and publication.index == 0 and set(publication.receivers) == {"a", "b"}


# With loss


@pytest.mark.parametrize("loss", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("receivers", [1, 3, 8])
def test_a_broadcast_survives_loss_duplicates_and_reordering(receivers: int, loss: float) -> None:
    line = Line(seed=receivers, loss=loss, duplicates=0.1, jitter_s=0.05)
    manifest, data = broadcast(line, 40, names_of(receivers))
    line.run()
    check_complete(line, manifest, data)


@pytest.mark.parametrize("lost", [0, 3, 39])
def test_a_lost_chunk_is_published_once_more(lost: int) -> None:
    line = Line()
    manifest, data = broadcast(line, 40, names_of(3))
    gone: list[Publication] = []

    def lose(publication: Publication) -> bool:
        if publication.index == lost and len(gone) < 1:
            gone.append(publication)
            return True
        return False

    line.lose = lose
    line.run()
    check_complete(line, manifest, data)
    again = [p for p in line.published if p.index == lost][1:]
    assert len(again) == 1 and again[0].stream == "device-0"
    assert line.owner.chunks_repeated == 1 and len(line.published) == 41


def test_what_most_lost_is_repeated_for_all() -> None:
    line = Line()
    manifest, data = broadcast(line, 40, names_of(4))
    line.lose = lambda publication: publication.index == 11 and publication.number < 5030
    line.run()
    check_complete(line, manifest, data)
    assert [p.stream for p in line.published if p.index == 11][:2] == [ALL, ALL]


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("moment", [0.004, 0.02, 0.05])
def test_a_receiver_that_reconnects_goes_on(moment: float, noticed: bool) -> None:
    line = Line()
    manifest, data = broadcast(line, 60, names_of(3))
    line.after(moment, lambda: line.reconnect(line.receivers["device-1"], noticed=noticed))
    begun = line.now
    line.run()
    check_complete(line, manifest, data)
    assert line.now - begun < 2.0  # without waiting for silence
    assert len(line.published) <= 60 + 2 * 8


def test_a_receiver_that_came_back_after_its_death_is_served_within_its_window() -> None:
    """Own-stream numbers go on: the receiver remembers the last one it saw, and so must the owner."""
    line = Line(delay_s=0.02)
    manifest, data = blob_of(80)
    for name in names_of(2):
        line.add(name)
    line.owner.offer(manifest, data, [])
    line.fetch(line.receivers["device-1"], manifest)
    line.after(1.0, lambda: line.fetch(line.receivers["device-0"], manifest))  # all of it on its own stream
    line.after(1.2, lambda: line.reconnect(line.receivers["device-0"], noticed=True))
    line.run()
    check_complete(line, manifest, data)
    own = [p for p in line.published if p.stream == "device-0"]
    assert [p.number for p in own] == sorted({p.number for p in own})
    assert len(own) <= 80 + 8


@pytest.mark.parametrize("moment", [0.01, 0.02, 0.05])
def test_an_owner_that_restarts_is_asked_for_the_rest(moment: float) -> None:
    line = Line()
    manifest, data = broadcast(line, 60, names_of(4))
    line.after(moment, lambda: line.restart_owner(9000, (manifest, data)))
    line.run()
    check_complete(line, manifest, data)
    had = sum(p.number < 9000 for p in line.published)
    assert len(line.published) <= 60 + 8 and had > 0


def test_full_windows_of_others_do_not_hold_back_a_receiver() -> None:
    """Two that hang lack the chunk at the cursor, the third lacks only later ones: it must not wait for them."""
    manifest, data = blob_of(16)
    owner = Sender(first_number=1)
    owner.offer(manifest, data, [])
    for name in ("hangs-1", "hangs-2"):
        owner.receive(name, Ask(manifest.blob, b"\xff\xff", 0, 0, 2, True), now=0.0)
    owner.receive("lives", Ask(manifest.blob, b"\x00\xff", 0, 0, 8, True), now=0.0)
    lacking = set(range(8, 16))
    for _ in range(40):
        publication = owner.next_publication(0.0, lambda peers: True)
        if publication is None:
            break
        if publication.stream in (ALL, "lives"):
            lacking.discard(publication.index)
            bits = np.packbits([index in lacking for index in range(16)]).tobytes() if lacking else b""
            numbers = (publication.number, 0) if publication.stream == ALL else (0, publication.number)
            owner.receive("lives", Ask(manifest.blob, bits, *numbers, 8, False), now=0.0)
    assert not lacking


def test_losses_are_repaired_on_a_connection_that_is_never_silent() -> None:
    """At a parent the heartbeats of other children go on for ever: they must not hide a lost window."""
    line = Line()
    manifest, data = broadcast(line, 30, ["device-0"])
    core = line.receivers["device-0"].core
    line.lose = lambda publication: line.now < 1001.0 and publication.index >= 5

    def chatter() -> None:
        core.note_arrival(line.now)
        if core.wanted():
            line.after(0.5, chatter)

    chatter()
    line.run(until_s=100.0)
    check_complete(line, manifest, data)


def test_silence_is_answered_at_growing_intervals() -> None:
    core = Receiver(window=8, slots=4)
    manifest, _ = blob_of(4)
    core.fetch(OWNER, manifest, memoryview(bytearray(manifest.size)), now=0.0)
    asked = []
    while (due := core.next_deadline()) is not None and due < 60:
        core.tick(due)
        asked += [due] * len(core.to_send())
    gaps = np.diff([0.0, *asked])
    assert asked[0] == 2.0 and (np.diff(gaps) >= 0).all() and gaps[-1] == 15.0


def asked_at(core: Receiver, carried: Callable[[float], int], *, until_s: float) -> list[float]:
    """Return when a fetch that gets no message asks, over a connection that carries so many bytes by the time."""
    manifest, _ = blob_of(4, chunk_bytes=2_000_000)
    core.fetch(OWNER, manifest, memoryview(bytearray(manifest.size)), now=0.0)
    core.tick(0.0, carried=carried(0.0))
    asked = [0.0] * len(core.to_send())
    while (due := core.next_deadline()) is not None and due < until_s:
        core.tick(due, carried=carried(due))
        asked += [due] * len(core.to_send())
    return asked


def test_bytes_that_flow_are_no_silence() -> None:
    own = Receiver(window=8, slots=4, exclusive=True)
    assert asked_at(own, lambda now: 5000 + int(8000 * now), until_s=250.0) == [0.0]


def test_bytes_that_never_become_a_chunk_are_none() -> None:
    own = Receiver(window=8, slots=4, exclusive=True)
    assert 500.0 < asked_at(own, lambda now: 5000 + int(8000 * now), until_s=600.0)[1] < 500.0 + 2 * REPAIR_S


def test_bytes_that_stop_are_silence() -> None:
    own = Receiver(window=8, slots=4, exclusive=True)
    asked = asked_at(own, lambda now: int(8000 * min(now, 100.0)), until_s=200.0)
    assert asked[0] == 0.0 and 100.0 + REPAIR_S <= asked[1] <= 100.0 + 2 * REPAIR_S


def test_acknowledgements_and_pings_are_no_sign_of_a_model() -> None:
    own = Receiver(window=8, slots=4, exclusive=True)
    assert asked_at(own, lambda now: int(100 * now), until_s=60.0) == asked_at(
        Receiver(window=8, slots=4), lambda now: -1, until_s=60.0
    )


def test_bytes_that_may_be_for_others_buy_no_more_than_patience() -> None:
    shared = Receiver(window=8, slots=4)
    assert asked_at(shared, lambda now: int(8000 * now), until_s=200.0) == [0.0, 15.0, 45.0, 105.0, 165.0]
    assert PATIENCE_S == 15.0 and PATIENCE_MOST_S == 60.0


def test_the_longest_pause_follows_the_time_after_which_a_node_is_given_up() -> None:
    for idle_s, pauses in ((30.0, [5.0] * 6), (60.0, [10.0] * 6), (120.0, [15.0, *[20.0] * 5])):
        for shared, carried in ((True, lambda now: int(8000 * now)), (False, lambda now: -1)):
            asked = asked_at(Receiver(window=8, slots=4, idle_s=idle_s), carried, until_s=idle_s)
            assert len(asked) > ASKS_LEAST - shared
            assert not shared or [b - a for a, b in itertools.pairwise(asked)] == pauses[: len(asked) - 1]


def test_a_kernel_that_begins_or_ceases_to_tell_hides_no_silence() -> None:
    for carried in (lambda now: -1 if now < 1 else 10**9, lambda now: 10**9 if now < 1 else -1):
        own = Receiver(window=8, slots=4, exclusive=True)
        assert asked_at(own, carried, until_s=60.0)[1] == REPAIR_S


def test_a_new_connection_is_counted_from_its_own_beginning() -> None:
    own = Receiver(window=8, slots=4, exclusive=True)
    manifest, _ = blob_of(4, chunk_bytes=100_000)
    own.fetch(OWNER, manifest, memoryview(bytearray(manifest.size)), now=0.0)
    own.tick(0.0, carried=10**9)
    own.reconnected(1.0)
    own.tick(1.0, carried=200)
    assert own.to_send()
    own.tick(3.0, carried=20_000)
    assert not own.to_send() and own.next_deadline() == 5.0
    own.tick(5.0, carried=20_300)
    assert own.to_send()


def test_duplicates_of_an_old_ask_do_no_lasting_harm() -> None:
    line = Line(delay_s=0.02)
    manifest, data = broadcast(line, 60, names_of(2))
    stale = Ask(manifest.blob, b"\xff" * 7 + b"\xf0", 0, 0, 8, True)
    for delay in (0.1, 0.15, 0.3, 0.5):
        line.after(delay, lambda: line.owner.receive("device-0", stale, now=line.now))
    line.run()
    check_complete(line, manifest, data)
    assert len(line.published) <= 60 + 4 * 16


SCHEDULE = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "receivers": st.integers(1, 8),
        "chunks": st.integers(1, 40),
        "window": st.integers(2, 16),
        "loss": st.sampled_from([0.0, 0.02, 0.1, 0.4]),
        "duplicates": st.sampled_from([0.0, 0.1, 0.5]),
        "jitter_s": st.sampled_from([0.0, 0.003, 0.1]),
        "slow_s": st.sampled_from([0.0, 0.05, 0.4]),
        "joins": st.lists(st.floats(0.0, 0.5), max_size=3),
        "reconnects": st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 7), st.booleans()), max_size=3),
        "restarts": st.lists(st.floats(0.0, 3.0), max_size=2),
    }
)


@examples(200)
@given(how=SCHEDULE)
def test_whatever_happens_everybody_gets_the_blob(how: dict[str, object]) -> None:
    line = Line(seed=how["seed"], loss=how["loss"], duplicates=how["duplicates"], jitter_s=how["jitter_s"])  # type: ignore[arg-type]
    names, joins = names_of(how["receivers"]), list(how["joins"])  # type: ignore[arg-type, call-overload]
    manifest, data = blob_of(how["chunks"])  # type: ignore[arg-type]
    line.owner.offer(manifest, data, names)
    for number, name in enumerate(names):
        receiver = line.add(name, window=how["window"], slow_s=how["slow_s"] if number % 3 == 1 else 0.0)  # type: ignore[arg-type]
        line.after(joins.pop() if joins else 0.0, lambda receiver=receiver: line.fetch(receiver, manifest))  # type: ignore[misc]
    for moment, who, noticed in how["reconnects"]:  # type: ignore[attr-defined]
        receiver = line.receivers[names[who % len(names)]]
        line.after(moment, lambda receiver=receiver, noticed=noticed: line.reconnect(receiver, noticed=noticed))  # type: ignore[misc]
    for moment in how["restarts"]:  # type: ignore[attr-defined]
        first = 10_000 + int(moment * 1000)
        line.after(moment, lambda first=first: line.restart_owner(first, (manifest, data)))  # type: ignore[misc]
    line.run()
    check_complete(line, manifest, data)


# Damage and strangers


class OneFetch:
    """One `Receiver` in the hand of a test."""

    def __init__(self, chunks: int = 10, *, slots: int = 4, window: int = 8) -> None:
        self.manifest, self.data = blob_of(chunks)
        self.window = window
        self.core = Receiver(window=window, slots=slots)
        self.buffer = bytearray(self.manifest.size)
        self.core.fetch(OWNER, self.manifest, memoryview(self.buffer), now=0.0)
        self.core.to_send()
        self.number = 0
        self.now = 1.0

    def chunk(self, index: int, data: bytes | None = None, *, blob: str | None = None, owner: str = OWNER) -> bool:
        self.number += 1
        body = bytes(self.data[index * CHUNK : (index + 1) * CHUNK]) if data is None else data
        return self.core.receive_chunk(
            owner, blob or self.manifest.blob, stream=ALL, index=index, number=self.number, data=body, now=self.now
        )


@pytest.mark.parametrize("body", [b"", b"x", b"x" * CHUNK, b"x" * (CHUNK + 1), b"x" * (CHUNK - 1)])
def test_a_damaged_chunk_is_refused_and_asked_for_again(body: bytes) -> None:
    one = OneFetch()
    assert not one.chunk(3, body)
    assert one.buffer == bytes(one.manifest.size) and one.core.chunks_refused == 1
    ((owner, ask),) = one.core.to_send()
    assert owner == OWNER and ask.lacking == b"\xff\xc0" and ask.seen_all == 1
    assert all(one.chunk(index) for index in range(10)) and one.buffer == one.data
    assert one.core.next_event() == Fetched(OWNER, one.manifest.blob)


def test_chunks_in_each_others_place_are_refused() -> None:
    one = OneFetch()
    assert not one.chunk(0, bytes(one.data[CHUNK : 2 * CHUNK]))
    assert not one.chunk(9, bytes(one.data[:CHUNK]))
    assert one.core.chunks_refused == 2 and one.core.lacks(OWNER, one.manifest.blob) == 10


def test_foreign_chunks_touch_nothing() -> None:
    one = OneFetch()
    assert not one.chunk(10, b"x") and not one.chunk(10**9 - 1, b"x")
    assert not one.chunk(0, blob="f" * 16) and not one.chunk(0, owner="stranger")
    assert one.core.chunks_refused == 4 and one.buffer == bytes(one.manifest.size)
    assert one.core.next_event() is None and one.core.to_send() == []


def test_damaged_chunks_alone_fail_the_fetch() -> None:
    one = OneFetch()
    one.chunk(0)
    for _ in range(3):
        assert not one.chunk(5, b"x") and one.core.to_send()  # asked for at once
    for _ in range(50):
        assert not one.chunk(6, b"x") and not one.core.to_send()  # but not for ever
    one.core.note_arrival(one.now)  # others keep the connection busy
    begun, asks = one.now, 0
    while (due := one.core.next_deadline()) < begun + SPOILT_S:
        one.now = due
        one.core.tick(one.now)
        asks += len(one.core.to_send())
        assert not one.chunk(6, b"x") and one.core.next_event() is None
    assert 2 <= asks <= 5  # less and less often
    one.now = begun + SPOILT_S
    assert not one.chunk(5, b"x")
    event = one.core.next_event()
    assert isinstance(event, FetchFailed) and (event.owner, event.blob) == (OWNER, one.manifest.blob)
    assert event.cause is FetchFailure.DAMAGED
    assert "wrong digests" in event.reason
    assert one.core.next_event() is None and not one.core.wanted() and not one.core.to_send()


def test_two_damaged_chunks_or_one_sound_one_among_them_fail_no_fetch() -> None:
    one = OneFetch()
    for body in (b"x", b"y", None, b"z", b""):
        one.chunk(5, body)
        one.chunk(6, b"x") if body == b"z" else None
    one.now += 100 * SPOILT_S
    assert not one.chunk(5, b"x")
    assert one.core.next_event() is None and one.core.wanted()


def test_an_owner_whose_chunks_never_fit_its_manifest_is_left_soon_and_at_little_cost() -> None:
    line = Line()
    manifest, data = blob_of(200)
    line.owner.offer(manifest, memoryview(bytes(len(data))), ["device-0"])
    line.fetch(line.add("device-0"), manifest)
    begun = line.now
    line.run()
    (event,) = line.receivers["device-0"].events
    assert isinstance(event, FetchFailed) and line.now - begun < SPOILT_S + REPAIR_MOST_S
    assert len(line.published) <= 7 * 8


def test_damage_on_the_way_is_repaired() -> None:
    line = Line()
    manifest, data = broadcast(line, 20, names_of(2))
    victim, damaged = line.receivers["device-1"], []
    inner = victim.core.receive_chunk

    def damage(owner: str, blob: str, *, data: bytes, **more: object) -> bool:
        if more["index"] in (4, 19) and more["index"] not in damaged:
            damaged.append(more["index"])
            data = data[:-1] + bytes([data[-1] ^ 1])
        return inner(owner, blob, data=data, **more)  # type: ignore[arg-type]

    victim.core.receive_chunk = damage  # type: ignore[method-assign, assignment]
    line.run()
    check_complete(line, manifest, data)
    assert victim.core.chunks_refused == 2 and len(line.published) == 22


def test_a_duplicate_is_counted_and_changes_nothing() -> None:
    one = OneFetch()
    assert one.chunk(0) and not one.chunk(0) and not one.chunk(0, b"other bytes")
    assert one.core.chunks_duplicate == 1 and one.core.chunks_refused == 1
    assert one.buffer[:CHUNK] == one.data[:CHUNK]


def test_gaps_in_the_numbers_are_chunks_that_the_broker_dropped() -> None:
    one = OneFetch(30)
    one.chunk(0)
    for index in range(1, LOST_LEAST):
        one.number += 1
        one.chunk(index)
        assert one.core.chunks_lost == index and not one.core.loses
    one.number += 10**12  # another process of the owner
    one.chunk(LOST_LEAST)
    assert one.core.chunks_lost == LOST_LEAST - 1 + one.window and one.core.loses


def test_chunks_lost_with_their_connection_are_not_the_brokers() -> None:
    one = OneFetch()
    one.chunk(0)
    one.core.reconnected(1.0)
    one.core.to_send()
    one.number += 5
    one.chunk(6)
    assert one.core.chunks_lost == 0 and one.core.chunks_arrived == 2


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    chunks=st.integers(2, 60),
    receivers=st.integers(1, 3),
    loss=st.sampled_from([0.0, 0.0, 0.1]),
    some=st.sets(st.integers(0, 8), min_size=1),
)
def test_a_thousand_hostile_chunks_are_refused_and_the_blob_is_exact(
    forge: Callable[..., Any], seed: int, chunks: int, receivers: int, loss: float, some: set[int]
) -> None:
    line, draw = Line(seed=seed, loss=loss, pace_s=0.01), random.Random(seed)
    forged = forge(OWNER, streams=[ALL, "device-0", "device-9"])
    manifest, data = broadcast(line, chunks, names_of(receivers))
    victim = line.receivers["device-0"]
    refused = duplicate = true = 0

    def attack(kind: str) -> None:
        nonlocal refused, duplicate, true
        it = forged(draw, kind, manifest, data, published=[(p.stream, p.index, p.number) for p in line.published])
        counts = victim.core.chunks_refused, victim.core.chunks_duplicate
        known = (it.owner, it.blob) in victim.core.wanted() and it.index < chunks
        sound = known and it.data == data[manifest.span(it.index)]
        fresh = victim.core.receive_chunk(
            it.owner, it.blob, stream=it.stream, index=it.index, number=it.number, data=it.data, now=line.now
        )
        assert fresh == (sound and it.index not in victim.has[manifest.blob])
        if fresh:
            victim.has[manifest.blob].add(it.index)
        refused, duplicate, true = refused + (not sound), duplicate + (sound and not fresh), true + fresh
        seen = victim.core.chunks_refused - counts[0], victim.core.chunks_duplicate - counts[1]
        assert seen == (not sound, sound and not fresh)

    for kind in draw.choices([forged.kinds[place] for place in sorted(some)], k=1000):
        line.after(draw.uniform(0.0, 0.01 * chunks), lambda kind=kind: attack(kind))  # type: ignore[misc]
    line.run()
    check_complete(line, manifest, data)
    assert refused + duplicate + true == 1000
    if not loss:
        assert len(line.published) <= 2 * chunks + 16


def test_a_gap_in_the_numbers_is_asked_about_at_once() -> None:
    one = OneFetch(window=64)
    one.chunk(0)
    assert not one.core.to_send()  # no quarter of a window yet, and nothing is missing
    one.number += 1
    one.chunk(2)
    ((_, ask),) = one.core.to_send()
    assert ask.seen_all == 3 and ask.lacking == b"\x5f\xc0" and not ask.restart


def test_an_ask_that_comes_late_does_not_undo_a_newer_one() -> None:
    manifest, data = blob_of(8)
    owner = Sender(first_number=0)
    owner.offer(manifest, data, ["a"])

    def ask(lacking: int, seen: int, restart: bool) -> None:
        owner.receive("a", Ask(manifest.blob, bytes([lacking]), seen, 0, 8, restart), now=0.0)

    ask(0xFF, 0, True)
    while (publication := owner.next_publication(0.0, lambda peers: True)) is not None:
        owner.left(publication)
    ask(0x01, 7, False)  # seven have arrived, the last is in flight
    ask(0xC0 | 0x3F, 7, False)  # said before that
    assert owner.next_publication(0.0, lambda peers: True) is None
    ask(0x01, 8, False)  # now it is lost, and it alone
    publication = owner.next_publication(0.0, lambda peers: True)
    assert publication is not None and publication.index == 7 and publication.stream == "a"
    assert owner.next_publication(0.0, lambda peers: True) is None


def test_duplicates_count_as_publications_seen() -> None:
    """What fills the window must be reported, or the owner waits for an ask that nobody makes."""
    one = OneFetch()
    for index in (0, 1):
        one.chunk(index)
    one.core.to_send()
    for _ in range(2):
        one.chunk(0)
    ((_, ask),) = one.core.to_send()
    assert ask.seen_all == 4


@examples(200)
@given(
    seen=st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
    bitmap=st.binary(max_size=4),
    window=st.integers(0, 2**63 - 1),
    restart=st.booleans(),
    known=st.booleans(),
)
def test_any_ask_leaves_the_owner_sane(
    seen: tuple[int, int], bitmap: bytes, window: int, restart: bool, known: bool
) -> None:
    manifest, data = blob_of(10)
    owner = Sender(first_number=7)
    owner.offer(manifest, data, ["a"])
    foreign = Ask(manifest.blob if known else "f" * 16, bitmap, *seen, window, restart)
    for _ in range(3):
        answer = owner.receive("liar", foreign, now=0.0)
        assert answer == (None if known or not bitmap else Gone("f" * 16))
        if (publication := owner.next_publication(1.0, lambda peers: True)) is not None:
            owner.left(publication)
    owner.receive("a", Ask(manifest.blob, b"\xff\xc0", 0, 0, 64, True), now=0.0)
    got = set()
    while (publication := owner.next_publication(1.0, lambda peers: True)) is not None:
        if publication.stream in (ALL, "a"):
            got.add(publication.index)
    assert got == set(range(10))


# Gone, slots, drop, inline


def test_a_blob_that_is_gone_fails_the_fetch() -> None:
    line = Line()
    manifest, _ = broadcast(line, 10, names_of(2))
    line.owner.retire(manifest.blob)
    line.run()
    for receiver in line.receivers.values():
        (event,) = receiver.events
        assert isinstance(event, FetchFailed) and event.cause is FetchFailure.GONE
        assert "no longer holds" in event.reason
    assert not line.published


def test_gone_of_another_blob_or_owner_is_ignored() -> None:
    one = OneFetch()
    one.core.gone(OWNER, "f" * 16, now=0.0)
    one.core.gone("stranger", one.manifest.blob, now=0.0)
    assert one.core.next_event() is None and one.core.lacks(OWNER, one.manifest.blob) == 10


def test_a_finished_receiver_of_a_retired_blob_gets_no_answer() -> None:
    assert Sender(first_number=1).receive("a", Ask("f" * 16, b"", 0, 0, 8, False), now=0.0) is None


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_uploads_take_slots_in_order(slots: int) -> None:
    core = Receiver(window=8, slots=slots)
    blobs = [blob_of(2, seed) for seed in range(6)]
    for number, (manifest, _) in enumerate(blobs):
        core.fetch(f"device-{number}", manifest, memoryview(bytearray(manifest.size)), now=0.0)
    for number, (manifest, data) in enumerate(blobs):
        active = {(f"device-{n}", blobs[n][0].blob) for n in range(number, min(number + slots, 6))}
        assert core.wanted() == active
        asked = {owner for owner, ask in core.to_send() if ask.lacking}
        assert asked <= {owner for owner, _ in active}
        for index in range(2):
            span = manifest.span(index)
            assert core.receive_chunk(
                f"device-{number}", manifest.blob, stream="parent", index=index, number=index, data=bytes(data[span]),
                now=0.0,
            )  # fmt: skip
        assert core.next_event() == Fetched(f"device-{number}", manifest.blob)
    assert not core.wanted() and core.next_deadline() is None


def test_slow_links_share_slots() -> None:
    ways = {f"device-{n}": LinkDirection(2_500_000.0) for n in range(10)} | {
        f"device-{n}": LinkDirection(125e6) for n in (10, 11)
    }
    core = Receiver(window=8, slots=2, ways=ways)
    for number in range(14):
        manifest, _ = blob_of(2, number)
        core.fetch(f"device-{number}", manifest, memoryview(bytearray(manifest.size)), now=0.0)
    # Ten of 20 Mbit/s take 0.8 of a slot, one of 1 Gbit/s a whole one, the next one more; undeclared ones wait.
    assert {owner for owner, _ in core.wanted()} == {f"device-{n}" for n in range(12)}


def test_a_dropped_fetch_frees_its_slot() -> None:
    one = OneFetch(slots=1)
    other, _ = blob_of(3, 9)
    one.core.fetch("device-1", other, memoryview(bytearray(other.size)), now=0.0)
    one.core.fetch("device-2", other, memoryview(bytearray(other.size)), now=0.0)
    one.core.drop("device-1", now=0.0)  # it still waited
    one.core.drop(OWNER, blob="f" * 16, now=0.0)  # not this one
    assert one.core.wanted() == {(OWNER, one.manifest.blob)}
    one.core.drop(OWNER, blob=one.manifest.blob, now=0.0)
    assert one.core.wanted() == {("device-2", other.blob)} and not one.chunk(0)
    assert one.core.next_event() is None


def test_a_known_fetch_goes_on() -> None:
    one = OneFetch()
    one.chunk(0)
    one.core.fetch(OWNER, one.manifest, memoryview(bytearray(one.manifest.size)), now=5.0)
    assert one.core.lacks(OWNER, one.manifest.blob) == 9 and not one.core.to_send()


def test_an_inline_blob_is_taken_whole() -> None:
    manifest, data = blob_of(3)
    core, buffer = Receiver(window=8, slots=1), bytearray(manifest.size)
    core.take(OWNER, manifest, memoryview(buffer), bytes(data))
    assert core.next_event() == Fetched(OWNER, manifest.blob) and buffer == data
    assert not core.to_send() and not core.wanted()


@pytest.mark.parametrize("lie", ["short", "long", "empty", "first bit", "last bit"])
def test_an_inline_blob_that_is_not_what_it_claims_is_refused(lie: str) -> None:
    manifest, data = blob_of(3)
    body = bytes(data)
    body = {
        "short": body[:-1],
        "long": body + b"\0",
        "empty": b"",
        "first bit": bytes([body[0] ^ 128]) + body[1:],
        "last bit": body[:-1] + bytes([body[-1] ^ 1]),
    }[lie]
    core, buffer = Receiver(window=8, slots=1), bytearray(manifest.size)
    core.take(OWNER, manifest, memoryview(buffer), body)
    event = core.next_event()
    assert isinstance(event, FetchFailed) and event.cause is FetchFailure.DAMAGED and "wrong digest" in event.reason
    assert buffer == bytes(manifest.size) and core.chunks_refused == 1


def test_a_row_of_an_array_is_assembled_in_place() -> None:
    manifest, data = blob_of(3)
    rows = np.zeros((2, manifest.size), np.uint8)
    core = Receiver(window=8, slots=1)
    core.fetch(OWNER, manifest, rows[1].data, now=0.0)
    for index in reversed(range(3)):
        core.receive_chunk(
            OWNER, manifest.blob, stream=ALL, index=index, number=index, data=bytes(data[manifest.span(index)]), now=0.0
        )
    assert rows[1].tobytes() == data and not rows[0].any()


# Manifest


def test_a_blob_is_named_by_its_content() -> None:
    manifest, data = blob_of(5)
    assert manifest.chunks == 5 and manifest.size == len(data)
    assert manifest.digests == b"".join(chunk_digest(data[manifest.span(index)]) for index in range(5))
    assert describe(memoryview(bytes(data)), chunk_bytes=CHUNK, codec="fp32", layout="l") == manifest
    changed = bytes([data[0] ^ 1]) + bytes(data[1:])
    others = [
        describe(memoryview(changed), chunk_bytes=CHUNK, codec="fp32", layout="l"),
        describe(data, chunk_bytes=2 * CHUNK, codec="fp32", layout="l"),
        describe(data, chunk_bytes=CHUNK, codec="fp16", layout="l"),
        describe(data, chunk_bytes=CHUNK, codec="fp32", layout="m"),
        describe(data[:-1], chunk_bytes=CHUNK, codec="fp32", layout="l"),
        describe(data, chunk_bytes=CHUNK, codec="fp32", layout="l", salt="s"),
        describe(data, chunk_bytes=CHUNK, codec="fp32", layout="l", reference=manifest.blob),
    ]
    assert len({manifest.blob, *(other.blob for other in others)}) == 8


@pytest.mark.parametrize(
    ("lie", "reports"),
    [
        ({"layout": "other"}, "wrong layout 'other', this run's is 'l'"),
        ({"codec": "zip"}, "codec 'zip' is not used here: fp32"),
        ({"size": 4819}, "4819 bytes, a model of this run has 4820"),
        ({"size": 4821}, "4821 bytes"),
        ({"layout": "x" * 5000}, "wrong layout"),
        ({"codec": "x" * 5000}, "is not used here"),
        ({"reference": "0123456789abcdef"}, "wrong reference model '0123456789abcdef', expected ''"),
    ],
)
def test_a_manifest_of_another_run_is_refused(lie: dict[str, object], reports: str) -> None:
    manifest, _ = blob_of(5)
    form = ModelForm("l", "fp32", 4820, exact=True, delta=False)
    form.check(manifest)
    with pytest.raises(RefusedModel) as caught:
        form.check(replace(manifest, **lie))  # type: ignore[arg-type]
    assert reports in str(caught.value) and len(str(caught.value)) < 200


def test_a_manifest_may_be_smaller_where_sizes_vary_and_names_its_reference_where_it_is_a_delta() -> None:
    manifest, _ = blob_of(5)
    against = "0123456789abcdef"
    ModelForm("l", "fp32", 9000, exact=False, delta=False).check(manifest)
    delta = ModelForm("l", "fp32", 4820, exact=True, delta=True)
    delta.check(replace(manifest, reference=against), reference=against)
    for form, reference in ((delta, against), (ModelForm("l", "fp32", 4819, exact=False, delta=False), "")):
        with pytest.raises(RefusedModel):
            form.check(manifest, reference=reference)


def test_chunks_follow_the_link() -> None:
    assert chunk_bytes_for(None, 1_000_000) == 1_000_000
    assert chunk_bytes_for(256_000 / 8, 1_000_000) == 32_768
    assert chunk_bytes_for(1e6, 1_000_000) == 500_000
    assert chunk_bytes_for(125e6, 1_000_000) == 1_000_000


@given(
    rate=st.floats(1e3, 1e9),
    chunk_bytes=st.integers(1024, 4_000_000),
    most=st.integers(2, 64),
    keepalive_s=st.integers(5, 65_535),
)
def test_a_window_leaves_room_for_pings(rate: float, chunk_bytes: int, most: int, keepalive_s: int) -> None:
    window = window_for(LinkDirection(rate), chunk_bytes, most, keepalive_s)
    third = keepalive_s / 3 * (1 + 1e-9)
    assert 2 <= window <= most and (window == 2 or window * chunk_bytes / rate <= third)
    assert window == most or (window + 1) * chunk_bytes / rate > keepalive_s / 3  # not smaller than it must be
    assert window_for(LinkDirection(), chunk_bytes, most, keepalive_s) == most


@given(st.floats(1e5, 1e9), st.floats(0, 0.5), st.integers(32_768, 1_000_000))
def test_a_window_fills_a_link_with_delay(rate: float, delay_s: float, chunk_bytes: int) -> None:
    window = window_for(LinkDirection(rate, delay_s), chunk_bytes, 8, 3600.0)
    assert 8 <= window <= 64
    assert window == 64 or window * chunk_bytes >= 2 * rate * 2 * delay_s


def test_a_receiver_asks_for_what_its_link_can_carry() -> None:
    """At 64 kbit/s a chunk of 32 KB takes 4.1 s: two of them are a third of a keep-alive of 30 s."""
    data = memoryview(bytes(40 * 32_768))
    manifest = describe(data, chunk_bytes=32_768, codec="fp32", layout="l")
    ways = {"slow": LinkDirection(8000.0), "fast": LinkDirection(1e6), "free": LinkDirection()}
    core = Receiver(window=8, slots=4, ways=ways, keepalive_s=30)
    for owner in (*ways, "stranger"):
        core.fetch(owner, manifest, memoryview(bytearray(manifest.size)), now=0.0)
    assert {owner: ask.window for owner, ask in core.to_send()} == {"slow": 2, "fast": 8, "free": 8, "stranger": 8}
    for index in range(2):
        core.receive_chunk(
            "slow", manifest.blob, stream=ALL, index=index, number=index + 1, data=bytes(32_768), now=1.0
        )
        assert [ask.window for _, ask in core.to_send()] == [2]  # a quarter of two is each one


def test_a_dead_owner_gives_its_slot_to_those_that_wait_and_keeps_what_it_sent() -> None:
    data = random.Random(5).randbytes(4 * 1024)
    manifest = describe(memoryview(data), chunk_bytes=1024, codec="fp32", layout="layout")
    core = Receiver(window=8, slots=1)
    buffers = {owner: bytearray(len(data)) for owner in ("dead", "alive")}
    for owner, buffer in buffers.items():
        core.fetch(owner, manifest, memoryview(buffer), now=0.0)
    core.receive_chunk("dead", manifest.blob, stream="all", index=0, number=1, data=data[:1024], now=0.1)
    core.to_send()
    core.yield_slot("dead", now=0.2)
    assert {owner for owner, _ in core.to_send()} == {"alive"}
    for index in range(4):
        chunk = data[manifest.span(index)]
        core.receive_chunk("alive", manifest.blob, stream="all", index=index, number=index, data=chunk, now=0.3)
    assert core.wanted() == {("dead", manifest.blob)}
    asks = [ask for owner, ask in core.to_send() if owner == "dead"]
    assert [ask.lacking for ask in asks] == [bytes([0b01110000])]
    assert buffers["alive"] == data


def test_an_owner_that_reconnected_is_asked_again_at_once() -> None:
    data = bytes(4 * 1024)
    manifest = describe(memoryview(data), chunk_bytes=1024, codec="fp32", layout="layout")
    core = Receiver(window=8, slots=2)
    core.fetch("owner", manifest, memoryview(bytearray(len(data))), now=0.0)
    assert len(core.to_send()) == 1
    core.ask_again("other", now=1.0)
    assert core.to_send() == []
    core.ask_again("owner", now=1.0)
    assert [(owner, ask.restart) for owner, ask in core.to_send()] == [("owner", True)]


# Slots


class Slots:
    """A receiver of one slot and several owners."""

    def __init__(self, *owners: str, slots: int = 1, chunks: int = 4) -> None:
        self.manifest, self.data = blob_of(chunks)
        self.core = Receiver(window=8, slots=slots)
        self.buffers = {owner: bytearray(self.manifest.size) for owner in owners}
        self.now = 0.0
        self.number = 0
        for owner, buffer in self.buffers.items():
            self.core.fetch(owner, self.manifest, memoryview(buffer), now=0.0)

    def asked(self) -> dict[str, Ask]:
        """Return the last ask that is due to each owner."""
        return dict(self.core.to_send())

    def chunk(self, owner: str, index: int) -> bool:
        self.number += 1
        data = bytes(self.data[self.manifest.span(index)])
        return self.core.receive_chunk(
            owner, self.manifest.blob, stream=ALL, index=index, number=self.number, data=data, now=self.now
        )

    def wait(self, seconds: float, *, busy: bool = True) -> dict[str, Ask]:
        """Let time pass on a connection that others keep `busy`, or that is silent; return what is asked meanwhile."""
        asked: dict[str, Ask] = {}
        for _ in range(int(seconds)):
            self.now += 1.0
            if busy:
                self.core.note_arrival(self.now)
            self.core.tick(self.now)
            asked |= self.asked()
        return asked


def test_a_fetch_that_starves_goes_behind_those_that_wait_and_keeps_its_chunks() -> None:
    slots = Slots("silent", "second", "third")
    assert set(slots.asked()) == {"silent"}
    assert slots.chunk("silent", 2)
    assert set(slots.wait(PATIENCE_S + 1)) == {"second"}
    assert slots.core.wanted() == {(owner, slots.manifest.blob) for owner in ("silent", "second")}
    assert all(slots.chunk("second", index) for index in range(4))
    assert set(slots.asked()) == {"second", "third"}  # the first of them: complete
    assert slots.chunk("silent", 0)  # it was minutes on its way
    assert all(slots.chunk("third", index) for index in range(4))
    ask = slots.asked()["silent"]
    assert ask.lacking == bytes([0b01010000])
    assert slots.chunk("silent", 1) and slots.chunk("silent", 3)
    assert slots.buffers["silent"] == slots.data and not slots.core.wanted()


@pytest.mark.parametrize("busy", [True, False])
def test_a_silent_connection_and_repeated_chunks_hold_no_slot(busy: bool) -> None:
    slots = Slots("silent", "second")
    slots.asked()
    assert slots.chunk("silent", 0)
    asked: dict[str, Ask] = {}
    for _ in range(5):
        asked |= slots.wait(4, busy=busy)
        slots.chunk("silent", 0)
    assert "second" in asked


def test_a_parked_fetch_may_end_without_a_slot() -> None:
    slots = Slots("silent", "second")
    slots.asked()
    slots.wait(PATIENCE_S + 1)
    assert all(slots.chunk("silent", index) for index in range(4))
    assert slots.core.next_event() == Fetched("silent", slots.manifest.blob)
    assert slots.core.wanted() == {("second", slots.manifest.blob)}
    assert all(slots.chunk("second", index) for index in range(4)) and not slots.core.wanted()


def test_what_was_parked_before_a_new_connection_begins_anew() -> None:
    slots = Slots("silent", "second")
    slots.asked()
    slots.wait(PATIENCE_S + 1)
    slots.core.reconnected(slots.now)
    assert slots.asked()["second"].restart
    assert all(slots.chunk("second", index) for index in range(4))
    assert slots.asked()["silent"].restart


def test_a_parked_fetch_can_be_dropped_and_written_no_more() -> None:
    slots = Slots("silent", "second")
    slots.asked()
    slots.wait(PATIENCE_S + 1)
    slots.core.drop("silent", now=slots.now)
    assert slots.core.wanted() == {("second", slots.manifest.blob)} and not slots.chunk("silent", 0)
    assert slots.core.lacks("silent", slots.manifest.blob) == 0


def test_parked_chunks_on_their_way_are_asked_for_again_only_after_two_turns() -> None:
    """On a slow link a chunk may take longer than a turn; asked for again each time, it would never be here."""
    slots = Slots("silent", "other")
    first = slots.asked()["silent"]
    assert first.restart
    restarts = []
    for _ in range(6):
        restarts += [ask.restart for owner, ask in slots.wait(PATIENCE_S).items() if owner == "silent"]
    assert restarts[0] is False and any(restarts)


@examples(60)
@given(
    slots=st.integers(1, 4),
    silent=st.integers(0, 8),
    serving=st.integers(1, 20),
    draw=st.randoms(use_true_random=False),
)
def test_owners_that_never_serve_hold_nobody_back(slots: int, silent: int, serving: int, draw: random.Random) -> None:
    owners = [*(f"silent-{i}" for i in range(silent)), *(f"serves-{i}" for i in range(serving))]
    draw.shuffle(owners)
    case = Slots(*owners, slots=slots)
    waiting = {owner for owner in owners if owner.startswith("serves")}
    for _ in range(int((silent // slots + 2) * (PATIENCE_S + 1))):
        asked = case.asked() | case.wait(1)
        while ready := sorted(asked.keys() & waiting):
            waiting -= {owner for owner in ready if all(case.chunk(owner, index) for index in range(4))}
            asked = case.asked()
    assert not waiting


def test_a_flood_of_restarts_publishes_each_chunk_once_in_a_while() -> None:
    owner = Sender(first_number=1)
    manifest, data = blob_of(8)
    owner.offer(manifest, data, ["a"])
    published = 0
    for hundredth in range(1000):
        now = hundredth / 100
        owner.receive("a", Ask(manifest.blob, b"\xff", 0, 0, 8, True), now=now)
        while (publication := owner.next_publication(now, lambda peers: True)) is not None:
            owner.left(publication)
            published += 1
    assert published <= 8 * (10 / RESTART_S + 1)
