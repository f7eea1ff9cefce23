"""A plain client of MQTT 3.1.1 that keeps what it receives, for examinations of a broker."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from common.errors import ConnectionFailed
from common.net.address import BrokerAddress
from common.net.tls import reason_of

PATIENCE_S: Final = 3.0  # for one reply
CONNECT_S: Final = 10.0
KEEPALIVE_S: Final = 10
TURN_S: Final = 0.02
REFUSED: Final = 0x80


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
