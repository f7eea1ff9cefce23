"""A sender and receivers: damage, strangers, slots, receivers that are gone, inline models,
manifests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import RefusedModel
from fedstrata.common.protocol.manifest import ModelForm, chunk_bytes_for, chunk_digest, window_for
from fedstrata.common.protocol.messages import Ask, Gone
from fedstrata.common.protocol.receiver import (
    LOST_LEAST,
    PATIENCE_S,
    REPAIR_MOST_S,
    SPOILT_S,
    Fetched,
    FetchFailed,
    FetchFailure,
    Receiver,
)
from fedstrata.common.protocol.sender import RESTART_S, Sender
from fedstrata.common.protocol.topics import ALL
from fedstrata.common.settings.links import LinkDirection
from tests.helpers.examples import examples
from tests.helpers.session_lab import CHUNK, names_of
from tests.helpers.transfer_line import (
    OWNER,
    Fetches,
    Line,
    OneOwner,
    blob_of,
    chunk_topic,
    described,
    room_for,
)

# Damage and strangers


def one_fetch(chunks: int = 10, *, slots: int = 4, window: int = 8) -> Fetches:
    """Return a fetch from one owner that has been asked."""
    one = Fetches(OWNER, slots=slots, chunks=chunks, window=window)
    one.to_send()
    return one


@pytest.mark.parametrize("body", [b"", b"x", b"x" * CHUNK, b"x" * (CHUNK + 1), b"x" * (CHUNK - 1)])
def test_a_damaged_chunk_is_refused_and_asked_for_again(body: bytes) -> None:
    one = one_fetch()
    assert not one.chunk(3, body)
    assert one.buffer == bytes(one.manifest.size) and one.chunks_refused == 1
    ((owner, ask),) = one.to_send()
    assert owner == OWNER and ask.lacking == b"\xff\xc0" and ask.seen_all == 1
    assert one.serve(OWNER) and one.buffer == one.data
    assert one.next_event() == Fetched(OWNER, one.manifest.blob)


def test_damaged_chunks_alone_fail_the_fetch() -> None:
    one = one_fetch()
    one.chunk(0)
    for _ in range(3):
        assert not one.chunk(5, b"x") and one.to_send()  # asked for at once
    for _ in range(50):
        assert not one.chunk(6, b"x") and not one.to_send()  # but not for ever
    one.note_arrival(one.now)  # others keep the connection busy
    begun, asks = one.now, 0
    while (due := one.next_deadline()) < begun + SPOILT_S:
        one.now = due
        one.tick(one.now)
        asks += len(one.to_send())
        assert not one.chunk(6, b"x") and one.next_event() is None
    assert 2 <= asks <= 5  # less and less often
    one.now = begun + SPOILT_S
    assert not one.chunk(5, b"x")
    event = one.next_event()
    assert isinstance(event, FetchFailed) and (event.owner, event.blob) == (
        OWNER,
        one.manifest.blob,
    )
    assert event.cause is FetchFailure.DAMAGED
    assert "wrong digests" in event.reason
    assert one.next_event() is None and not one.wanted() and not one.to_send()


def test_two_damaged_chunks_or_one_sound_one_among_them_fail_no_fetch() -> None:
    one = one_fetch()
    for body in (b"x", b"y", None, b"z", b""):
        one.chunk(5, body)
        one.chunk(6, b"x") if body == b"z" else None
    one.now += 100 * SPOILT_S
    assert not one.chunk(5, b"x")
    assert one.next_event() is None and one.wanted()


def test_an_owner_whose_chunks_never_fit_its_manifest_is_left_soon_and_at_little_cost() -> None:
    line = Line(200, source=memoryview(bytes(200 * CHUNK)))
    line.play()
    (event,) = line.receivers["device-0"].events
    assert isinstance(event, FetchFailed) and line.now - line.begun < SPOILT_S + REPAIR_MOST_S
    assert len(line.published) <= 7 * 8


def test_gaps_in_the_numbers_are_chunks_that_the_broker_dropped() -> None:
    one = one_fetch(30)
    one.chunk(0)
    for index in range(1, LOST_LEAST):
        one.number += 1
        one.chunk(index)
        assert one.chunks_lost == index and not one.loses
    one.number += 10**12  # another process of the owner
    one.chunk(LOST_LEAST)
    assert one.chunks_lost == LOST_LEAST - 1 + one.window and one.loses


def test_chunks_lost_with_their_connection_are_not_the_brokers() -> None:
    one = one_fetch()
    one.chunk(0)
    one.reconnected(1.0)
    one.to_send()
    one.number += 5
    one.chunk(6)
    assert one.chunks_lost == 0 and one.chunks_arrived == 2


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    chunks=st.integers(2, 60),
    receivers=st.integers(1, 3),
    loss=st.sampled_from([0.0, 0.0, 0.1]),
    some=st.sets(st.integers(0, 8), min_size=1),
)
def test_hundreds_of_hostile_chunks_are_refused_and_the_blob_is_exact(
    forge: Callable[..., Any], seed: int, chunks: int, receivers: int, loss: float, some: set[int]
) -> None:
    line = Line(chunks, receivers, pace_s=0.01, line={"seed": seed, "loss": loss})
    draw, forged = random.Random(seed), forge(OWNER, streams=[ALL, "device-0", "device-9"])
    manifest, data, victim = line.manifest, line.data, line.receivers["device-0"]

    def attack(kind: str) -> None:
        seen = [(p.stream, p.index, p.number) for p in line.published]
        it = forged(draw, kind, manifest, data, published=seen)
        before = victim.core.chunks_refused
        known = (it.owner, it.blob) in victim.core.wanted() and it.index < chunks
        sound = known and it.data == data[manifest.span(it.index)]
        topic = chunk_topic(it.owner, it.blob, stream=it.stream, index=it.index, number=it.number)
        fresh = victim.core.receive_chunk(topic, it.data, now=line.now)
        assert fresh == (sound and it.index not in victim.has[manifest.blob])
        assert victim.core.chunks_refused - before == (not sound)
        if fresh:
            victim.has[manifest.blob].add(it.index)

    for kind in draw.choices([forged.kinds[place] for place in sorted(some)], k=400):
        line.after(draw.uniform(0.0, 0.01 * chunks), attack, kind)
    line.run()
    if not loss:
        assert len(line.published) <= 2 * chunks + 16


def test_a_gap_in_the_numbers_is_asked_about_at_once() -> None:
    one = one_fetch(window=64)
    one.chunk(0)
    assert not one.to_send()  # no quarter of a window yet, and nothing is missing
    one.number += 1
    one.chunk(2)
    ((_, ask),) = one.to_send()
    assert ask.seen_all == 3 and ask.lacking == b"\x5f\xc0" and not ask.restart


def test_an_ask_that_comes_late_does_not_undo_a_newer_one() -> None:
    owner = OneOwner(8, "a")

    def ask(seen: int, *lacks: int) -> list[tuple[str, int]]:
        owner.ask("a", lacks, seen, restart=not seen)
        return [(each.stream, each.index) for each in owner.publishes()]

    every = range(8)
    assert ask(0, *every) == [(ALL, index) for index in every]
    assert ask(7, 7) == []  # seven have arrived, the last is in flight
    assert ask(7, *every) == []  # said before that
    assert ask(8, 7) == [("a", 7)]  # now it is lost, and it alone


def test_duplicates_count_as_publications_seen() -> None:
    """What fills the window must be reported, or the owner waits for an ask that nobody makes."""
    one = one_fetch()
    for index in (0, 1):
        one.chunk(index)
    one.to_send()
    for _ in range(2):
        one.chunk(0)
    ((_, ask),) = one.to_send()
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
    owner = OneOwner(10, "a")
    blob = owner.manifest.blob if known else "f" * 16
    for _ in range(3):
        answer = owner.receive("liar", Ask(blob, bitmap, *seen, window, restart), now=0.0)
        assert answer == (None if known or not bitmap else Gone(blob))
        if (publication := owner.next_publication(1.0, lambda peers: True)) is not None:
            owner.left(publication)
    owner.ask("a", window=64)
    sent = {each.index for each in owner.publishes(1.0) if each.stream in (ALL, "a")}
    assert sent == set(range(10))


# Gone, slots, drop, inline


def test_a_blob_that_is_gone_fails_the_fetch() -> None:
    line = Line(10, 2)
    line.owner.retire(line.manifest.blob)
    line.play()
    for receiver in line.receivers.values():
        (event,) = receiver.events
        assert isinstance(event, FetchFailed) and event.cause is FetchFailure.GONE
        assert "no longer holds" in event.reason
    assert not line.published


def test_gone_of_another_blob_or_owner_is_ignored() -> None:
    one = one_fetch()
    one.gone(OWNER, "f" * 16, now=0.0)
    one.gone("stranger", one.manifest.blob, now=0.0)
    assert one.next_event() is None and one.lacks(OWNER, one.manifest.blob) == 10


def test_a_finished_receiver_of_a_retired_blob_gets_no_answer() -> None:
    assert Sender(first_number=1).receive("a", Ask("f" * 16, b"", 0, 0, 8, False), now=0.0) is None


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_uploads_take_slots_in_order(slots: int) -> None:
    owners = names_of(6)
    fetches, blob = Fetches(*owners, slots=slots, chunks=2), blob_of(2)[0].blob
    for number, owner in enumerate(owners):
        active = {(name, blob) for name in owners[number : number + slots]}
        assert fetches.wanted() == active
        asked = {name for name, ask in fetches.asked().items() if ask.lacking}
        assert asked <= {name for name, _ in active}
        assert fetches.serve(owner) and fetches.next_event() == Fetched(owner, blob)
    assert not fetches.wanted() and fetches.next_deadline() == inf


def test_slow_links_share_slots() -> None:
    names = names_of(14)
    ways = {name: LinkDirection(2_500_000.0) for name in names[:10]}
    ways |= {name: LinkDirection(125e6) for name in names[10:12]}
    core = Fetches(*names, slots=2, ways=ways)
    # Ten of 20 Mbit/s take 0.8 of a slot, one of 1 Gbit/s a whole one, the next one more;
    # undeclared ones wait.
    assert {owner for owner, _ in core.wanted()} == {*names[:12]}


def test_a_dropped_fetch_frees_its_slot() -> None:
    one = one_fetch(slots=1)
    other, _ = blob_of(3, 9)
    for name in ("device-1", "device-2"):
        one.fetch(name, other, room_for(other), now=0.0)
    one.drop("device-1", now=0.0)  # it still waited
    one.drop(OWNER, blob="f" * 16, now=0.0)  # not this one
    assert one.wanted() == {(OWNER, one.manifest.blob)}
    one.drop(OWNER, blob=one.manifest.blob, now=0.0)
    assert one.wanted() == {("device-2", other.blob)} and not one.chunk(0)
    assert one.next_event() is None


def test_a_known_fetch_goes_on() -> None:
    one = one_fetch()
    one.chunk(0)
    one.fetch(OWNER, one.manifest, room_for(one.manifest), now=5.0)
    assert one.lacks(OWNER, one.manifest.blob) == 9 and not one.to_send()


INLINE: dict[str, Callable[[bytes], bytes]] = {
    "whole": lambda body: body,
    "short": lambda body: body[:-1],
    "long": lambda body: body + b"\0",
    "empty": lambda body: b"",
    "first bit": lambda body: bytes([body[0] ^ 128]) + body[1:],
    "last bit": lambda body: body[:-1] + bytes([body[-1] ^ 1]),
}


@pytest.mark.parametrize("how", INLINE)
def test_an_inline_blob_is_taken_whole_or_refused(how: str) -> None:
    manifest, data = blob_of(3)
    core, buffer = Receiver(window=8, slots=1), bytearray(manifest.size)
    core.take(OWNER, manifest, memoryview(buffer), INLINE[how](bytes(data)))
    event = core.next_event()
    if how == "whole":
        assert event == Fetched(OWNER, manifest.blob) and buffer == data
        assert not core.to_send() and not core.wanted() and not core.chunks_refused
        return
    assert (
        isinstance(event, FetchFailed)
        and event.cause is FetchFailure.DAMAGED
        and "wrong digest" in event.reason
    )
    assert buffer == bytes(manifest.size) and core.chunks_refused == 1


def test_a_row_of_an_array_is_assembled_in_place() -> None:
    one = one_fetch(3)
    rows = np.zeros((2, one.manifest.size), np.uint8)
    one.fetch("another", one.manifest, rows[1].data, now=0.0)
    assert all(one.chunk(index, owner="another") for index in (2, 1, 0))
    assert rows[1].tobytes() == one.data and not rows[0].any()


# Manifest


def test_a_blob_is_named_by_its_content() -> None:
    manifest, data = blob_of(5)
    assert manifest.chunks == 5 and manifest.size == len(data)
    digests = [chunk_digest(data[manifest.span(index)]) for index in range(5)]
    assert manifest.digests == b"".join(digests) and described(bytes(data)) == manifest
    others = [
        described(bytes([data[0] ^ 1]) + bytes(data[1:])),
        described(data, 2 * CHUNK),
        described(data, codec="fp16"),
        described(data, layout="m"),
        described(data[:-1]),
        described(data, salt="s"),
        described(data, reference=manifest.blob),
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
        (
            {"reference": "0123456789abcdef"},
            "wrong reference model '0123456789abcdef', expected ''",
        ),
    ],
)
def test_a_manifest_of_another_run_is_refused(lie: dict[str, object], reports: str) -> None:
    manifest, _ = blob_of(5)
    form = ModelForm("l", "fp32", 4820, exact=True, delta=False)
    form.check(manifest)
    with pytest.raises(RefusedModel) as caught:
        form.check(replace(manifest, **lie))  # type: ignore[arg-type]
    assert reports in str(caught.value) and len(str(caught.value)) < 200


def test_a_manifest_may_be_smaller_where_sizes_vary_and_names_its_reference_where_it_is_a_delta() -> (
    None
):
    manifest, _ = blob_of(5)
    against = "0123456789abcdef"
    ModelForm("l", "fp32", 9000, exact=False, delta=False).check(manifest)
    delta = ModelForm("l", "fp32", 4820, exact=True, delta=True)
    delta.check(replace(manifest, reference=against), reference=against)
    for form, reference in (
        (delta, against),
        (ModelForm("l", "fp32", 4819, exact=False, delta=False), ""),
    ):
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
def test_a_window_leaves_room_for_pings(
    rate: float, chunk_bytes: int, most: int, keepalive_s: int
) -> None:
    window = window_for(LinkDirection(rate), chunk_bytes, most, keepalive_s)
    third = keepalive_s / 3 * (1 + 1e-9)
    assert 2 <= window <= most and (window == 2 or window * chunk_bytes / rate <= third)
    # not smaller than it must be
    assert window == most or (window + 1) * chunk_bytes / rate > keepalive_s / 3
    assert window_for(LinkDirection(), chunk_bytes, most, keepalive_s) == most


@given(st.floats(1e5, 1e9), st.floats(0, 0.5), st.integers(32_768, 1_000_000))
def test_a_window_fills_a_link_with_delay(rate: float, delay_s: float, chunk_bytes: int) -> None:
    window = window_for(LinkDirection(rate, delay_s), chunk_bytes, 8, 3600.0)
    assert 8 <= window <= 64
    assert window == 64 or window * chunk_bytes >= 2 * rate * 2 * delay_s


def test_a_receiver_asks_for_what_its_link_can_carry() -> None:
    """At 64 kbit/s a chunk of 32 KB takes 4.1 s: two of them are a third of a keep-alive of 30 s."""
    ways = {"slow": LinkDirection(8000.0), "fast": LinkDirection(1e6), "free": LinkDirection()}
    how = {"chunks": 40, "chunk_bytes": 32_768, "slots": 4, "keepalive_s": 30}
    fetches = Fetches(*ways, "stranger", ways=ways, **how)  # type: ignore[arg-type]
    windows = {"slow": 2, "fast": 8, "free": 8, "stranger": 8}
    assert {owner: ask.window for owner, ask in fetches.asked().items()} == windows
    for index in range(2):
        assert fetches.chunk(index, owner="slow")
        assert fetches.asked()["slow"].window == 2  # a quarter of two is each one


def test_a_dead_owner_gives_its_slot_to_those_that_wait_and_keeps_what_it_sent() -> None:
    slots = Fetches("dead", "alive")
    assert slots.chunk(0, owner="dead")
    slots.asked()
    slots.yield_slot("dead", now=0.2)
    assert set(slots.asked()) == {"alive"}
    assert slots.serve("alive") and slots.wanted() == {("dead", slots.manifest.blob)}
    assert slots.asked()["dead"].lacking == bytes([0b01110000])
    assert slots.buffers["alive"] == slots.data


def test_an_owner_that_reconnected_is_asked_again_at_once() -> None:
    one = one_fetch()
    one.ask_again("other", now=1.0)
    assert one.asked() == {}
    one.ask_again(OWNER, now=1.0)
    assert one.asked()[OWNER].restart


# Slots


def test_a_fetch_that_starves_goes_behind_those_that_wait_and_keeps_its_chunks() -> None:
    slots = Fetches("silent", "second", "third")
    assert set(slots.asked()) == {"silent"}
    assert slots.chunk(2, owner="silent")
    assert set(slots.wait(PATIENCE_S + 1)) == {"second"}
    assert slots.wanted() == {(owner, slots.manifest.blob) for owner in ("silent", "second")}
    assert slots.serve("second")
    assert set(slots.asked()) == {"second", "third"}  # the first of them: complete
    assert slots.chunk(0, owner="silent")  # it was minutes on its way
    assert slots.serve("third")
    ask = slots.asked()["silent"]
    assert ask.lacking == bytes([0b01010000])
    assert slots.chunk(1, owner="silent") and slots.chunk(3, owner="silent")
    assert slots.buffers["silent"] == slots.data and not slots.wanted()


@pytest.mark.parametrize("busy", [True, False])
def test_a_silent_connection_and_repeated_chunks_hold_no_slot(busy: bool) -> None:
    slots = Fetches("silent", "second")
    slots.asked()
    assert slots.chunk(0, owner="silent")
    asked: dict[str, Ask] = {}
    for _ in range(5):
        asked |= slots.wait(4, busy=busy)
        slots.chunk(0, owner="silent")
    assert "second" in asked


def parked() -> Fetches:
    """Return two fetches for one slot, the first of which has starved."""
    slots = Fetches("silent", "second")
    slots.asked()
    slots.wait(PATIENCE_S + 1)
    return slots


def test_a_parked_fetch_may_end_without_a_slot() -> None:
    slots = parked()
    assert slots.serve("silent")
    assert slots.next_event() == Fetched("silent", slots.manifest.blob)
    assert slots.wanted() == {("second", slots.manifest.blob)}
    assert slots.serve("second") and not slots.wanted()


def test_what_was_parked_before_a_new_connection_begins_anew() -> None:
    slots = parked()
    slots.reconnected(slots.now)
    assert slots.asked()["second"].restart
    assert slots.serve("second")
    assert slots.asked()["silent"].restart


def test_a_parked_fetch_can_be_dropped_and_written_no_more() -> None:
    slots, blob = parked(), blob_of(4)[0].blob
    slots.drop("silent", now=slots.now)
    assert slots.wanted() == {("second", blob)} and not slots.chunk(0, owner="silent")
    assert slots.lacks("silent", blob) == 0


def test_parked_chunks_on_their_way_are_asked_for_again_only_after_two_turns() -> None:
    """On a slow link a chunk may take longer than a turn; asked for again each time, it would never
    be here.
    """
    slots = Fetches("silent", "other")
    first = slots.asked()["silent"]
    assert first.restart
    restarts = []
    for _ in range(6):
        restarts += [
            ask.restart for owner, ask in slots.wait(PATIENCE_S).items() if owner == "silent"
        ]
    assert restarts[0] is False and any(restarts)


def test_a_chunk_between_two_turns_is_no_reason_to_ask_for_it_again() -> None:
    slots = parked()
    assert slots.serve("second") and slots.chunk(0, owner="silent")
    slots.fetch("third", slots.manifest, room_for(slots.manifest), now=slots.now)
    slots.wait(PATIENCE_S + 1)
    assert slots.serve("third")
    slots.tick(slots.now)
    assert slots.asked()["silent"].restart is False


@examples(60)
@given(
    slots=st.integers(1, 4),
    silent=st.integers(0, 8),
    serving=st.integers(1, 20),
    draw=st.randoms(use_true_random=False),
)
def test_owners_that_never_serve_hold_nobody_back(
    slots: int, silent: int, serving: int, draw: random.Random
) -> None:
    owners = [*(f"silent-{i}" for i in range(silent)), *(f"serves-{i}" for i in range(serving))]
    draw.shuffle(owners)
    case = Fetches(*owners, slots=slots)
    waiting = {owner for owner in owners if owner.startswith("serves")}
    for _ in range(int((silent // slots + 2) * (PATIENCE_S + 1))):
        asked = case.asked() | case.wait(1)
        while ready := sorted(asked.keys() & waiting):
            waiting -= {owner for owner in ready if case.serve(owner)}
            asked = case.asked()
    assert not waiting


def test_a_flood_of_restarts_publishes_each_chunk_once_in_a_while() -> None:
    owner, count = OneOwner(8, "a"), 0
    for hundredth in range(1000):
        now = hundredth / 100
        owner.ask("a", now=now)
        count += len(owner.publishes(now))
    assert count <= 8 * (10 / RESTART_S + 1)
