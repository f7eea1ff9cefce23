"""Emulated links keep their rate whatever the event loop does, and every byte is in the ledger."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt import client as paho

from fedstrata.common.accounting.counters import Account, packet_bytes
from fedstrata.common.accounting.traffic import TcpStats, Traffic
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Acknowledgement, Ask, Key, Manifest
from fedstrata.common.protocol.outbox import (
    ASIDE_KEPT,
    CHUNKS_IN_CLIENT,
    CREDIT_S,
    EARLY_S,
    LEAD_S,
    Outbox,
    Output,
    Publish,
    PublishChunk,
    Shaper,
)
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.protocol.sender import Sender
from fedstrata.common.settings.links import LinkDirection, LinkSet


def shaper_of(rate: float | None, *peers: str, delay_s: float = 0.0) -> Shaper:
    """Return a shaper whose ways are all alike."""
    return Shaper(dict.fromkeys(peers or "abcdefgh", LinkDirection(rate, delay_s)))


def send(
    rate: float, sizes: list[int], *, late_s: float = 0.0, peers: tuple[str, ...] = ("a",)
) -> list[float]:
    """Send messages one after the other as an agent does, waking up late; return when each left."""
    shaper, randomness, now, left = shaper_of(rate), random.Random(0), 50.0, []
    for size in sizes:
        shaper.passed()
        while not shaper.ready(peers, now):
            ready_at = shaper.next_ready(now)
            assert now < ready_at < inf
            # the wake-up that was asked for comes late
            now = ready_at + randomness.uniform(0, late_s)
            shaper.passed()
        due = shaper.reserve(peers, size, now)
        assert due >= now
        left.append(due + randomness.uniform(0, late_s))
    return left


@pytest.mark.parametrize("late_s", [0.0, 0.005])
@pytest.mark.parametrize("mbit", [0.25, 1, 10, 100, 1000])
@pytest.mark.parametrize("share", [0.5, 0.05, None])
def test_the_long_run_rate_is_exact(mbit: float, late_s: float, share: float | None) -> None:
    """Chunks of half a second as the agents cut them, capped at 1.9 MB, much smaller ones, and all
    sizes.
    """
    rate, randomness = mbit * 1e6 / 8, random.Random(1)
    chunk = max(1024, min(1_900_000, int(rate * (share or 1))))
    sizes = [
        chunk if share else randomness.choice([50, 300, 5000, 70_000, 1_000_000])
        for _ in range(2000)
    ]
    left = send(rate, sizes, late_s=late_s)
    assert sum(sizes[1:]) / (left[-1] - left[0]) == pytest.approx(rate, rel=0.005)


def waited(shaper: Shaper, *peers: str, now: float) -> None:
    """Let bulk messages find these peers' links busy, as the last pass before `now` did."""
    shaper.passed()
    assert not shaper.ready(peers, now)
    shaper.passed()


def test_a_message_leaves_when_its_last_bit_would_arrive() -> None:
    shaper = shaper_of(1000.0)
    assert shaper.reserve(("a",), 500, 10.0) == pytest.approx(10.5)
    assert shaper.reserve(("a",), 1000, 10.0) == pytest.approx(11.5)
    assert not shaper.ready(("a",), 11.4) and shaper.ready(("a",), 11.5 - LEAD_S)


def test_a_late_wake_up_is_made_up_for_where_something_waited() -> None:
    for late_s in (0.004, CREDIT_S, 1.0):
        shaper = shaper_of(1000.0)
        shaper.reserve(("a",), 1000, 10.0)
        waited(shaper, "a", now=10.5)
        due = shaper.reserve(("a",), 1000, 11.0 + late_s)
        assert due == pytest.approx(12.0 + late_s - min(late_s, CREDIT_S))


def test_an_idle_link_gives_nothing_away() -> None:
    shaper = shaper_of(1000.0)
    shaper.reserve(("a",), 1000, 10.0)
    assert shaper.reserve(("a",), 1000, 11.5) == pytest.approx(12.5)
    waited(shaper, "a", now=12.0)
    shaper.passed()  # what waited has left since
    assert shaper.reserve(("a",), 1000, 20.0) == pytest.approx(21.0)


