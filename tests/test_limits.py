"""The broker's largest packet, read from an MQTT 5 CONNACK."""

from __future__ import annotations

import asyncio
import socket

from hypothesis import given
from hypothesis import strategies as st

from common.net.address import BrokerAddress
from common.net.limits import limit_of, packet_limit

REASON = b"\x12\x00\x03abc"  # the client id that the broker assigned
TOPIC_ALIASES = b"\x22\x00\x0a"
USER = b"\x26\x00\x01k\x00\x02vv"


def connack(*properties: bytes) -> bytes:
    body = b"".join(properties)
    return bytes([0, 0, len(body)]) + body


@given(st.integers(1, 2**32 - 1), st.permutations([REASON, TOPIC_ALIASES, USER]), st.integers(0, 3))
def test_the_limit_is_found_among_other_properties(limit: int, others: list[bytes], place: int) -> None:
    properties = [*others[:place], b"\x27" + limit.to_bytes(4, "big"), *others[place:]]
    assert limit_of(connack(*properties)) == limit


def test_no_limit_a_refusal_and_mqtt_3_have_none() -> None:
    assert limit_of(connack(REASON, TOPIC_ALIASES)) is None
    assert limit_of(b"\x00\x84\x00") is None
    assert limit_of(b"\x00\x01") is None


@given(st.binary(max_size=60))
def test_any_bytes_give_a_limit_or_none(rubbish: bytes) -> None:
    limit = limit_of(rubbish)
    assert limit is None or 0 < limit < 2**32


def test_nobody_there_is_no_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert asyncio.run(packet_limit(BrokerAddress("127.0.0.1", port))) is None
