"""The broker's largest packet, read from the CONNACK of MQTT 5, and what else may come in its place."""

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

from common.net import plain_client
from common.net.address import BrokerAddress
from deploy.brokers import broker
from tests.helpers.examples import examples

NONE = plain_client.BrokerLimits()
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
        return asyncio.run(plain_client.reported_limits(BrokerAddress("127.0.0.1", port))).packet_bytes


@settings(max_examples=20)
@given(st.integers(1, PACKET_MOST), st.permutations([ASSIGNED_ID, TOPIC_ALIASES, USER]), st.integers(0, 3))
def test_the_limit_is_found_among_other_properties(limit: int, others: list[bytes], place: int) -> None:
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
    for limit, found in ((300_000, 250_256 if most > 300_000 else None), (40_000, None), (20_000, None)):
        with broker.start(directory=tmp_path, kind="mosquitto", settings={"message_size_limit": limit}) as served:
            where = BrokerAddress(served.host, served.port)
            got = asyncio.run(plain_client.packet_limit(where, topic="fs1/lab/t", most=most))
        if limit == 300_000:
            assert got == found and bool(caplog.messages) is (got is not None)
        elif limit == 40_000:
            assert got is not None and plain_client.LEAST_BYTES <= got <= limit
        else:
            assert got == plain_client.LEAST_BYTES - 1, "the caller names it"


def test_a_link_that_is_too_slow_for_large_packets_is_not_tried_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    monkeypatch.setattr(broker, "_MOSQUITTO", {})
    sizes: list[int] = []
    passes = plain_client._passes
    monkeypatch.setattr(plain_client, "_passes", lambda *given: sizes.append(given[2]) or passes(*given))
    with broker.start(directory=tmp_path, kind="mosquitto", settings={"message_size_limit": 300_000}) as served:
        where = BrokerAddress(served.host, served.port)
        assert plain_client.largest_packet(where, "fs1/lab/t", 1 << 50) is None
    assert sizes == [plain_client.LEAST_BYTES]


def test_a_broker_that_answers_nothing_or_is_away_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_client, "ASK_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = BrokerAddress("127.0.0.1", server.getsockname()[1])
        assert asyncio.run(plain_client.reported_limits(where)) == NONE
    assert asyncio.run(plain_client.reported_limits(where)) == NONE
    assert asyncio.run(plain_client.packet_limit(where, topic="t", most=1_000_000)) is None


class LossyClient:
    """A client of a broker that drops packets larger than `most`, and some of the first ones whatever their size."""

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
@given(st.integers(0, 20), st.none() | st.integers(0, 6), st.sampled_from([40_000, 300_000, 10_000_000]))
def test_a_broker_that_loses_a_few_first_packets_has_no_smaller_limit(late: int, other: int | None, most: int) -> None:
    """A cluster loses what comes right after a subscription that it has confirmed; a link may lose one more packet."""
    lost = {*range(late), *(() if other is None else (late + other,))}
    patience = iter(float(i) for i in range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_client, "connected", lambda address: nullcontext(LossyClient(most, lost)))
        patch.setattr(plain_client, "pump", lambda clients, done, patience_s: done())
        patch.setattr(plain_client.time, "monotonic", lambda: next(patience) / 1000)
        found = plain_client.largest_packet(BrokerAddress("broker"), "fs1/lab/t", 1_001_024)
    assert found is None or found in (1_001_024, 1_001_024 // 4, plain_client.LEAST_BYTES)
    assert found is None or (found == plain_client.LEAST_BYTES) == (most == 40_000)
    assert lost or found is not None
