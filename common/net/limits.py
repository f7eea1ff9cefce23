"""What a broker limits: packets, and whether it retains messages.

MQTT 5 reports both in its CONNACK. The agents use MQTT 3.1.1, which every broker supports, so an extra connection asks
once, before the first model is sent: a broker disconnects a publisher that exceeds a limit, each time and without a
reason. Some report no limit of packets and drop what is larger without a word (mosquitto by `message_size_limit`): then
a packet to ourselves shows whether it passes. The bytes of these connections are in no account.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from common.errors import ConnectionFailed, InvalidExperiment
from common.net.address import BrokerAddress
from common.net.plain_client import PlainClient, connected, hang_up, pump

ASK_S: Final = 2.0
TRY_S: Final = 4.0  # for a large packet to come back; on a link that is slower the limit stays unknown
TRIES: Final = 2  # of a packet that does not come back
BEGIN_S: Final = 0.2  # between packets until one comes back
LEAST_BYTES: Final = 33_792  # a packet with the smallest chunk

log = logging.getLogger("fedstrata.connection")


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """What a broker reports: the most bytes of a packet, None without a limit; whether it retains messages."""

    packet_bytes: int | None = None
    retains: bool = True


async def reported_limits(address: BrokerAddress) -> BrokerLimits:
    """Return what a broker reports by MQTT 5; no limits if it reports none."""
    return await asyncio.to_thread(_ask, address)


async def packet_limit(address: BrokerAddress, *, topic: str, most: int) -> int | None:
    """Return the most bytes of a packet that a broker accepts, as reported or, up to `most`, as tried on a topic.

    None: there is no limit, or it cannot be found.
    """
    reported = (await reported_limits(address)).packet_bytes
    if reported is not None:
        return reported
    try:
        found = await asyncio.to_thread(largest_packet, address, topic, most)
    except (ConnectionFailed, InvalidExperiment, OSError, ValueError):
        return None
    if found is None or found >= most:
        return None
    _warn(str(address), most)
    return found


@cache  # once a process, which may have many devices
def _warn(broker: str, size: int) -> None:
    log.warning(
        "broker %s drops packets of %d bytes and does not report it: models are sent in smaller ones. Raise its limit "
        "(mosquitto: message_size_limit).",
        broker, size,
    )  # fmt: skip


def largest_packet(address: BrokerAddress, topic: str, most: int) -> int | None:
    """Return the size of the largest packet that passes, of `most` and its halves; None if that cannot be found out.

    A size below LEAST_BYTES: those are too large, too. Raises ConnectionFailed.
    """
    began = time.monotonic()
    passes = _passes(address, topic, LEAST_BYTES, ASK_S)
    if not passes or (time.monotonic() - began) * most / LEAST_BYTES > TRY_S:
        return LEAST_BYTES - 1 if passes is False else None
    size = most
    while size > LEAST_BYTES:
        passes = _passes(address, topic, size, TRY_S)
        if passes is not False:
            return size if passes else None
        size //= 2
    return LEAST_BYTES


def _passes(address: BrokerAddress, topic: str, size: int, patience_s: float) -> bool | None:
    """Return whether a packet passes, while small ones before and after it do; None if that cannot be found out.

    A cluster of brokers may lose what comes right after a subscription that it has confirmed, and any broker may lose
    one message: a packet is dropped when it is twice.
    """
    with connected(address) as client:
        if not client.subscribe([topic]) or not _begins(client, topic, patience_s):
            return None
        for _ in range(TRIES):
            client.messages.clear()
            client.publish(topic, bytes(size - len(topic) - 7))
            client.publish(topic, b"")
            dropped = pump((client,), lambda: 0 in _lengths(client), patience_s)
            if max(_lengths(client), default=0) > 1:
                return True
            if not dropped:
                ended = size > LEAST_BYTES and not client.turn()  # some disconnect who sends it
                return False if ended else None
        return False


def _begins(client: PlainClient, topic: str, patience_s: float) -> bool:
    """Return whether small packets come back on a topic, and wait until one does."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        client.publish(topic, b"?")
        if pump((client,), lambda: bool(client.messages), BEGIN_S):
            return True
    return False


def _lengths(client: PlainClient) -> list[int]:
    return [length for _, length, _ in client.messages]


def _ask(address: BrokerAddress) -> BrokerLimits:
    answers: list[Any] = []
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2, client_id=f"fedstrata-asks-{secrets.token_hex(4)}", protocol=mqtt.MQTTv5
    )
    client.connect_timeout = ASK_S
    client.on_connect = lambda _client, _data, _flags, _reason, properties: answers.append(properties)
    deadline = time.monotonic() + ASK_S
    try:
        address.identify(client)
        client.connect(address.host, address.port, keepalive=10)
        while not answers and client.loop(max(0.0, deadline - time.monotonic())) == mqtt.MQTT_ERR_SUCCESS:
            if time.monotonic() >= deadline:
                break
        client.disconnect()
        client.loop(0.0)
    except Exception:  # noqa: BLE001 - whatever a broker sends: without a limit that can be read there is none
        return BrokerLimits()
    finally:
        hang_up(client)
    found = answers[0] if answers else None
    return BrokerLimits(
        getattr(found, "MaximumPacketSize", None) or None, retains=getattr(found, "RetainAvailable", 1) != 0
    )