@given(
    gaps=st.lists(
        st.tuples(st.floats(0, 2) | st.just(1e6), st.integers(1, 3_000_000)),
        min_size=1,
        max_size=60,
    ),
    window=st.tuples(st.integers(0, 59), st.integers(0, 59)),
    mbit=st.sampled_from([0.25, 10, 1000]),
)
def test_no_stretch_of_time_carries_more_than_rate_and_credit(
    gaps: list[tuple[float, int]], window: tuple[int, int], mbit: float
) -> None:
    rate, now, sent = mbit * 1e6 / 8, 10.0, list[tuple[float, int]]()
    shaper = shaper_of(rate)
    for gap, size in gaps:
        now += gap
        sent.append((shaper.reserve(("a",), size, now), size))
    first, last = sorted(at % len(sent) for at in window)
    carried = sum(size for _, size in sent[first + 1 : last + 1])
    assert carried <= (sent[last][0] - sent[first][0] + CREDIT_S) * rate * (1 + 1e-9) + 1


def test_a_message_to_several_peers_takes_time_on_each_link() -> None:
    shaper = shaper_of(1000.0)
    busy = shaper.reserve(("a",), 2000, 10.0)
    # the slowest decides
    assert shaper.reserve(("a", "b", "c"), 500, 10.0) == pytest.approx(busy + 0.5)
    assert shaper.next_ready(10.0) == pytest.approx(10.5 - LEAD_S)
    assert shaper.ready(("b", "c"), 10.5) and not shaper.ready(("a", "b"), 10.5)
    assert shaper.next_ready(10.5) == pytest.approx(busy + 0.5 - LEAD_S)


def test_a_broadcast_takes_no_longer_than_one_copy() -> None:
    left = send(125_000.0, [62_500] * 200, peers=tuple("abcdefgh"))
    assert left == send(125_000.0, [62_500] * 200)


def test_a_link_that_is_not_shaped_never_waits() -> None:
    for shaper in (shaper_of(None), Shaper({})):
        for now in (0.0, 10.0):
            assert shaper.ready(("a",), now) and shaper.reserve(("a",), 10**9, now) == now
            assert shaper.next_ready(now) == inf
    shaper = shaper_of(1.0)
    assert shaper.ready((), 0.0) and shaper.reserve((), 10, 5.0) == 5.0


def test_each_peer_has_its_own_link_rate_and_delay() -> None:
    shaper = Shaper(
        {
            "slow": LinkDirection(1000.0),
            "fast": LinkDirection(100_000.0),
            "far": LinkDirection(None, 0.3),
        }
    )
    due = {
        peer: shaper.reserve((peer,), 1000, 10.0) for peer in ("slow", "fast", "far", "stranger")
    }
    assert due == pytest.approx({"slow": 11.0, "fast": 10.01, "far": 10.3, "stranger": 10.0})
    assert shaper.ready(("far", "fast", "stranger"), 10.0) and not shaper.ready(
        ("slow", "fast"), 10.0
    )
    assert shaper.next_ready(10.0) == pytest.approx(11 - LEAD_S)
    assert shaper.next_ready(11.0) == inf


def test_a_delay_does_not_cost_throughput() -> None:
    shaper = shaper_of(1000.0, delay_s=5.0)
    assert shaper.reserve(("a",), 1000, 10.0) == pytest.approx(16.0)
    # the link is free again long before that arrives
    assert shaper.ready(("a",), 11.0 - LEAD_S + 1e-9)
    assert shaper.reserve(("a",), 1000, 11.0) == pytest.approx(17.0)
    waited(shaper, "a", now=11.5)
    assert shaper.reserve(("a",), 1, 12.01) == pytest.approx(17.01)  # a credit is none of the delay


MESSAGES = st.lists(
    st.tuples(
        st.floats(0, 0.5), st.integers(1, 100_000), st.sets(st.sampled_from("abc"), min_size=1)
    ),
    min_size=1,
    max_size=60,
)


