"""What a broker limits, and a plain client of MQTT 3.1.1 that keeps what it receives, for examinations of a broker.

MQTT 5 reports in its CONNACK the largest packet, and whether messages are retained. The agents use MQTT 3.1.1, which
every broker supports, so an extra connection asks once, before the first model is sent: a broker disconnects a
publisher that exceeds a limit, each time and without a reason. Some report no limit of packets and drop what is larger
without a word (mosquitto by `message_size_limit`): then a packet to ourselves shows whether it passes. The bytes of
these connections are in no account.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from common.errors import ConnectionFailed, InvalidExperiment
from common.net.address import BrokerAddress
from common.net.tls import reason_of

PATIENCE_S: Final = 3.0  # for one reply
CONNECT_S: Final = 10.0
KEEPALIVE_S: Final = 10
TURN_S: Final = 0.02
REFUSED: Final = 0x80
ASK_S: Final = 2.0
TRY_S: Final = 4.0  # for a large packet to come back; on a link that is slower the limit stays unknown
TRIES: Final = 2  # of a packet that does not come back
BEGIN_S: Final = 0.2  # between packets until one comes back
LEAST_BYTES: Final = 33_792  # a packet with the smallest chunk

log = logging.getLogger("fedstrata.connection")


class PlainClient:
    """A connected client that keeps the messages it receives."""

    def __init__(self, address: BrokerAddress, *, will: str | None = None, retain: bool = True) -> None:
        self.messages: list[tuple[str, int, bool]] = []
        self._replies: list[Any] = []
        self._granted: dict[int, Sequence[Any]] = {}
        self._mqtt = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"fedstrata-doctor-{secrets.token_hex(6)}",
            protocol=mqtt.MQTTv311,
            reconnect_on_failure=False,
        )
        address.identify(self._mqtt)
        self._mqtt.connect_timeout = CONNECT_S
        if will is not None:
            self._mqtt.will_set(will, b"lost", qos=1, retain=retain)
        self._mqtt.on_connect = lambda _client, _data, _flags, reason, _properties: self._replies.append(reason)
        self._mqtt.on_message = lambda _client, _data, message: self.messages.append(
            (message.topic, len(message.payload), message.retain)
        )
        self._mqtt.on_subscribe = lambda _client, _data, number, codes, _: self._granted.update({number: codes})
        try:
            self._mqtt.connect(address.host, address.port, keepalive=KEEPALIVE_S)
        except OSError as error:
            raise ConnectionFailed(f"broker {address}: {reason_of(error)}. Is it running there?") from None
        if not pump((self,), lambda: bool(self._replies), CONNECT_S):
            ended = not self.turn()
            hang_up(self._mqtt)
            problem = "closed before CONNACK" if ended else f"no CONNACK within {CONNECT_S:g} s"
            raise ConnectionFailed(f"broker {address}: {problem}. Are the login and its files right?")
        if self._replies[0].is_failure:
            hang_up(self._mqtt)
            raise ConnectionFailed(f"broker {address}: {self._replies[0]}. Are the login and --broker right?")

    def turn(self) -> bool:
        """Read and write what is ready; return whether the connection is alive."""
        return self._mqtt.loop(TURN_S) == mqtt.MQTT_ERR_SUCCESS

    def topics(self, *, retained: bool = False) -> set[str]:
        """Return the topics of the messages received so far; with `retained`, of those from the broker's store."""
        return {topic for topic, _, stored in self.messages if stored or not retained}

    def publish(self, topic: str, body: bytes, *, retain: bool = False) -> None:
        """Publish at QoS 0; at QoS 1 what the broker is to retain."""
        self._mqtt.publish(topic, body, qos=int(retain), retain=retain)

    def subscribe(self, filters: Sequence[str]) -> bool:
        """Subscribe at QoS 0, and return whether all filters are granted."""
        _, number = self._mqtt.subscribe([(each, 0) for each in filters])
        if number is None or not pump((self,), lambda: number in self._granted):
            return False
        return all(code.value < REFUSED for code in self._granted[number])

    def die(self) -> None:
        """Lose the connection as a machine without power does, without DISCONNECT."""
        if isinstance(sock := self._mqtt.socket(), socket.socket):
            sock.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Disconnect."""
        self._mqtt.disconnect()
        self._mqtt.loop(TURN_S)
        hang_up(self._mqtt)


@contextmanager
def connected(address: BrokerAddress) -> Iterator[PlainClient]:
    client = PlainClient(address)
    try:
        yield client
    finally:
        client.leave()


def hang_up(client: mqtt.Client) -> None:
    """Close the socket of a client, which paho does only when the broker has closed it.

    Its other sockets are closed with the last reference to it, so its callbacks must hold none.
    """
    client.on_connect = client.on_message = client.on_subscribe = None
    if isinstance(sock := client.socket(), socket.socket):
        sock.close()


def pump(clients: Sequence[PlainClient], done: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Let clients read and write until it is done; return whether it was, before the time or a connection ended."""
    deadline = time.monotonic() + patience_s
    while not done():
        alive = [client.turn() for client in clients]
        if time.monotonic() > deadline or not all(alive):
            return done()
    return True


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
