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
from common.net.plain_client import connected, hang_up, pump

ASK_S: Final = 2.0
TRY_S: Final = 4.0  # for a large packet to come back; on a link that is slower the limit stays unknown
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
    """Return whether a packet passes, while a small one sent after it does; None if that cannot be found out."""
    with connected(address) as client:
        if not client.subscribe([topic]):
            return None
        client.publish(topic, bytes(size - len(topic) - 7))
        client.publish(topic, b"")
        dropped = pump((client,), lambda: any(length == 0 for _, length, _ in client.messages), patience_s)
        if any(length for _, length, _ in client.messages):
            return True
        ended = size > LEAST_BYTES and not client.turn()  # some disconnect who sends it
        return False if dropped or ended else None


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