@given(
    messages=MESSAGES,
    rates=st.tuples(*[st.sampled_from([None, 3e4, 1e6])] * 3),
    delays=st.tuples(*[st.sampled_from([0.0, 0.01, 2.0])] * 3),
)
def test_messages_to_a_peer_keep_their_order_rate_and_delay(
    messages: list[tuple[float, int, set[str]]],
    rates: tuple[float | None, ...],
    delays: tuple[float, ...],
) -> None:
    """Small and large ones, to one peer or to several: control never takes what the bucket does not
    give.
    """
    ways = {
        peer: LinkDirection(rate, delay)
        for peer, rate, delay in zip("abc", rates, delays, strict=True)
    }
    shaper, now = Shaper(ways), 50.0
    left: dict[str, list[tuple[float, float, int]]] = {peer: [] for peer in ways}
    for gap, size, peers in messages:
        now += gap
        due = shaper.reserve(sorted(peers), size, now)
        for peer in peers:
            left[peer].append((now, due, size))
    for peer, way in ways.items():
        times = [due for _, due, _ in left[peer]]
        assert times == sorted(times)
        assert all(due >= handed + way.delay_s for handed, due, _ in left[peer])
        if way.rate is not None and times:
            # However many were handed over: all up to any one of them fit into the time until it
            # leaves.
            begun, carried = left[peer][0][0] - CREDIT_S, 0
            for _, due, size in left[peer]:
                carried += size
                assert carried <= (due - way.delay_s - begun) * way.rate * (1 + 1e-9) + 1


# Outbox


class OneOutbox:
    """An outbox in the hand of a test, whose peers each have a way of their own."""

    def __init__(self, ways: dict[str, LinkDirection], *, shaped: bool = True) -> None:
        self.sender, self.counters = Sender(first_number=1), Account()
        identity = Identity("r-1", "me", "cloud", "session")
        all_ways = LinkSet(to=ways, from_=ways, shaped=shaped)
        self.outbox = Outbox(identity, sender=self.sender, counters=self.counters, ways=all_ways)

    def send(self, peer: str, number: int, now: float) -> None:
        """Send a message that can be reported from others by its number."""
        self.outbox.send(peer, Acknowledgement(Key(0, 0, number), ""), now)

    def left(self, now: float) -> list[int]:
        """Return the numbers of the messages that leave now."""
        return [number_of(output) for output in self.outbox.to_send(now)]

    def offer(self, chunks: int, *receivers: str) -> Manifest:
        data = memoryview(random.Random(chunks).randbytes(1024 * chunks))
        manifest = describe(data, chunk_bytes=1024, codec="fp32", layout="l")
        self.sender.offer(manifest, data, receivers)
        lacking = b"\xff" * (chunks // 8)
        for receiver in receivers:
            self.sender.receive(receiver, Ask(manifest.blob, lacking, 0, 0, 64, True), now=0.0)
        return manifest


def number_of(output: Output) -> int:
    assert isinstance(output, Publish)
    _, message = serialization.decode(output.body)
    assert isinstance(message, Acknowledgement)
    return message.key.local_round


def test_what_is_due_leaves_at_once() -> None:
    one = OneOutbox({"a": LinkDirection()})
    for number in range(3):
        one.send("a", number, 100.0)
        assert not one.outbox.empty and one.left(100.0) == [number] and one.outbox.empty
    assert one.outbox.next_deadline(100.0) == inf


SENT = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 0.3)), max_size=20)


@given(sent=SENT, late_s=st.sampled_from([0.0, 0.3, 5.0]))
def test_messages_leave_in_order_and_not_before_their_time(
    sent: list[tuple[str, float]], late_s: float
) -> None:
    ways = {
        "a": LinkDirection(None, 0.5),
        "b": LinkDirection(None, 0.0),
        "c": LinkDirection(1000.0, 0.1),
    }
    one, now, handed = OneOutbox(ways), 100.0, {}
    left: dict[str, list[tuple[int, float]]] = {peer: [] for peer in ways}

    def look(now: float) -> None:
        for number in one.left(now):
            left[handed[number][0]].append((number, now))

    for number, (peer, gap) in enumerate(sent):
        now += gap
        handed[number] = peer, now
        one.send(peer, number, now)
        look(now)
    while (due := one.outbox.next_deadline(now)) < inf:
        assert due > now - EARLY_S
        now = max(now, due) + late_s
        look(now)
    assert one.outbox.empty and sum(map(len, left.values())) == len(sent)
    for peer, numbers in left.items():
        assert numbers == sorted(numbers)
        for number, at in numbers:
            assert at >= handed[number][1] + ways[peer].delay_s - EARLY_S


