"""MQTT packets cut from a stream, and the fast way to paho's socket."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion

from fedstrata.common.net import bulk
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.bulk import (
    HEAD_BYTES,
    PUBLISH_QOS0,
    RETAINED,
    Body,
    BulkClient,
    NotMqtt,
    PacketReader,
)
from fedstrata.common.net.connection import BrokerConnection, Handlers
from fedstrata.common.protocol.limits import skip_large
from fedstrata.deploy.brokers import broker
from tests.helpers.nodes import nothing
from tests.helpers.sites import PATIENCE_S


@dataclass
class Spot:
    view: memoryview | None


@dataclass
class Received:
    """What a reader handed on; topics that begin with `large` get a place."""

    taken: list[tuple[int, bytes]] = field(default_factory=list)
    messages: list[tuple[str, bytes, bool]] = field(default_factory=list)
    landed: list[tuple[str, bytes | None]] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)

    def reader(self) -> PacketReader:
        return PacketReader(
            find_place=self._find, landed=self._land, received=self._receive, take=self._take
        )

    def _find(self, topic: str, size: int) -> Spot | None:
        if not topic.startswith("large"):
            return None
        self.spots.append(Spot(memoryview(bytearray(size))))
        return self.spots[-1]

    def _land(self, topic: str, place: object) -> None:
        assert isinstance(place, Spot)
        self.landed.append((topic, None if place.view is None else bytes(place.view)))

    def _receive(self, topic: str, payload: bytes, retained: bool) -> None:
        self.messages.append((topic, payload, retained))

    def _take(self, command: int, packet: bytearray) -> None:
        self.taken.append((command, bytes(packet)))


def head_of(command: int, length: int) -> bytes:
    """Return the beginning of a packet: its first byte and the remaining length."""
    head = bytes([command])
    while True:
        length, digit = divmod(length, 128)
        head += bytes([digit | (128 if length else 0)])
        if not length:
            return head


def packet(command: int, rest: bytes) -> bytes:
    return head_of(command, len(rest)) + rest


def publish(topic: str, payload: bytes, *, retained: bool = False) -> bytes:
    name = topic.encode()
    return packet(
        PUBLISH_QOS0 | (RETAINED if retained else 0), len(name).to_bytes(2, "big") + name + payload
    )


def pour(reader: PacketReader, stream: bytes, sizes: list[int]) -> None:
    """Feed a stream in pieces of at most `sizes`, in turn, as a socket would."""
    at = turn = 0
    while at < len(stream):
        count = 0
        for buffer in reader.buffers():
            piece = stream[at + count :][: max(1, sizes[turn % len(sizes)]) - count][: len(buffer)]
            buffer[: len(piece)] = piece
            count += len(piece)
        reader.feed(count)
        at, turn = at + count, turn + 1


PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 3 * HEAD_BYTES).map(lambda n: bytes(i % 251 for i in range(n))),
)
TOPICS = st.sampled_from(
    ["large/a", "large/b", "small", "s", "large" + "x" * 900, "y" * (HEAD_BYTES + 10)]
)
PACKETS = st.one_of(
    st.tuples(st.just("publish"), TOPICS, PAYLOADS),
    st.tuples(st.just("retained"), TOPICS, PAYLOADS),
    st.tuples(st.just("other"), st.sampled_from([0x20, 0x32, 0x40, 0x90, 0xD0]), PAYLOADS),
)


@given(st.lists(PACKETS, max_size=8), st.lists(st.integers(1, 5000), min_size=1, max_size=6))
def test_any_cut_of_the_stream_gives_the_same_packets(
    packets: list[tuple], sizes: list[int]
) -> None:
    delivered = Received()
    stream, landed, messages, taken = b"", [], [], []
    for kind, name, payload in packets:
        if kind == "other":
            stream += packet(name, payload)
            taken.append((name, payload))
        else:
            retained = kind == "retained"
            stream += publish(name, payload, retained=retained)
            if name.startswith("large") and payload and not retained:
                landed.append((name, payload))
            else:
                messages.append((name, payload, retained))
    pour(delivered.reader(), stream, sizes)
    assert delivered.landed == landed
    assert delivered.messages == messages
    assert delivered.taken == taken


@pytest.mark.parametrize("rest", [b"", b"\x00", b"\x00\x00payload", b"\x00\x09short"])
def test_a_message_without_a_topic_is_left_to_paho(rest: bytes) -> None:
    delivered = Received()
    pour(delivered.reader(), packet(PUBLISH_QOS0, rest), [5])
    assert delivered.messages == []
    assert delivered.taken == [(PUBLISH_QOS0, rest)]


@given(st.integers(1, 70_000), st.integers(1, 20_000))
def test_a_place_taken_away_is_not_written_and_the_stream_goes_on(size: int, piece: int) -> None:
    delivered = Received()
    reader = delivered.reader()
    stream = publish("large", b"\x01" * size)
    first = min(len(stream) - 1, piece)
    pour(reader, stream[:first], [piece])
    kept = None
    if delivered.spots and delivered.spots[0].view is not None:
        kept = delivered.spots[0].view
        before = bytes(kept)
        delivered.spots[0].view = None
    pour(reader, stream[first:] + packet(0xD0, b""), [piece])
    assert delivered.taken == [(0xD0, b"")]
    assert len(delivered.landed) == 1
    if kept is not None:
        assert bytes(kept) == before
        assert delivered.landed == [("large", None)]


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize(
    "topic",
    [
        "fs1/lab/r-1/cloud/inbox/device-0", "fs1/lab/r-1/device-0/state", "fs1/lab/ask/cloud/x",
        "fs1/lab/ask/all/x",
        "fs1/lab/answer/x/y", "fs1/lab/r-1/cloud/spec", f"fs1/lab/r-1/d/blob/all/{16 * '0'}/0/1",
        "anything",
        "fs1/lab/ask/cloud/" + "x" * 60_000,
    ],
)  # fmt: skip
def test_a_message_that_is_too_large_is_read_into_nothing(topic: str, retained: bool) -> None:
    delivered, dropped = Received(), []
    reader = PacketReader(
        find_place=skip_large,
        landed=lambda topic, place: dropped.append(topic),
        received=delivered._receive,
        take=delivered._take,
    )
    small = publish("fs1/lab/ask/all/x", b"small")
    tracemalloc.start()
    name = len(topic.encode()).to_bytes(2, "big") + topic.encode()
    pour(
        reader,
        head_of(PUBLISH_QOS0 | RETAINED * retained, len(name) + 100_000_000) + name,
        [100_000],
    )
    left = 100_000_000
    while left:
        count = min(left, sum(map(len, reader.buffers())) - HEAD_BYTES) or min(left, HEAD_BYTES)
        reader.feed(count)
        left -= count
    pour(reader, small, [100])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        peak < 500_000
        and delivered.messages == [("fs1/lab/ask/all/x", b"small", False)]
        and len(dropped) == 1
    )


@pytest.mark.parametrize("command", [0x20, 0x32, 0x40, 0x90, 0xD0])
def test_no_other_packet_is_large(command: int) -> None:
    reader = Received().reader()
    with pytest.raises(NotMqtt, match="20000000 bytes without a topic"):
        pour(reader, packet(command, bytes(20_000_000))[:100], [100])


@given(st.binary(max_size=300), st.lists(st.integers(1, 64), min_size=1, max_size=4))
def test_rubbish_is_packets_or_no_mqtt_and_never_hangs(stream: bytes, sizes: list[int]) -> None:
    delivered = Received()
    try:
        pour(delivered.reader(), stream, sizes)
    except NotMqtt:
        assert b"\xff" in stream or any(byte & 128 for byte in stream)
    assert sum(len(body) for _, body in delivered.taken) <= len(stream)


def drained(end: socket.socket) -> bytes:
    """Return the received bytes; on one machine these are all sent bytes."""
    received = b""
    with suppress(BlockingIOError):
        while True:
            received += end.recv(1 << 20, socket.MSG_DONTWAIT)
    return received


def test_what_this_release_of_paho_sends_and_receives_is_sent_and_received_fast() -> None:
    assert bulk.usable()
    payload, landed, messages, sent_all = bytes(range(256)) * 512, [], [], []
    stock, bulk_client = (mqtt.Client(CallbackAPIVersion.VERSION2) for _ in range(2))
    client = BulkClient.adopt(
        bulk_client,
        find_place=lambda topic, size: (
            Body(memoryview(bytearray(size))) if topic == "large" else None
        ),
        landed=lambda topic, place: landed.append((topic, bytes(place.view or b""))),
        received=lambda topic, payload, retained: messages.append((payload, retained)),
    )
    client.on_message = lambda client, userdata, message: messages.append(
        (bytes(message.payload), message.qos)
    )
    (stock._sock, stock_end), (client._sock, end) = socket.socketpair(), socket.socketpair()
    with stock._sock, stock_end, client._sock, end:
        stock.publish("large", payload)
        client.publish_body("large", Body(memoryview(payload)), done=lambda: sent_all.append(True))
        wanted = drained(stock_end)
        assert drained(end) == wanted and sent_all == [True]
        stock.publish("small", b"state", retain=True)
        stock.publish("small", b"control", qos=1)
        client._sock.setblocking(False)
        for piece in (wanted + drained(stock_end) + wanted[:1000], wanted[1000:]):
            end.sendall(piece)
            client.loop_read()
        assert landed == [("large", payload)] * 2 and messages == [
            (b"state", True),
            (b"control", 1),
        ]
        assert drained(end)[:1] == b"\x40"  # the acknowledgement
        stock._sock = client._sock = None


def test_the_stock_client_serves_where_it_is_asked_for_or_paho_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDSTRATA_MQTT", "stock")
    assert not bulk.usable.__wrapped__()
    monkeypatch.delenv("FEDSTRATA_MQTT")
    monkeypatch.setattr(bulk, "PAHO_VERSION", "9.9.9")
    assert not bulk.usable.__wrapped__()


@contextmanager
def narrow_client() -> Iterator[tuple[BulkClient, socket.socket]]:
    """Yield a client whose socket takes little at a time, and the other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = BulkClient.adopt(
            mqtt.Client(CallbackAPIVersion.VERSION2),
            find_place=lambda topic, size: None,
            landed=lambda *_: None,
            received=lambda *_: None,
        )
        client._sock = ours
        yield client, theirs
        client._sock = None


