"""Emulated links keep their rate whatever the event loop does, and every byte is in the books."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt import client as paho

from common.links import Way
from common.protocol import topics
from common.protocol.counters import Account, packet_bytes
from common.protocol.shaping import CREDIT_S, EARLY_S, LEAD_S, Departures, Shaper
from common.protocol.traffic import Traffic, Wire


def shaper_of(rate: float | None, *peers: str, delay_s: float = 0.0) -> Shaper:
    """Return a shaper whose ways are all alike."""
    return Shaper(dict.fromkeys(peers or "abcdefgh", Way(rate, delay_s)))


def send(rate: float, sizes: list[int], *, late_s: float = 0.0, peers: tuple[str, ...] = ("a",)) -> list[float]:
    """Send messages one after the other as an agent does, waking up late; return when each left."""
    shaper, randomness, now, left = shaper_of(rate), random.Random(0), 50.0, []
    for size in sizes:
        now = max(now, shaper.ready_at(peers))
        while not shaper.ready(peers, now):
            now += 1e-6  # a clock's tick, where the sum was rounded
        now += randomness.uniform(0, late_s)  # the wake-up that was asked for comes late
        due = shaper.reserve(peers, size, now)
        assert due >= now
        left.append(due + randomness.uniform(0, late_s))
    return left


@pytest.mark.parametrize("mbit", [0.25, 1, 10, 100, 1000])
@pytest.mark.parametrize("late_s", [0.0, 0.005])
@pytest.mark.parametrize("share", [0.5, 0.05])
def test_the_long_run_rate_is_exact(mbit: float, late_s: float, share: float) -> None:
    """Chunks of half a second as the agents cut them, capped at 1.9 MB, and much smaller ones."""
    rate = mbit * 1e6 / 8
    chunk = max(1024, min(1_900_000, int(rate * share)))
    left = send(rate, [chunk] * 4000, late_s=late_s)
    measured = chunk * (len(left) - 1) / (left[-1] - left[0])
    assert measured == pytest.approx(rate, rel=0.005)


@pytest.mark.parametrize("late_s", [0.0, 0.005])
def test_the_rate_holds_for_messages_of_all_sizes(late_s: float) -> None:
    randomness = random.Random(1)
    sizes = [randomness.choice([50, 300, 5000, 70_000, 1_000_000]) for _ in range(3000)]
    left = send(12.5e6, sizes, late_s=late_s)
    assert sum(sizes[1:]) / (left[-1] - left[0]) == pytest.approx(12.5e6, rel=0.005)


def test_a_message_leaves_when_its_last_bit_would_arrive() -> None:
    shaper = shaper_of(1000.0)
    assert shaper.reserve(("a",), 500, 10.0) == pytest.approx(10.5 - CREDIT_S)
    assert shaper.reserve(("a",), 1000, 10.0) == pytest.approx(11.5 - CREDIT_S)
    assert not shaper.ready(("a",), 11.4) and shaper.ready(("a",), 11.5 - CREDIT_S - LEAD_S)


@given(
    idle_s=st.floats(0, 1e6),
    sizes=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=20),
    mbit=st.sampled_from([0.25, 10, 1000]),
)
def test_an_idle_link_saves_up_no_more_than_the_credit(idle_s: float, sizes: list[int], mbit: float) -> None:
    shaper, rate = shaper_of(mbit * 1e6 / 8), mbit * 1e6 / 8
    shaper.reserve(("a",), 1000, 100.0)
    now = 101.0 + idle_s
    sent = 0
    for size in sizes:
        due = shaper.reserve(("a",), size, now)
        sent += size
        assert due >= now and sent <= (due - now + CREDIT_S) * rate * (1 + 1e-9) + 1


@given(
    gaps=st.lists(st.tuples(st.floats(0, 2), st.integers(1, 200_000)), min_size=1, max_size=60),
    window=st.tuples(st.integers(0, 59), st.integers(0, 59)),
)
def test_no_stretch_of_time_carries_more_than_rate_and_credit(
    gaps: list[tuple[float, int]], window: tuple[int, int]
) -> None:
    shaper, rate, now, sent = shaper_of(100_000.0), 100_000.0, 10.0, []
    for gap, size in gaps:
        now += gap
        sent.append((shaper.reserve(("a",), size, now), size))
    first, last = sorted(at % len(sent) for at in window)
    carried = sum(size for _, size in sent[first + 1 : last + 1])
    assert carried <= (sent[last][0] - sent[first][0] + CREDIT_S) * rate * (1 + 1e-9) + 1


def test_peers_have_links_of_their_own() -> None:
    shaper = shaper_of(1000.0)
    shaper.reserve(("a",), 1000, 10.0)
    assert not shaper.ready(("a",), 10.5) and shaper.ready(("b",), 10.5)
    assert not shaper.ready(("a", "b"), 10.5)
    assert shaper.reserve(("b",), 100, 10.5) == pytest.approx(10.6 - CREDIT_S)


def test_a_message_to_several_peers_takes_time_on_each_link() -> None:
    shaper = shaper_of(1000.0)
    busy = shaper.reserve(("a",), 2000, 10.0)
    assert shaper.reserve(("a", "b", "c"), 500, 10.0) == pytest.approx(busy + 0.5)  # the slowest decides
    assert shaper.ready_at(("a",)) == pytest.approx(busy + 0.5 - LEAD_S)
    for peer in ("b", "c"):
        assert shaper.ready_at((peer,)) == pytest.approx(10.5 - CREDIT_S - LEAD_S)
    assert shaper.ready_at(("a", "b")) == shaper.ready_at(("a",))


def test_a_broadcast_takes_no_longer_than_one_copy() -> None:
    left = send(125_000.0, [62_500] * 200, peers=tuple("abcdefgh"))
    assert left == send(125_000.0, [62_500] * 200)


def test_a_link_that_is_not_shaped_never_waits() -> None:
    for shaper in (shaper_of(None), Shaper({})):
        for now in (0.0, 10.0):
            assert shaper.ready(("a",), now) and shaper.reserve(("a",), 10**9, now) == now
            assert shaper.next_ready(now) is None
    shaper = shaper_of(1.0)
    assert shaper.ready((), 0.0) and shaper.reserve((), 10, 5.0) == 5.0


def test_each_peer_has_its_own_rate_and_delay() -> None:
    shaper = Shaper({"slow": Way(1000.0), "fast": Way(100_000.0), "far": Way(None, 0.3)})
    due = {peer: shaper.reserve((peer,), 1000, 10.0) for peer in ("slow", "fast", "far", "stranger")}
    assert due == pytest.approx({"slow": 11 - CREDIT_S, "fast": 10.0, "far": 10.3, "stranger": 10.0})
    assert shaper.ready(("far", "fast", "stranger"), 10.0) and not shaper.ready(("slow", "fast"), 10.0)
    assert shaper.next_ready(10.0) == shaper.ready_at(("slow",)) == pytest.approx(11 - CREDIT_S - LEAD_S)
    assert shaper.next_ready(11.0) is None


def test_a_delay_does_not_cost_throughput() -> None:
    shaper = shaper_of(1000.0, delay_s=5.0)
    assert shaper.reserve(("a",), 1000, 10.0) == pytest.approx(16.0 - CREDIT_S)
    assert shaper.ready(("a",), 11.0 - CREDIT_S - LEAD_S + 1e-9)  # the link is free again long before that arrives
    assert shaper.reserve(("a",), 1000, 11.0) == pytest.approx(17.0 - CREDIT_S)


MESSAGES = st.lists(
    st.tuples(st.floats(0, 0.5), st.integers(1, 100_000), st.sets(st.sampled_from("abc"), min_size=1)),
    min_size=1, max_size=60,
)  # fmt: skip


@given(
    messages=MESSAGES,
    rates=st.tuples(*[st.sampled_from([None, 3e4, 1e6])] * 3),
    delays=st.tuples(*[st.sampled_from([0.0, 0.01, 2.0])] * 3),
)
def test_messages_to_a_peer_keep_their_order_rate_and_delay(
    messages: list[tuple[float, int, set[str]]], rates: tuple[float | None, ...], delays: tuple[float, ...]
) -> None:
    """Small and large ones, to one peer or to several: control never takes what the bucket does not give."""
    ways = {peer: Way(rate, delay) for peer, rate, delay in zip("abc", rates, delays, strict=True)}
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
            # However many were handed over: all up to any one of them fit into the time until it leaves.
            begun, carried = left[peer][0][0] - CREDIT_S, 0
            for _, due, size in left[peer]:
                carried += size
                assert carried <= (due - way.delay_s - begun) * way.rate * (1 + 1e-9) + 1


# Departures


class Clock:
    """An event loop's clock and timers, played by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Clock.Timer:
        self.timers.append((when, callback))
        return Clock.Timer(self, self.timers[-1])

    @dataclass
    class Timer:
        clock: Clock
        entry: tuple[float, Callable[[], None]]

        def cancel(self) -> None:
            if self.entry in self.clock.timers:
                self.clock.timers.remove(self.entry)

    def run(self, *, late_s: float = 0.0) -> None:
        while self.timers:
            when, callback = min(self.timers, key=lambda timer: timer[0])
            self.timers.remove((when, callback))
            self.now = max(self.now, when) + late_s
            callback()