def test_a_link_that_another_end_keeps_is_not_shaped() -> None:
    one = OneOutbox({"a": LinkDirection(10.0, 5.0)}, shaped=False)
    one.send("a", 1, 100.0)
    assert one.left(100.0) == [1]


def test_a_message_is_counted_when_it_leaves() -> None:
    one = OneOutbox({"a": LinkDirection(None, 0.5)})
    one.send("a", 1, 100.0)
    one.outbox.to_send(100.0)
    assert one.counters.traffic("a") == Traffic()
    (output,) = one.outbox.to_send(100.5)
    assert isinstance(output, Publish)
    packet = packet_bytes(output.topic, len(output.body), qos=0)
    assert one.counters.traffic("a") == Traffic(
        sent_control_payload=len(output.body), sent_control_message=packet
    )


def test_few_chunks_are_in_the_client_and_each_that_leaves_makes_room() -> None:
    one = OneOutbox({"a": LinkDirection(), "b": LinkDirection()})
    manifest = one.offer(16, "a", "b")
    chunks = one.outbox.to_send(1.0)
    assert len(chunks) == CHUNKS_IN_CLIENT and one.outbox.to_send(1.0) == []
    assert one.outbox.next_deadline(1.0) == inf  # nothing to wake for until one has left
    seen = []
    while chunks:
        chunk = chunks.pop(0)
        assert isinstance(chunk, PublishChunk)
        seen.append(chunk.chunk.index)
        one.outbox.sent(chunk.chunk)
        chunks += one.outbox.to_send(1.0)
    assert seen == list(range(16))
    traffic = one.counters.traffic(topics.ALL)
    assert traffic.sent_model_payload == manifest.size and traffic.sent_control_payload == 0


def test_chunks_that_wait_for_a_slow_link_keep_nobody_from_his() -> None:
    one = OneOutbox({"slow": LinkDirection(100.0), "fast": LinkDirection()})
    one.offer(8, "slow")
    one.offer(16, "fast")
    fast = 0
    for _ in range(20):
        for output in one.outbox.to_send(1.0):
            assert isinstance(output, PublishChunk) and output.chunk.receivers == ("fast",)
            one.outbox.sent(output.chunk)
            fast += 1
    assert fast == 16 and not one.outbox.empty


def test_a_blob_that_is_dropped_or_a_connection_that_is_lost_leaves_nothing_behind() -> None:
    one = OneOutbox({"a": LinkDirection(100.0), "b": LinkDirection(100.0)})
    first, second = one.offer(8, "a"), one.offer(16, "b")
    one.outbox.to_send(1.0)
    one.send("a", 7, 1.0)
    one.sender.retire(first.blob)
    one.outbox.drop(first.blob)
    later = one.outbox.to_send(1000.0)
    assert [output.chunk.blob for output in later if isinstance(output, PublishChunk)][:1] == [
        second.blob
    ]
    assert any(isinstance(output, Publish) for output in later)
    one.send("a", 8, 1000.0)
    one.outbox.clear()
    assert one.outbox.empty
    (blob,) = one.sender._blobs.values()
    in_client = {
        (output.chunk.stream, output.chunk.index)
        for output in later
        if isinstance(output, PublishChunk)
    }
    assert blob.leaving == in_client  # those that the client still has, and no other


def test_noise_is_counted_apart_and_remembered_in_bounds() -> None:
    one = OneOutbox({"a": LinkDirection()})
    manifest = one.offer(8, "a")
    one.outbox.add_aside("probe", "me", manifest.blob)
    while outputs := one.outbox.to_send(1.0):
        for output in outputs:
            assert isinstance(output, PublishChunk)
            one.outbox.sent(output.chunk)
    assert (
        one.counters.traffic("a") == Traffic() and one.counters.probed("a", "sent") > manifest.size
    )
    one.outbox.add_aside("frozen", "me", "arrays")
    for number in range(2 * ASIDE_KEPT):
        one.outbox.add_aside("probe", "me", f"{number:016x}")
    assert len(one.outbox.aside) == ASIDE_KEPT and ("me", manifest.blob) not in one.outbox.aside
    assert one.outbox.aside["me", "arrays"] == "frozen"