def test_a_detached_body_leaves_as_it_was() -> None:
    with narrow_client() as (client, theirs):
        memory = bytearray(b"\x07" * 300_000)
        body, left = Body(memoryview(memory)), []
        client.publish_body("t", body, done=lambda: left.append(True))
        assert not left
        body.detach()
        memory[:] = bytes(len(memory))
        received = b""
        while len(received) < len(memory) + 7:
            received += theirs.recv(1 << 16)
            client.loop_write()
    assert left == [True]
    assert received == publish("t", b"\x07" * 300_000)


def test_a_body_that_leaves_is_no_acknowledgement_of_the_message_before_it() -> None:
    with narrow_client() as (client, theirs):
        sent = list[int]()
        client.on_publish = lambda _client, _data, number, *_: sent.append(number)
        left = list[bool]()
        client.publish_body("t", Body(memoryview(bytes(300_000))), done=lambda: None)
        waiting = client.publish("t", b"", qos=1)  # behind it, and so by paho's own code
        client.publish_body("t", Body(memoryview(b"")), done=lambda: left.append(True))
        while not left:
            theirs.recv(1 << 20)
            client.loop_write()
    assert waiting.mid not in sent and not waiting.is_published()


def test_what_is_said_after_a_subscription_does_not_overtake_it() -> None:
    """An ask brings chunks: whoever reports it must be subscribed by then, or the first of them is
    lost.
    """

    async def run() -> list[bytes]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            link = BrokerConnection(
                BrokerAddress("nowhere"),
                Handlers(lambda *_: None, nothing),
                client_id="c",
                keepalive_s=30,
            )
            client = link._new_client()
            client._client._sock = ours
            link._client = client
            link.publish("free", b"", qos=0)
            link.subscribe(["lane"], qos=0)
            link.publish("ask", b"", qos=0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            client._client.loop_write()
            client._client._sock = None
            link._drop()
            await asyncio.sleep(0)
            sent = theirs.recv(10_000)
        return sorted((b"free", b"lane", b"ask"), key=sent.index)

    assert asyncio.run(run()) == [b"free", b"lane", b"ask"]


@pytest.mark.parametrize("stock", [False, True])
def test_an_error_while_a_message_is_handled_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stock: bool
) -> None:
    async def run() -> None:
        def received(topic: str, body: bytes, retained: bool) -> None:
            raise ZeroDivisionError(topic)

        async def connected() -> None:
            connection.subscribe(["t"], qos=0)
            connection.publish("t", b"x", qos=0)

        connection = BrokerConnection(
            BrokerAddress(served.host, served.port),
            Handlers(received, connected),
            client_id="c",
            keepalive_s=30,
        )
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(connection.run(connect_timeout_s=PATIENCE_S), 2 * PATIENCE_S)

    if stock:
        monkeypatch.setattr("fedstrata.common.net.client.usable", lambda: False)
    with broker.start(directory=tmp_path) as served:
        asyncio.run(run())
