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

from fedstrata.common.protocol.messages import Ask
from fedstrata.common.protocol.receiver import ASKS_LEAST, PATIENCE_MOST_S, PATIENCE_S, REPAIR_S
from fedstrata.common.protocol.sender import Publication
from fedstrata.common.protocol.topics import ALL
from fedstrata.common.settings.links import LinkDirection
from tests.helpers.coordinators import due
from tests.helpers.examples import examples
from tests.helpers.session_lab import CHUNK
from tests.helpers.transfer_line import (
    OWNER,
    Fetches,
    Line,
    OneOwner,
    blob_of,
    described,
    lacking,
    room_for,
)

# Without loss


@pytest.mark.parametrize("receivers", range(1, 9))
@pytest.mark.parametrize("chunks", [1, 7, 8, 9, 40])
def test_a_broadcast_crosses_each_link_once(receivers: int, chunks: int) -> None:
    line = Line(chunks, receivers)
    line.run()
    assert [(p.stream, p.index) for p in line.published] == [
        (ALL, index) for index in range(chunks)
    ]
    assert all(receiver.got == chunks for receiver in line.receivers.values())
    assert line.owner.chunks_published == chunks and line.owner.chunks_repeated == 0
    assert line.owner.chunks_delivered == receivers * chunks
    assert not any(line.owner.serving(name) for name in line.receivers)


def test_a_broadcast_waits_for_those_announced_but_not_for_ever() -> None:
    line = Line(5, 3, joined=2)
    # nothing before a tenth of a second
    line.lose = lambda publication: not 0.1 <= line.now - line.begun <= 0.2
    line.run()
    assert len(line.published) == 5


def test_a_broadcast_starts_when_all_announced_have_asked() -> None:
    line = Line(5, 3, joined=0)
    for name, at_s in zip(line.names, (0.0, 0.02, 0.05), strict=True):
        line.join(name, at_s)
    assert line.run() < 0.1 and len(line.published) == 5


@pytest.mark.parametrize("window", [2, 3, 8, 64])
def test_a_window_bounds_what_is_in_flight(window: int) -> None:
    line, most = Line(100, window=window, line={"delay_s": 0.1}), [0]

    def watch(publication: Publication) -> bool:
        most.append(len(line.published) - line.receivers["device-0"].got)
        return False

    line.lose = watch
    line.run()
    assert max(most) == window and len(line.published) == 100


@pytest.mark.parametrize(("window", "most"), [(0, 1), (1, 1), (10**12, 64)])
def test_a_window_of_any_size_is_clamped(window: int, most: int) -> None:
    owner = OneOwner(200, "a")
    owner.ask("a", window=window)
    assert len(owner.publishes()) == most


def test_slow_receivers_stop_nobody_and_cost_nothing() -> None:
    line = Line(60, 10, joined=0)
    for number, name in enumerate(line.names):
        line.join(name, slow_s=0.0 if number < 6 else 0.5)
    line.run()
    took = [line.receivers[name].done - line.begun for name in line.names]
    assert len(line.published) == 60  # each chunk once, whoever is slow
    assert max(took[:6]) < 0.5 and min(took[6:]) >= 30.0


@pytest.mark.parametrize("slow_s", [1.0, 2.05, 4.1, 10.0])
def test_a_link_that_is_declared_slow_is_not_asked_twice(slow_s: float) -> None:
    """128 kbit/s and less, upward: a broker passes on whole chunks, so the parent's connection is
    silent meanwhile.
    """
    ways = {OWNER: LinkDirection(CHUNK / slow_s)}
    how = {"slow_s": slow_s, "keepalive_s": 120.0, "exclusive": False}
    line = Line(30, joined=0)
    line.join("device-0", ways=ways, **how)
    line.run(until_s=4000.0)
    assert len(line.published) == 30


@pytest.mark.parametrize("slow_s", [1.0, 3.0, 4.0, 10.0, 20.0])
def test_a_link_slower_than_the_repair_time_is_not_flooded(slow_s: float) -> None:
    line = Line(100, slow_s=slow_s)
    line.run(until_s=4000.0)
    # what the first silences cost, and nothing for each chunk
    assert len(line.published) <= 100 + 4 * 8


RATES = {
    "rate": st.floats(1000.0, 1e7),
    "chunk_bytes": st.integers(32_768, 1_900_000),
    "chunks": st.integers(1, 12),
}


