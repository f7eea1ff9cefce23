"""What fedstrata needs of an MQTT broker, examined on a broker that runs: `fedstrata doctor`.

Plain clients of MQTT 3.1.1 on the lab's own topics, in a run of the examination's own, so that a broker's access rules
apply to them as to nodes. What is retained is cleared again.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from common.errors import ConnectionFailed
from common.experiment.schema import TransferSettings
from common.net.address import BrokerAddress
from common.net.tls import SOON_S, reason_of
from common.protocol import topics
from common.runtime.broker_statistics import HEAP

PATIENCE_S: Final = 3.0  # for one reply
CONNECT_S: Final = 10.0
KEEPALIVE_S: Final = 10
TURN_S: Final = 0.02
HEADERS: Final = 1000  # more than those of any chunk's packet
LEAST_PACKET: Final = 33_792  # a chunk of 32 kB
TOPIC_MOST: Final = 290
SLOW_MESSAGES: Final = 32
PAUSE_S: Final = 2.0
REFUSED: Final = 0x80


@dataclass(frozen=True, slots=True)
class Finding:
    """One item of the contract: whether it is needed, whether the broker has it, and what follows."""

    item: str
    needed: bool
    there: bool
    note: str


def examine(address: BrokerAddress, *, lab: str, name: str) -> Iterator[Finding]:
    """Yield the items of the contract at the first of a broker's addresses, as they are found, within some 20 seconds.

    Only topics of `name` are used, so that a broker's access rules for that login allow them. Raises ConnectionFailed
    if the broker cannot be reached or refuses the login.
    """

    def inbox(number: int) -> str:
        return topics.inbox(lab, f"{run}-{number}", name, name)

    run = f"doctor-{secrets.token_hex(4)}"
    with _client(address) as first, _client(address) as second:
        if (ends_at := address.tls.ends_at() if address.tls else None) is not None:
            days = (ends_at - time.time()) / 86_400
            note = f"it ends in {days:.0f} days: provision again and install the kits"
            yield Finding("our certificate is valid for 30 days", False, days > SOON_S / 86_400, note)
        both = (first, second)
        granted = second.subscribe([inbox(0)])
        yield Finding(
            "subscriptions are granted", True, granted, "" if granted else f"this login may not read {inbox(0)}"
        )
        first.publish(inbox(0), b"hello")
        arrived = _pump(both, lambda: inbox(0) in second.topics())
        yield Finding("messages are delivered", True, arrived, "" if arrived else f"nothing arrives on {inbox(0)}")
        yield _packets(address, inbox(1))
        below = f"{topics.ROOT}/{lab}/{run}/{name}/blob"
        long = f"{below}/{'x' * (TOPIC_MOST - len(below) - 1)}"
        yield Finding(
            f"topics of {TOPIC_MOST} characters", False, _passes(both, long, long),
            "keep the names of labs and nodes short",
        )  # fmt: skip
        yield Finding(
            "names with a dot below a wildcard", False, _passes(both, f"{below}/node.1", f"{below}/+"),
            "give labs and nodes names without dots",
        )  # fmt: skip
        yield from _retained(address, both, topics.state(lab, run, name))
        yield _will(address, second, topics.state(lab, f"{run}-2", name))
        statistics = second.subscribe([HEAP])
        statistics = statistics and _pump(both, lambda: HEAP in second.topics())
        yield Finding("statistics below $SYS", False, statistics, "metrics lack the broker's memory and drops")
    yield _slow_reader(address, inbox(3))


class _Client:
    """A connected client that keeps the messages it receives."""

    def __init__(self, address: BrokerAddress, *, will: str | None = None) -> None:
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
            self._mqtt.will_set(will, b"lost", qos=1, retain=True)
        self._mqtt.on_connect = lambda _client, _data, _flags, reason, _properties: self._replies.append(reason)
        self._mqtt.on_message = lambda _client, _data, message: self.messages.append(
            (message.topic, len(message.payload), message.retain)
        )
        self._mqtt.on_subscribe = lambda _client, _data, number, codes, _: self._granted.update({number: codes})
        try:
            self._mqtt.connect(address.host, address.port, keepalive=KEEPALIVE_S)
        except OSError as error:
            raise ConnectionFailed(f"broker {address}: {reason_of(error)}. Is it running there?") from None
        if not _pump((self,), lambda: bool(self._replies), CONNECT_S):
            raise ConnectionFailed(f"broker {address}: no CONNACK within {CONNECT_S:g} s")
        if self._replies[0].is_failure:
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
        if number is None or not _pump((self,), lambda: number in self._granted):
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


@contextmanager
def _client(address: BrokerAddress) -> Iterator[_Client]:
    client = _Client(address)
    try:
        yield client
    finally:
        client.leave()


def _pump(clients: Sequence[_Client], done: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Let clients read and write until it is done; return whether it was, before the time or a connection ended."""
    deadline = time.monotonic() + patience_s
    while not done():
        alive = [client.turn() for client in clients]
        if time.monotonic() > deadline or not all(alive):
            return done()
    return True