def departures_of(clock: Clock) -> Departures:
    return Departures(cast(asyncio.AbstractEventLoop, clock))


def test_what_is_due_leaves_at_once() -> None:
    clock, left = Clock(), []
    departures = departures_of(clock)
    for number, due in enumerate((99.0, 100.0, 100.0 + EARLY_S / 2)):
        departures.at(due, partial(left.append, number))
        assert left[-1] == number and not clock.timers


@given(dues=st.lists(st.sampled_from([0.0, 0.5, 0.5, 1.0, 3.0]), max_size=20), late_s=st.sampled_from([0.0, 0.3, 5.0]))
def test_departures_leave_in_order_and_not_before_their_time(dues: list[float], late_s: float) -> None:
    clock, left = Clock(), []
    departures = departures_of(clock)
    for number, due in enumerate(dues):
        departures.at(100.0 + due, lambda due=due, number=number: left.append((due, number, clock.now)))
    assert len(clock.timers) <= 1
    clock.run(late_s=late_s)
    assert [(due, number) for due, number, _ in left] == sorted((due, number) for number, due in enumerate(dues))
    assert all(100.0 + due - EARLY_S <= at <= 100.0 + due + late_s * len(dues) for due, _, at in left)


def test_a_late_wake_up_does_not_let_a_new_message_overtake() -> None:
    clock, left = Clock(), []
    departures = departures_of(clock)
    departures.at(100.5, partial(left.append, "first"))
    clock.now = 101.0  # its timer has not fired yet
    departures.at(100.7, partial(left.append, "second"))
    assert left == ["first", "second"] and not clock.timers