@given(**RATES, window=st.integers(2, 64))
@examples(50)
@example(rate=8000.0, chunk_bytes=1_000_000, chunks=12, window=8)  # 64 kbit/s: 125 s for a chunk
def test_no_chunk_is_asked_for_twice_while_bytes_flow(
    rate: float, chunk_bytes: int, chunks: int, window: int
) -> None:
    slow_s = chunk_bytes / rate
    line = Line(chunks, chunk_bytes=chunk_bytes, slow_s=slow_s, kernel=True, window=window)
    line.run(until_s=10 + (chunks + 1) * slow_s)
    assert len(line.published) == chunks
    assert [ask.restart for _, ask in line.asked] == [True] + [False] * (len(line.asked) - 1)


@given(**RATES)
@examples(50)
@example(rate=8000.0, chunk_bytes=1_000_000, chunks=12)
def test_when_bytes_stop_it_is_asked_again(rate: float, chunk_bytes: int, chunks: int) -> None:
    slow_s = chunk_bytes / rate
    line = Line(chunks, chunk_bytes=chunk_bytes, slow_s=slow_s, kernel=True)
    # the last, which only silence shows
    line.lose = lambda publication: len(line.published) == chunks
    line.run(until_s=10 + PATIENCE_MOST_S + (chunks + 2) * slow_s)
    assert [p.index for p in line.published] == [*range(chunks), chunks - 1]


def test_a_late_receiver_gets_what_it_missed_on_its_own_stream() -> None:
    line = Line(50, 3, pace_s=0.01)
    line.after(0.25, line.join, "late")
    line.run()
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
    to_come = np.ones(chunks, np.bool_)
    here = room_for(blob_of(chunks)[0])
    how = {"seed": draw.randrange(1000), "loss": loss}
    line = Line(chunks, receivers, line=how, source=here, to_come=to_come)
    publish = line.owner.next_publication

    def watched(now: float, ready: Callable[[Iterable[str]], bool]) -> Publication | None:
        publication = publish(now, ready)
        assert publication is None or not to_come[publication.index]
        return publication

    def arrive(index: int) -> None:
        span = line.manifest.span(index)
        here[span] = line.data[span]
        to_come[index] = False

    line.owner.next_publication = watched  # type: ignore[method-assign]
    for place, index in enumerate(draw.sample(range(chunks), chunks)):
        line.after((place + 1) / chunks, arrive, index)
    line.run()
    if not loss:
        assert len(line.published) == chunks


def test_a_model_on_its_way_reaches_the_next_tier_a_chunk_later() -> None:
    to_come = np.ones(40, np.bool_)
    line = Line(40, pace_s=0.01, to_come=to_come)
    for index in range(40):
        line.after(0.05 * (index + 1), to_come.__setitem__, index, False)
    line.run()
    took = line.receivers["device-0"].done - line.begun
    assert took <= 0.05 * 40 + 0.01 + 2 * line.delay_s


def test_what_has_not_left_its_owner_is_not_published_twice() -> None:
    """An undeclared slow way out: the receiver receives nothing for long and asks again from the
    start.
    """
    owner = OneOwner(6, "a")
    owner.ask("a", window=3)
    under_way = [owner.next_publication(1.0, lambda peers: True) for _ in range(3)]
    owner.ask("a", now=9.0, window=3)
    assert owner.next_publication(9.0, lambda peers: True).index == 3  # type: ignore[union-attr]
    for publication in under_way:
        owner.left(publication)  # type: ignore[arg-type]
    owner.ask("a", now=20.0, window=3)  # they did leave, and did not arrive
    assert [publication.index for publication in owner.publishes(20.0)[:3]] == [0, 1, 2]


def test_two_blobs_take_turns() -> None:
    line = Line(20, slots=2)
    other, data = blob_of(20, 1)
    line.owner.offer(other, data, line.names)
    receiver = line.receivers["device-0"]
    line.fetch(receiver, other)
    line.play()
    assert sorted(receiver.fetched) == sorted((line.manifest.blob, other.blob))
    assert receiver.buffers == {line.manifest.blob: line.data, other.blob: data}
    order = [p.blob for p in line.published]
    assert len(order) == 40 and len(set(order[:8])) == 2


def test_blobs_take_turns_beside_one_that_nobody_asks_for() -> None:
    owner = OneOwner(8)
    asked = [blob_of(8, seed) for seed in (1, 2)]
    for manifest, data in asked:
        owner.offer(manifest, data, ["a"])
        ask = Ask(manifest.blob, lacking(8, range(8)), 0, 0, 8, True)
        assert owner.receive("a", ask, now=0.0) is None
    assert [each.blob for each in owner.publishes()] == [each.blob for each, _ in asked] * 8


FAST, SLOW = [f"fast-{i}" for i in range(6)], [f"slow-{i}" for i in range(2)]
WAYS = dict.fromkeys(FAST, LinkDirection(1e6)) | dict.fromkeys(SLOW, LinkDirection(2e4))


