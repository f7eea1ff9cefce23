"""A plain client of MQTT 3.1.1 for examinations of a broker, and the limit of packets that a broker
reports.

MQTT 5 reports in its CONNACK the largest packet. The agents use MQTT 3.1.1, which every broker
supports, so an extra connection asks once, before the first model is sent: a broker disconnects a
publisher that exceeds a limit, each time and without a reason. The bytes of these connections are
in no account.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.tls import reason_of

PATIENCE_S: Final = 3.0  # for one reply
CONNECT_S: Final = 10.0
KEEPALIVE_S: Final = 10
TURN_S: Final = 0.02
REFUSED: Final = 0x80
# of a CONNACK; paho passes that one on as an error of the protocol alone
OTHER_VERSION: Final = 0x84
LIMIT_ANSWER_S: Final = 2.0


class ConnectRefused(ConnectionFailed):
    """The broker has refused a CONNECT: by a CONNACK with `code`, None: it closed the
    connection.
    """

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Will:
    """The topic of a client's will, and how it is published."""

    topic: str
    qos: int = 1
    retain: bool = True


class PlainClient:
    """A connected client that keeps the messages it receives; by default with a random id.

    Raises ConnectionFailed, ConnectRefused if the broker can be reached.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        will: Will | None = None,
        client_id: str = "",
        keepalive_s: int = KEEPALIVE_S,
    ) -> None:
        self.messages: list[tuple[str, int, bool]] = []
        self._replies: list[Any] = []
        self._granted: dict[int, Sequence[Any]] = {}
        self._ended = mqtt.MQTT_ERR_SUCCESS
        self._mqtt = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id or _new_id(),
            protocol=mqtt.MQTTv311,
            reconnect_on_failure=False,
        )
        address.identify(self._mqtt)
        self._mqtt.connect_timeout = CONNECT_S
        if will is not None:
            self._mqtt.will_set(will.topic, b"lost", qos=will.qos, retain=will.retain)
        self._mqtt.on_connect = lambda _client, _data, _flags, reason, _properties: (
            self._replies.append(reason)
        )
        self._mqtt.on_message = lambda _client, _data, message: self.messages.append(
            (message.topic, len(message.payload), message.retain)
        )
        self._mqtt.on_subscribe = lambda _client, _data, number, codes, _: self._granted.update(
            {number: codes}
        )
        try:
            self._mqtt.connect(address.host, address.port, keepalive=keepalive_s)
        except (ConnectionResetError, BrokenPipeError):
            hang_up(self._mqtt)
            raise ConnectRefused(f"broker {address}: closed before CONNACK", None) from None
        except OSError as error:
            hang_up(self._mqtt)
            raise ConnectionFailed(
                f"broker {address}: {reason_of(error)}. Is it running there?"
            ) from None
        if not pump((self,), lambda: bool(self._replies), CONNECT_S):
            ended = not self.turn()
            hang_up(self._mqtt)
            if ended:
                code = OTHER_VERSION if self._ended is mqtt.MQTT_ERR_PROTOCOL else None
                raise ConnectRefused(f"broker {address}: closed before CONNACK", code)
            raise ConnectionFailed(
                f"broker {address}: no CONNACK within {CONNECT_S:g} s. Is it an MQTT broker?"
            )
        if self._replies[0].is_failure:
            hang_up(self._mqtt)
            problem = f"{self._replies[0]}. Are the login and --broker right?"
            raise ConnectRefused(f"broker {address}: {problem}", self._replies[0].value)

    def turn(self) -> bool:
        """Read and write what is ready; return whether the connection is alive."""
        code = self._mqtt.loop(TURN_S)
        if self._ended is mqtt.MQTT_ERR_SUCCESS:
            self._ended = code
        return code == mqtt.MQTT_ERR_SUCCESS

    def topics(self, *, retained: bool = False) -> set[str]:
        """Return the topics of the messages received so far; with `retained`, of those from the
        broker's store.
        """
        return {topic for topic, _, stored in self.messages if stored or not retained}

    def publish(self, topic: str, body: bytes, *, retain: bool = False) -> None:
        """Publish at QoS 0; at QoS 1 what the broker is to retain."""
        self._mqtt.publish(topic, body, qos=int(retain), retain=retain)

    def subscribe(self, filters: Sequence[str]) -> bool:
        """Subscribe at QoS 0, and return whether all filters are granted."""
        return bool(self.granted(filters))

    def granted(self, filters: Sequence[str]) -> bool | None:
        """Subscribe at QoS 0; return whether all filters are granted, None without an answer of a
        living broker.
        """
        _, number = self._mqtt.subscribe([(each, 0) for each in filters])
        if number is None:
            return False
        if not pump((self,), lambda: number in self._granted):
            if self.turn():
                return None
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


def _new_id() -> str:
    """Return a client id of 23 letters and digits, which every broker takes."""
    return f"fedstrata{secrets.token_hex(7)}"


def hang_up(client: mqtt.Client) -> None:
    """Close the sockets of a client: that of the connection, and the pair that wakes its loop.

    paho closes them with the last reference to a client, which the frames of a traceback may keep.
    """
    client.on_connect = client.on_message = client.on_subscribe = None
    client._reset_sockets()


def pump(
    clients: Sequence[PlainClient], done: Callable[[], bool], patience_s: float = PATIENCE_S
) -> bool:
    """Let clients read and write until it is done; return whether it was, before the time or a
    connection ended.
    """
    deadline = time.monotonic() + patience_s
    while not done():
        alive = [client.turn() for client in clients]
        if time.monotonic() > deadline or not all(alive):
            return done()
    return True


async def reported_limit(address: BrokerAddress) -> int | None:
    """Return the most bytes of a packet that a broker reports by MQTT 5; None if it reports
    none.
    """
    return await asyncio.to_thread(_ask, address)


def _ask(address: BrokerAddress) -> int | None:
    answers: list[Any] = []
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=_new_id(), protocol=mqtt.MQTTv5)
    client.connect_timeout = LIMIT_ANSWER_S
    client.on_connect = lambda _client, _data, _flags, _reason, properties: answers.append(
        properties
    )
    deadline = time.monotonic() + LIMIT_ANSWER_S
    try:
        address.identify(client)
        client.connect(address.host, address.port, keepalive=10)
        while (
            not answers
            and client.loop(max(0.0, deadline - time.monotonic())) == mqtt.MQTT_ERR_SUCCESS
        ):
            if time.monotonic() >= deadline:
                break
        client.disconnect()
        client.loop(0.0)
    except Exception:  # noqa: BLE001 - whatever a broker sends: without a limit that can be read there is none
        return None
    finally:
        hang_up(client)
    limit: int | None = getattr(answers[0], "MaximumPacketSize", None) if answers else None
    return limit or None