# Accounting


def paho_packet(topic: str, body: int, qos: int) -> int:
    """Let paho encode a PUBLISH packet and return its size."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv311)
    client._sock = object()  # type: ignore[assignment]
    sizes: list[int] = []

    def keep(command: int, packet: bytes, *_: object) -> int:
        sizes.append(len(packet))
        return 0

    client._packet_queue = keep  # type: ignore[assignment, method-assign]
    client._send_publish(1, topic.encode(), b"x" * body, qos)
    client._sock = None
    (size,) = sizes
    return size


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("remaining", [127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_a_packet_is_counted_as_paho_sends_it(remaining: int, qos: int) -> None:
    topic = topics.chunk("lab", "r-1", "cloud", "all", "0" * 16, 12, 1_700_000_000_000)
    edge = remaining - 2 - len(topic) - 2 * qos
    for body in {0, 1, 40, *range(max(0, edge - 1), max(0, edge) + 2)}:
        assert packet_bytes(topic, body, qos=qos) == paho_packet(topic, body, qos)


CELLS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from(["sent", "received"]),
        st.integers(0, 5000),
        st.integers(0, 5000),
        st.integers(1, 60),
    ),
    max_size=30,
)


@given(packets=CELLS)
def test_the_counts_balance(packets: list[tuple[str, str, int, int, int]]) -> None:
    account = Account()
    for peer, direction, model, control, overhead in packets:
        account.add(
            peer, direction, message=model + control + overhead, model=model, control=control
        )  # type: ignore[arg-type]
    for peer, direction in itertools.product(("a", "b"), ("sent", "received")):
        mine = [
            packet[2:]
            for packet in packets
            if packet[:2] == (peer, direction) and packet[2] + packet[3]
        ]
        traffic = account.traffic(peer)
        assert getattr(traffic, f"{direction}_model_payload") == sum(model for model, _, _ in mine)
        assert getattr(traffic, f"{direction}_control_payload") == sum(
            control for _, control, _ in mine
        )
        assert getattr(traffic, direction) == sum(sum(packet) for packet in mine)


@pytest.mark.parametrize(
    ("packets", "expected"),
    [
        (
            # overhead to control
            [{"message": 1050, "model": 1000}, {"message": 1600, "model": 1000, "control": 510}],
            {
                "model_payload": 2000,
                "model_message": 2050,
                "control_payload": 510,
                "control_message": 600,
            },
        ),
        (
            [
                {"message": 1050, "model": 600, "extras": 400},
                {"message": 1050, "extras": 1000},
                {"message": 1300, "model": 700, "extras": 300, "control": 260},
            ],
            {
                "model_payload": 1300,
                "model_message": 1350,
                "extras_payload": 1700,
                "extras_message": 1750,
            }
            | {"control_payload": 260, "control_message": 300},
        ),
    ],
    ids=["overhead", "extras"],
)
def test_bytes_are_counted_by_their_kind(
    packets: list[dict[str, int]], expected: dict[str, int]
) -> None:
    account = Account()
    for packet in packets:
        account.add("a", "sent", **packet)
    assert account.traffic("a") == Traffic(
        **{f"sent_{name}": size for name, size in expected.items()}
    )
    assert account.traffic("b") == Traffic() and {peer for peer, _, _ in account.cells} == {"a"}


def test_every_cell_has_a_field_of_its_own() -> None:
    account, size = Account(), itertools.count(1)
    expected = {}
    for direction in ("sent", "received"):
        for kind in ("model", "extras", "frozen", "control"):
            payload = 100 * next(size)
            account.add("a", direction, message=payload + 7, **{kind: payload})  # type: ignore[arg-type]
            expected |= {
                f"{direction}_{kind}_payload": payload,
                f"{direction}_{kind}_message": payload + 7,
            }
    traffic = account.traffic("a")
    assert {field.name: getattr(traffic, field.name) for field in fields(Traffic)} == expected | {
        "wire": TcpStats()
    }