def broadcast_to(names: Sequence[str], *others: str) -> tuple[Line, dict[str, float]]:
    """Send a blob over links of their own rates, one stream for each group; return the seconds that
    each took.
    """
    line = Line(100, names, ways=WAYS)
    second = described(line.data, salt="second")
    line.owner.offer(second, line.data, others)
    for name in others:
        line.fetch(line.add(name), second)
    line.play()
    assert all(len(receiver.fetched) == 1 for receiver in line.receivers.values())
    return line, {name: each.done - line.begun for name, each in line.receivers.items()}


def test_unequal_links_do_not_wait_for_each_other() -> None:
    """Six fast and two slow receivers, with a stream for each group as a parent makes them."""
    fast, slow = (max(broadcast_to(names)[1].values()) for names in (FAST, SLOW))
    line, together = broadcast_to(FAST, *SLOW)
    assert max(together[name] for name in FAST) <= 1.5 * fast
    assert max(together[name] for name in SLOW) <= 1.05 * slow
    assert slow == pytest.approx(100 * CHUNK / 2e4, rel=0.05)
    assert [p.stream for p in line.published] == [ALL] * 200  # no copy for a single one
    first_half = [set(p.receivers) for p in line.published[:100]]
    assert first_half.count(set(FAST)) > 90  # the fast are served when the slow have hardly begun
    _, one_stream = broadcast_to([*FAST, *SLOW])
    assert max(one_stream[name] for name in FAST) > 20 * fast, "why a parent makes groups"


def test_a_delay_of_the_link_is_no_loss() -> None:
    line = Line(60, ways={"device-0": LinkDirection(1e5, 0.4)}, window=64)
    assert line.run() < 60 * CHUNK / 1e5 + 0.6 and len(line.published) == 60


def test_nothing_is_published_while_links_have_no_room() -> None:
    owner, seen = OneOwner(9, "a", "b"), list[set[str]]()
    for name in ("a", "b"):
        owner.ask(name)

    def busy(peers: Iterable[str]) -> bool:
        seen.append(set(peers))
        return False

    assert owner.next_publication(0.0, busy) is None
    first, *_ = owner.publishes()
    assert seen == [{"a", "b"}] == [set(first.receivers)] and first.index == 0


# With loss


@pytest.mark.parametrize("lost", [0, 3, 39])
def test_a_lost_chunk_is_published_once_more(lost: int) -> None:
    line, gone = Line(40, 3), iter([True])
    line.lose = lambda publication: publication.index == lost and next(gone, False)
    line.run()
    (again,) = [p for p in line.published if p.index == lost][1:]
    assert again.stream == "device-0"
    assert line.owner.chunks_repeated == 1 and len(line.published) == 41


def test_what_most_lost_is_repeated_for_all() -> None:
    line = Line(40, 4)
    line.lose = lambda publication: publication.index == 11 and publication.number < 5030
    line.run()
    assert [p.stream for p in line.published if p.index == 11][:2] == [ALL, ALL]


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("moment", [0.004, 0.02, 0.05])
def test_a_receiver_that_reconnects_goes_on(moment: float, noticed: bool) -> None:
    line = Line(60, 3)
    line.after(moment, line.reconnect, "device-1", noticed)
    assert line.run() < 2.0  # without waiting for silence
    assert len(line.published) <= 60 + 2 * 8


def test_a_receiver_that_came_back_after_its_death_is_served_within_its_window() -> None:
    """Own-stream numbers go on: the receiver remembers the last one it saw, and so must the owner."""
    line = Line(80, 0, line={"delay_s": 0.02})
    line.join("device-1")
    line.join("device-0", 1.0)  # all of it on its own stream
    line.after(1.2, line.reconnect, "device-0", True)
    line.run()
    own = [p.number for p in line.published if p.stream == "device-0"]
    assert own == sorted(set(own)) and len(own) <= 80 + 8


@pytest.mark.parametrize("moment", [0.01, 0.02, 0.05])
def test_an_owner_that_restarts_is_asked_for_the_rest(moment: float) -> None:
    line = Line(60, 4)
    line.after(moment, line.restart_owner, 9000)
    line.run()
    assert len(line.published) <= 60 + 8 and line.published[0].number < 9000


def test_full_windows_of_others_do_not_hold_back_a_receiver() -> None:
    """Two that hang lack the chunk at the cursor, the third lacks only later ones: it must not wait
    for them.
    """
    owner, lacks = OneOwner(16), set(range(8, 16))
    for name in ("hangs-1", "hangs-2"):
        owner.ask(name, window=2)
    owner.ask("lives", lacks)
    for _ in range(40):
        publication = owner.next_publication(0.0, lambda peers: True)
        if publication is None:
            break
        if publication.stream in (ALL, "lives"):
            lacks.discard(publication.index)
            own = publication.stream != ALL
            seen = {"seen_own" if own else "seen": publication.number}
            owner.ask("lives", lacks, restart=False, **seen)
    assert not lacks


