"""Pulling: owner and receivers joined in memory by a line that loses, duplicates and reorders, on a
virtual clock.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Ask
from fedstrata.common.protocol.receiver import (
    ASKS_LEAST,
    PATIENCE_MOST_S,
    PATIENCE_S,
    REPAIR_S,
    Receiver,
)
from fedstrata.common.protocol.sender import Publication, Sender
from fedstrata.common.protocol.topics import ALL
from fedstrata.common.settings.links import LinkDirection
from tests.helpers.examples import examples
from tests.helpers.session_lab import names_of
from tests.helpers.transfer_line import (
    CHUNK,
    OWNER,
    Line,
    Peer,
    blob_of,
    broadcast,
    check_complete,
    published,
)

# Without loss


@pytest.mark.parametrize("receivers", range(1, 9))
@pytest.mark.parametrize("chunks", [1, 7, 8, 9, 40])
def test_a_broadcast_crosses_each_link_once(receivers: int, chunks: int) -> None:
    line = Line()
    manifest, data = broadcast(line, chunks, names_of(receivers))
    line.run()
    check_complete(line, manifest, data)
    assert [(p.stream, p.index) for p in line.published] == [
        (ALL, index) for index in range(chunks)
    ]
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
    # nothing before a tenth of a second
    line.lose = lambda publication: not begun + 0.1 <= line.now <= begun + 0.2
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


@pytest.mark.parametrize(("window", "most"), [(0, 1), (1, 1), (10**12, 64)])
def test_a_window_of_any_size_is_clamped(window: int, most: int) -> None:
    manifest, data = blob_of(200)
    owner = Sender(first_number=1)
    owner.offer(manifest, data, ["a"])
    owner.receive("a", Ask(manifest.blob, b"\xff" * 25, 0, 0, window, True), now=0.0)
    assert len(published(owner, 0.0)) == most


def test_slow_receivers_stop_nobody_and_cost_nothing() -> None:
    line = Line()
    manifest, data = blob_of(60)
    line.owner.offer(manifest, data, names_of(10))
    for number, name in enumerate(names_of(10)):
        line.fetch(line.add(name, slow_s=0.0 if number < 6 else 0.5), manifest)
    begun = line.now
    line.run()
    check_complete(line, manifest, data)
    took = [line.receivers[name].done - begun for name in names_of(10)]
    assert len(line.published) == 60  # each chunk once, whoever is slow
    assert max(took[:6]) < 0.5 and min(took[6:]) >= 30.0


@pytest.mark.parametrize("slow_s", [1.0, 2.05, 4.1, 10.0])
def test_a_link_that_is_declared_slow_is_not_asked_twice(slow_s: float) -> None:
    """128 kbit/s and less, upward: a broker passes on whole chunks, so the parent's connection is
    silent meanwhile.
    """
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
    # what the first silences cost, and nothing for each chunk
    assert len(line.published) <= 100 + 4 * 8


@given(
    rate=st.floats(1000.0, 1e7),
    chunk_bytes=st.integers(32_768, 1_900_000),
    chunks=st.integers(1, 12),
    window=st.integers(2, 64),
)
@examples(50)
@example(rate=8000.0, chunk_bytes=1_000_000, chunks=12, window=8)  # 64 kbit/s: 125 s for a chunk
def test_no_chunk_is_asked_for_twice_while_bytes_flow(
    rate: float, chunk_bytes: int, chunks: int, window: int
) -> None:
    line = Line()
    slow_s = chunk_bytes / rate
    manifest, data = broadcast(
        line,
        chunks,
        ["device-0"],
        chunk_bytes=chunk_bytes,
        slow_s=slow_s,
        kernel=True,
        window=window,
    )
    line.run(until_s=10 + (chunks + 1) * slow_s)
    check_complete(line, manifest, data)
    assert len(line.published) == chunks
    assert [ask.restart for _, ask in line.asked] == [True] + [False] * (len(line.asked) - 1)


@given(
    rate=st.floats(1000.0, 1e7),
    chunk_bytes=st.integers(32_768, 1_900_000),
    chunks=st.integers(1, 12),
)
@examples(50)
@example(rate=8000.0, chunk_bytes=1_000_000, chunks=12)
def test_when_bytes_stop_it_is_asked_again(rate: float, chunk_bytes: int, chunks: int) -> None:
    line = Line()
    slow_s = chunk_bytes / rate
    manifest, data = broadcast(
        line, chunks, ["device-0"], chunk_bytes=chunk_bytes, slow_s=slow_s, kernel=True
    )
    # the last, which only silence shows
    line.lose = lambda publication: len(line.published) == chunks
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
@given(
    st.integers(1, 30),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.2]),
)
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
    """An undeclared slow way out: the receiver receives nothing for long and asks again from the
    start.
    """
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
    assert [publication.index for publication in published(owner, 20.0)[:3]] == [0, 1, 2]


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


def broadcast_to(
    names: Sequence[str], *streams: Sequence[str], chunks: int = 100
) -> tuple[Line, dict[str, float]]:
    """Send a blob over links of their own rates, one stream for each group; return the seconds that
    each took.
    """
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
    _, one_stream = broadcast_to(FAST, [*FAST, *SLOW])
    assert max(one_stream.values()) > 20 * max(alone.values()), "why a parent makes groups"


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
    assert (
        publication is not None
        and publication.index == 0
        and set(publication.receivers) == {"a", "b"}
    )


# With loss


@pytest.mark.parametrize("lost", [0, 3, 39])
def test_a_lost_chunk_is_published_once_more(lost: int) -> None:
    line = Line()
    manifest, data = broadcast(line, 40, names_of(3))
    gone = iter([True])
    line.lose = lambda publication: publication.index == lost and next(gone, False)
    line.run()
    check_complete(line, manifest, data)
    (again,) = [p for p in line.published if p.index == lost][1:]
    assert again.stream == "device-0"
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
    # all of it on its own stream
    line.after(1.0, lambda: line.fetch(line.receivers["device-0"], manifest))
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
    """Two that hang lack the chunk at the cursor, the third lacks only later ones: it must not wait
    for them.
    """
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
            bits = (
                np.packbits([index in lacking for index in range(16)]).tobytes() if lacking else b""
            )
            numbers = (
                (publication.number, 0) if publication.stream == ALL else (0, publication.number)
            )
            owner.receive("lives", Ask(manifest.blob, bits, *numbers, 8, False), now=0.0)
    assert not lacking


def test_losses_are_repaired_on_a_connection_that_is_never_silent() -> None:
    """At a parent the heartbeats of other children go on for ever: they must not hide a lost
    window.
    """
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
    while (due := core.next_deadline()) < 60:
        core.tick(due)
        asked += [due] * len(core.to_send())
    gaps = np.diff([0.0, *asked])
    assert asked[0] == 2.0 and (np.diff(gaps) >= 0).all() and gaps[-1] == 15.0


def asked_at(
    carried: Callable[[float], int], *, until_s: float, exclusive: bool = True, **how: float
) -> list[float]:
    """Return when a fetch that gets no message asks, over a connection that carries so many bytes
    by the time.
    """
    core = Receiver(window=8, slots=4, exclusive=exclusive, **how)
    manifest, _ = blob_of(4, chunk_bytes=2_000_000)
    core.fetch(OWNER, manifest, memoryview(bytearray(manifest.size)), now=0.0)
    core.tick(0.0, carried=carried(0.0))
    asked = [0.0] * len(core.to_send())
    while (due := core.next_deadline()) < until_s:
        core.tick(due, carried=carried(due))
        asked += [due] * len(core.to_send())
    return asked


@pytest.mark.parametrize(
    ("carried", "flows_s"),
    [
        (lambda now: 5000 + int(8000 * now), 500.0 - REPAIR_S),  # so long: they become no chunk
        (lambda now: int(8000 * min(now, 100.0)), 100.0),
        (lambda now: int(100 * now), 0.0),  # acknowledgements and pings
        (lambda now: -1, 0.0),
        (lambda now: -1 if now < 1 else 1000, 0.0),  # a kernel that begins to tell, or ceases
        (lambda now: 10**9 if now < 1 else -1, 0.0),
    ],
)
def test_a_connection_is_silent_when_the_bytes_of_a_chunk_stop(
    carried: Callable[[float], int], flows_s: float
) -> None:
    first, second, *_ = asked_at(carried, until_s=600.0)
    assert (
        first == 0.0 and flows_s + REPAIR_S <= second <= flows_s + (2 if flows_s else 1) * REPAIR_S
    )


def test_bytes_that_may_be_for_others_buy_no_more_than_patience() -> None:
    asked = asked_at(lambda now: int(8000 * now), until_s=200.0, exclusive=False)
    assert asked == [0.0, 15.0, 45.0, 105.0, 165.0]
    assert PATIENCE_S == 15.0 and PATIENCE_MOST_S == 60.0


@pytest.mark.parametrize(
    ("idle_s", "pauses"), [(30.0, [5.0] * 6), (60.0, [10.0] * 6), (120.0, [15.0, *[20.0] * 5])]
)
def test_the_longest_pause_follows_the_time_after_which_a_node_is_given_up(
    idle_s: float, pauses: list[float]
) -> None:
    for shared, carried in ((True, lambda now: int(8000 * now)), (False, lambda now: -1)):
        asked = asked_at(carried, until_s=idle_s, exclusive=False, idle_s=idle_s)
        assert len(asked) > ASKS_LEAST - shared
        assert (
            not shared or [b - a for a, b in itertools.pairwise(asked)] == pauses[: len(asked) - 1]
        )


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
        "reconnects": st.lists(
            st.tuples(st.floats(0.0, 3.0), st.integers(0, 7), st.booleans()), max_size=3
        ),
        "restarts": st.lists(st.floats(0.0, 3.0), max_size=2),
    }
)


@examples(200)
@given(how=SCHEDULE)
def test_whatever_happens_everybody_gets_the_blob(how: dict[str, object]) -> None:
    line = Line(
        seed=how["seed"], loss=how["loss"], duplicates=how["duplicates"], jitter_s=how["jitter_s"]
    )  # type: ignore[arg-type]
    names, joins = names_of(how["receivers"]), list(how["joins"])  # type: ignore[arg-type, call-overload]
    manifest, data = blob_of(how["chunks"])  # type: ignore[arg-type]
    line.owner.offer(manifest, data, names)
    for number, name in enumerate(names):
        receiver = line.add(
            name, window=how["window"], slow_s=how["slow_s"] if number % 3 == 1 else 0.0
        )  # type: ignore[arg-type]
        line.after(
            joins.pop() if joins else 0.0, lambda receiver=receiver: line.fetch(receiver, manifest)
        )  # type: ignore[misc]
    for moment, who, noticed in how["reconnects"]:  # type: ignore[attr-defined]
        receiver = line.receivers[names[who % len(names)]]
        line.after(
            moment,
            lambda receiver=receiver, noticed=noticed: line.reconnect(receiver, noticed=noticed),
        )  # type: ignore[misc]
    for moment in how["restarts"]:  # type: ignore[attr-defined]
        first = 10_000 + int(moment * 1000)
        line.after(moment, lambda first=first: line.restart_owner(first, (manifest, data)))  # type: ignore[misc]
    line.run()
    check_complete(line, manifest, data)
