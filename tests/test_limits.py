"""The broker's largest packet, read from the CONNACK of MQTT 5, and what else may come in its
place.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.net import packet_limit, plain_client
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.packet_limit import LEAST_BYTES, UNKNOWN, UNLIMITED, PacketLimit
from fedstrata.deploy.brokers import broker
from tests.helpers.examples import examples

PACKET_MOST = 2**28 - 1  # of MQTT; a larger limit is none
ASSIGNED_ID = b"\x12\x00\x03abc"
TOPIC_ALIASES = b"\x22\x00\x0a"
USER = b"\x26\x00\x01k\x00\x02vv"


def connack(*properties: bytes) -> bytes:
    body = b"".join(properties)
    return bytes([0x20, 3 + len(body), 0, 0, len(body)]) + body


@contextmanager
def answering(data: bytes) -> Iterator[int]:
    """Run a server that reads a CONNECT, sends these bytes and closes; yield its port."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(data)
            with suppress(OSError):  # the client may have reset the connection
                connection.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def asked(data: bytes) -> int | None:
    with answering(data) as port:
        return asyncio.run(plain_client.reported_limit(BrokerAddress("127.0.0.1", port)))


@settings(max_examples=20)
@given(
    st.integers(1, PACKET_MOST),
    st.permutations([ASSIGNED_ID, TOPIC_ALIASES, USER]),
    st.integers(0, 3),
)
def test_the_limit_is_found_among_other_properties(
    limit: int, others: list[bytes], place: int
) -> None:
    properties = [*others[:place], b"\x27" + limit.to_bytes(4, "big"), *others[place:]]
    assert asked(connack(*properties)) == limit


@pytest.mark.parametrize(
    "data",
    [
        connack(ASSIGNED_ID, TOPIC_ALIASES),
        connack(b"\x27\x10\x00\x00\x00"),
        b"\x20\x03\x00\x84\x00",
        b"\x20\x02\x00\x01",
        b"",
    ],
)
def test_no_limit_a_refusal_mqtt_3_and_a_closed_connection_have_none(data: bytes) -> None:
    assert asked(data) is None


@examples(50)
@given(st.binary(max_size=60))
def test_any_bytes_give_a_limit_or_none(data: bytes) -> None:
    limit = asked(b"\x20" + data)
    assert limit is None or 0 < limit <= PACKET_MOST


@pytest.mark.parametrize("most", [1_001_024, 100_000])
def test_a_limit_that_is_not_reported_is_found_by_trying(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    monkeypatch.setattr(broker, "_MOSQUITTO", {})
    halves = PacketLimit(250_256, 500_512) if most > 300_000 else UNLIMITED
    below = PacketLimit(LEAST_BYTES, 62_564) if most > 300_000 else PacketLimit(LEAST_BYTES, 50_000)
    nothing = PacketLimit(LEAST_BYTES - 1, LEAST_BYTES)  # the caller names it
    for limit, found in ((300_000, halves), (40_000, below), (20_000, nothing)):
        with broker.start(
            directory=tmp_path, kind="mosquitto", settings={"message_size_limit": limit}
        ) as served:
            where = BrokerAddress(served.host, served.port)
            got = asyncio.run(packet_limit.packet_limit(where, topic="fs1/lab/t", most=most))
        assert got == found
        if limit == 300_000:
            assert bool(caplog.messages) is (got is not UNLIMITED)


def test_a_size_that_the_link_would_not_carry_in_time_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def carried(_: BrokerAddress, __: str, size: int, patience_s: float) -> packet_limit._Trial:
        sizes.append(size)
        return packet_limit._Trial(True, size / 100_000)  # 100 kB/s

    monkeypatch.setattr(packet_limit, "_try", carried)
    where = BrokerAddress("broker")
    assert packet_limit.largest_packet(where, "t", 1_001_024) == PacketLimit(250_256)
    assert packet_limit.largest_packet(where, "t", 1_001_024, patience=4.0) == UNLIMITED
    assert sizes == [LEAST_BYTES, 250_256, LEAST_BYTES, 1_001_024]


def test_what_is_not_answered_is_tried_again_and_then_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine under load answers late; that is not the answer of a broker without a limit."""
    trials: list[float] = []
    found = [UNKNOWN, ConnectionFailed("away"), PacketLimit(40_000, 80_000)]

    def largest(*_: object, patience: float) -> PacketLimit:
        trials.append(patience)
        result = found[len(trials) - 1]
        if isinstance(result, Exception):
            raise result
        return result

    async def nothing(_: BrokerAddress) -> None:
        return None

    monkeypatch.setattr(packet_limit, "reported_limit", nothing)
    monkeypatch.setattr(packet_limit, "largest_packet", largest)
    where = BrokerAddress("slow-broker")
    assert asyncio.run(packet_limit.packet_limit(where, topic="t", most=1_000_000)) == PacketLimit(
        40_000, 80_000
    )
    assert trials == [1.0, 2.0, 4.0]
    trials.clear()
    found[2] = UNKNOWN
    assert asyncio.run(packet_limit.packet_limit(where, topic="t", most=1_000_000)) == UNKNOWN
    assert "3 trials of its largest packet stayed unanswered" in caplog.messages[-1]
    assert UNKNOWN.passes == LEAST_BYTES and UNKNOWN.dropped > 1 << 60, (
        "nothing is refused for its size"
    )


def test_a_broker_that_answers_nothing_or_is_away_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_client, "LIMIT_ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = BrokerAddress("127.0.0.1", server.getsockname()[1])
        assert asyncio.run(plain_client.reported_limit(where)) is None
    assert asyncio.run(plain_client.reported_limit(where)) is None
    assert asyncio.run(packet_limit.packet_limit(where, topic="t", most=1_000_000)) == UNKNOWN


class LossyClient:
    """A client of a broker that drops packets larger than `most`, and some of the first ones
    whatever their size.
    """

    def __init__(self, most: int, lost: set[int]) -> None:
        self.messages: list[tuple[str, int, bool]] = []
        self._most, self._lost, self._count = most, lost, 0

    def subscribe(self, filters: list[str]) -> bool:
        return True

    def publish(self, topic: str, body: bytes) -> None:
        if self._count not in self._lost and len(body) <= self._most:
            self.messages.append((topic, len(body), False))
        self._count += 1

    def turn(self) -> bool:
        return True


@examples(100)
@given(
    st.integers(0, 20),
    st.none() | st.integers(0, 6),
    st.sampled_from([40_000, 300_000, 10_000_000]),
)
def test_a_broker_that_loses_a_few_first_packets_has_no_smaller_limit(
    late: int, other: int | None, most: int
) -> None:
    """A cluster loses what comes right after a subscription that it has confirmed; a link may lose
    one more packet.
    """
    lost = {*range(late), *(() if other is None else (late + other,))}
    patience = iter(float(i) for i in range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            packet_limit, "connected", lambda address: nullcontext(LossyClient(most, lost))
        )
        patch.setattr(packet_limit, "pump", lambda clients, done, patience_s: done())
        patch.setattr(packet_limit.time, "monotonic", lambda: next(patience) / 1000)
        found = packet_limit.largest_packet(BrokerAddress("broker"), "fs1/lab/t", 1_001_024)
    true = {
        10_000_000: UNLIMITED,
        300_000: PacketLimit(250_256, 500_512),
        40_000: PacketLimit(LEAST_BYTES, 62_564),
    }
    sure = found.passes <= true[most].passes and found.dropped >= true[most].dropped
    assert sure, "a lost packet may leave less known, never more"
    assert lost or found == true[most]