def test_losses_are_repaired_on_a_connection_that_is_never_silent() -> None:
    """At a parent the heartbeats of other children go on for ever: they must not hide a lost
    window.
    """
    line = Line(30)
    core = line.receivers["device-0"].core
    line.lose = lambda publication: line.now < line.begun + 1.0 and publication.index >= 5

    def chatter() -> None:
        core.note_arrival(line.now)
        if core.wanted() or line.now == line.begun:
            line.after(0.5, chatter)

    chatter()
    line.run(until_s=100.0)


def asked_at(
    carried: Callable[[float], int] = lambda now: -1,
    *,
    until_s: float,
    exclusive: bool = True,
    **how: float,
) -> list[float]:
    """Return when a fetch that gets no message asks, over a connection that carries so many bytes
    by the time.
    """
    one = Fetches(OWNER, chunk_bytes=2_000_000, exclusive=exclusive, **how)
    asked = [(0.0, ask) for ask in one.ticks(0.0, carried=carried(0.0))]
    asked += due(
        one.next_deadline, lambda now: one.ticks(now, carried=carried(now)), until_s=until_s
    )
    return [at for at, _ in asked]


def test_silence_is_answered_at_growing_intervals() -> None:
    begun, *asked = asked_at(until_s=60.0, exclusive=False)
    gaps = np.diff([begun, *asked])
    assert asked[0] == 2.0 and (np.diff(gaps) >= 0).all() and gaps[-1] == 15.0


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
    latest_s = flows_s + (2 if flows_s else 1) * REPAIR_S
    assert first == 0.0 and flows_s + REPAIR_S <= second <= latest_s


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
    how = {"until_s": idle_s, "exclusive": False, "idle_s": idle_s}
    asked = asked_at(lambda now: int(8000 * now), **how)  # type: ignore[arg-type]
    assert len(asked) > ASKS_LEAST - 1
    assert [b - a for a, b in itertools.pairwise(asked)] == pauses[: len(asked) - 1]
    assert len(asked_at(**how)) > ASKS_LEAST  # type: ignore[arg-type]


def test_a_new_connection_is_counted_from_its_own_beginning() -> None:
    one = Fetches(OWNER, chunk_bytes=100_000, exclusive=True)
    one.ticks(0.0, carried=10**9)
    one.reconnected(1.0)
    assert one.ticks(1.0, carried=200)
    assert not one.ticks(3.0, carried=20_000) and one.next_deadline() == 5.0
    assert one.ticks(5.0, carried=20_300)


def test_duplicates_of_an_old_ask_do_no_lasting_harm() -> None:
    line = Line(60, 2, line={"delay_s": 0.02})
    stale = Ask(line.manifest.blob, lacking(60, range(60)), 0, 0, 8, True)
    for delay in (0.1, 0.15, 0.3, 0.5):
        line.after(delay, lambda: line.owner.receive("device-0", stale, now=line.now))
    line.run()
    assert len(line.published) <= 60 + 4 * 16


@examples(200)
@given(
    line=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32),
            "loss": st.sampled_from([0.0, 0.02, 0.1, 0.4]),
            "duplicates": st.sampled_from([0.0, 0.1, 0.5]),
            "jitter_s": st.sampled_from([0.0, 0.003, 0.1]),
        }
    ),
    receivers=st.integers(1, 8),
    chunks=st.integers(1, 40),
    window=st.integers(2, 16),
    slow_s=st.sampled_from([0.0, 0.05, 0.4]),
    joins=st.lists(st.floats(0.0, 0.5), max_size=3),
    reconnects=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(0, 7), st.booleans()), max_size=3
    ),
    restarts=st.lists(st.floats(0.0, 3.0), max_size=2),
)
def test_whatever_happens_everybody_gets_the_blob(
    line: dict[str, float],
    receivers: int,
    chunks: int,
    window: int,
    slow_s: float,
    joins: list[float],
    reconnects: list[tuple[float, int, bool]],
    restarts: list[float],
) -> None:
    one = Line(chunks, receivers, joined=0, line=line)
    late = itertools.chain(joins, itertools.repeat(0.0))
    for number, (name, at_s) in enumerate(zip(one.names, late, strict=False)):
        one.join(name, at_s, window=window, slow_s=slow_s if number % 3 == 1 else 0.0)
    for moment, who, noticed in reconnects:
        one.after(moment, one.reconnect, one.names[who % receivers], noticed)
    for moment in restarts:
        one.after(moment, one.restart_owner, 10_000 + int(moment * 1000))
    one.run()