def _passes(both: tuple[_Client, _Client], topic: str, filter_: str) -> bool:
    first, second = both
    if not second.subscribe([filter_]):
        return False
    first.publish(topic, b"hello")
    return _pump(both, lambda: topic in second.topics())


def _packets(address: BrokerAddress, topic: str) -> Finding:
    """Find the largest of some packets that passes, each between its own clients: one too large ends a connection."""
    item = f"packets of {LEAST_PACKET} bytes"
    usual = TransferSettings().chunk_bytes + HEADERS
    for size in (usual, 262_144, 65_536, LEAST_PACKET):
        with _client(address) as first, _client(address) as second:
            if second.subscribe([topic]):
                first.publish(topic, bytes(size - len(topic) - 7))
                if _pump((first, second), lambda: topic in second.topics(), 2 * PATIENCE_S):
                    adapt = "chunks adapt if the broker reports its limit by MQTT 5; else set transfer.chunk_bytes"
                    note = "" if size == usual else f"{size} bytes pass, {usual} do not: {adapt}"
                    return Finding(item, True, True, note)
    return Finding(item, True, False, "raise the broker's limit of packets")


def _retained(address: BrokerAddress, both: tuple[_Client, _Client], topic: str) -> Iterator[Finding]:
    first, second = both
    above, _, last = topic.rpartition("/")
    every = f"{above.rpartition('/')[0]}/+/{last}"
    second.subscribe([topic])
    first.publish(topic, b"state", retain=True)
    _pump(both, lambda: topic in second.topics())
    for what, filter_ in (("at its topic", topic), ("at a wildcard", every)):
        with _client(address) as late:
            late.subscribe([filter_])
            there = _pump((*both, late), lambda: topic in late.topics(retained=True))
        yield Finding(f"retained messages, {what}", False, there, "who comes late asks, which takes up to 2 s")
    count = len(second.messages)
    first.publish(topic, b"", retain=True)
    seen = _pump(both, lambda: (topic, 0) in [(name, size) for name, size, _ in second.messages[count:]])
    with _client(address) as late:
        late.subscribe([topic])
        gone = not _pump((*both, late), lambda: topic in late.topics(), PATIENCE_S / 3)
    yield Finding("an empty message clears it", False, seen and gone, "the store keeps what dead runs leave")


def _will(address: BrokerAddress, watcher: _Client, topic: str) -> Finding:
    watcher.subscribe([topic])
    mortal = _Client(address, will=topic)
    mortal.die()
    seen = _pump((watcher,), lambda: topic in watcher.topics())
    watcher.publish(topic, b"", retain=True)
    return Finding("the will of a lost client", False, seen, "a dead node is noticed after transfer.idle_s only")


def _slow_reader(address: BrokerAddress, topic: str) -> Finding:
    """Send a reader that pauses as much as a model has, and count what arrives."""
    with _client(address) as first, _client(address) as reader:
        reader.subscribe([topic])
        body = bytes(TransferSettings().chunk_bytes)
        for _ in range(SLOW_MESSAGES):
            first.publish(topic, body)
        began = time.monotonic()
        _pump((first,), lambda: time.monotonic() > began + PAUSE_S, 2 * PAUSE_S)
        quiet = [len(reader.messages), time.monotonic()]

        def over() -> bool:
            if len(reader.messages) != quiet[0]:
                quiet[:] = len(reader.messages), time.monotonic()
            return len(reader.messages) == SLOW_MESSAGES or time.monotonic() > quiet[1] + PATIENCE_S

        _pump((first, reader), over, 10 * PATIENCE_S)
        arrived = len(reader.messages)
    note = f"{arrived} of {SLOW_MESSAGES} chunks arrived: the others are sent again; raise the broker's queue limits"
    complete = arrived == SLOW_MESSAGES
    return Finding("a slow reader gets everything", False, complete, "" if complete else note)