def test_all_that_was_said_can_be_waited_for() -> None:
    async def play() -> None:
        departures, left = Departures(loop := asyncio.get_running_loop()), []
        await departures.empty()
        for number in range(3):
            departures.at(loop.time() + 0.002, partial(left.append, number))
        assert not left
        await departures.empty()
        assert left == [0, 1, 2]

    asyncio.run(play())


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
    topic = topics.chunk("lab", "run-1", "cloud", "all", "0" * 16, 12, 1_700_000_000_000)
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
def test_the_books_balance(packets: list[tuple[str, str, int, int, int]]) -> None:
    account = Account()
    for peer, direction, model, control, overhead in packets:
        account.add(peer, direction, message=model + control + overhead, model=model, control=control)  # type: ignore[arg-type]
    for peer, direction in itertools.product(("a", "b"), ("sent", "received")):
        mine = [packet[2:] for packet in packets if packet[:2] == (peer, direction) and packet[2] + packet[3]]
        traffic = account.traffic(peer)
        assert getattr(traffic, f"{direction}_model_payload") == sum(model for model, _, _ in mine)
        assert getattr(traffic, f"{direction}_control_payload") == sum(control for _, control, _ in mine)
        assert getattr(traffic, direction) == sum(sum(packet) for packet in mine)


def test_overhead_goes_to_control_where_both_travel_together() -> None:
    account = Account()
    account.add("a", "sent", message=1050, model=1000)
    account.add("a", "sent", message=300, control=250)
    account.add("a", "sent", message=1300, model=1000, control=260)
    assert account.traffic("a") == Traffic(
        sent_model_payload=2000, sent_model_message=2050, sent_control_payload=510, sent_control_message=600
    )


def test_an_unknown_peer_has_no_bytes() -> None:
    account = Account()
    account.add("a", "received", message=10, control=5)
    assert account.traffic("b") == Traffic() and list(account.cells) == [("a", "received", "control")]


def test_every_cell_has_a_field_of_its_own() -> None:
    account, size = Account(), itertools.count(1)
    expected = {}
    for direction in ("sent", "received"):
        for kind in ("model", "control"):
            payload = 100 * next(size)
            account.add("a", direction, message=payload + 7, **{kind: payload})  # type: ignore[arg-type]
            expected |= {f"{direction}_{kind}_payload": payload, f"{direction}_{kind}_message": payload + 7}
    traffic = account.traffic("a")
    assert {field.name: getattr(traffic, field.name) for field in fields(Traffic)} == expected | {"wire": Wire()}
