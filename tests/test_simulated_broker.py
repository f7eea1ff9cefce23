"""One script, run against the simulated broker and against mosquitto: every client must see the
same.
"""

from __future__ import annotations

import os
import signal
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedstrata.common.errors import ConnectionFailed
from fedstrata.deploy.brokers import broker as brokers
from fedstrata.deploy.simulation.simulated_broker import (
    RetainedMessage,
    SessionWill,
    SimulatedBroker,
)

PATIENCE_S = 10.0
PACKET_LIMIT = 5000
ACL = "topic readwrite #\ntopic deny secret/#\n"


class Seen(NamedTuple):
    """A message that a client received."""

    topic: str
    body: bytes
    qos: int
    retain: bool


Step = tuple[str, Any]


def script(do: Simulated | Mosquitto) -> Iterator[Step]:
    """Do everything that the agents rely on; after each step yield its name and what the clients
    saw.
    """

    def seen(step: str) -> Step:
        return step, do.look()

    for name in ("observer", "sender"):
        do.connect(name)
    do.subscribe("observer", ["s/#", "i/+/x"], 1)
    yield seen("subscribe, nothing retained")
    for topic in ("s", "s/a", "s/a/b", "i/a/x", "i/a/y", "i/x", "other", "s//b", "$SYS/s", "i//x"):
        do.publish("sender", topic, topic.encode(), qos=1)
    yield seen("filters")
    for number in range(10):
        do.publish("sender", f"s/{number % 2}", b"%d" % number, qos=number % 2)
    yield seen("order of one sender")

    do.publish("sender", "s/r/1", b"one", qos=1, retain=True)
    do.publish("sender", "s/r/2", b"two", qos=0, retain=True)
    do.publish("sender", "s/r/2/deep", b"three", qos=1, retain=True)
    yield seen("retained, as a live subscriber sees it")
    do.connect("late")
    do.subscribe("late", ["s/r/+"], 1)
    yield seen("retained at a wildcard")
    do.subscribe("late", ["s/r/+"], 0)
    yield seen("subscribed again at another QoS")
    do.subscribe("late", ["s/r/1", "s/r/#"], 1)
    yield seen("retained at overlapping subscriptions")
    do.publish("sender", "s/r/1", b"live", qos=1)
    yield seen("one message for three subscriptions")
    do.unsubscribe("late", ["s/r/1", "s/r/#", "never/there"])
    do.publish("sender", "s/r/1", b"", qos=1, retain=True)
    yield seen("clearing, as live subscribers see it")
    do.publish("sender", "s/r/1", b"", qos=1, retain=True)
    yield seen("clearing what is not there")
    do.publish("sender", "s/r/2", b"new", qos=0, retain=True)
    do.publish("sender", "s/r/2", b"not kept", qos=0)
    do.disconnect("late")
    do.connect("late")
    do.publish("sender", "s/r/2", b"for nobody of that name any more", qos=1)
    yield seen("a clean session has no subscriptions")
    do.subscribe("late", ["#"], 1)
    yield seen("everything that is retained")
    do.disconnect("late")

    for qos in (0, 1):
        do.connect(f"low-{qos}")
        do.subscribe(f"low-{qos}", ["q/#"], qos)
    for qos in (0, 1):
        do.publish("sender", "q/a", b"%d" % qos, qos=qos)
    yield seen("QoS is the lower of both")
    do.publish("low-1", "q/own", b"own", qos=1)
    yield seen("one's own message")

    gone = SessionWill("s/will/gone", b"gone", qos=1, retain=True)
    do.connect("mortal", gone)
    do.abort("mortal")
    yield seen("will at an abrupt end")
    do.connect("mortal", gone)
    do.publish("mortal", "s/will/gone", b"here", qos=1, retain=True)
    do.disconnect("mortal")
    yield seen("no will at a clean end")
    do.connect("twin", SessionWill("s/will/twin", b"first", qos=0, retain=False))
    do.subscribe("twin", ["s/twin"], 1)
    do.connect("twin", SessionWill("s/will/twin", b"second", qos=1, retain=True))
    yield seen("take-over by client id")
    do.publish("sender", "s/twin", b"for the second", qos=1)
    yield seen("the second has no subscriptions")
    do.abort("twin")
    yield seen("the second's will")

    do.connect("late")
    do.subscribe("late", ["secret/#", "open/#", "secret/a"], 1)
    do.publish("sender", "secret/a", b"denied", qos=1, retain=True)
    do.publish("sender", "open/a", b"allowed", qos=1)
    yield seen("denied topics")
    do.connect("large", SessionWill("s/will/large", b"too large", qos=1, retain=False))
    do.publish("large", "s/large", bytes(PACKET_LIMIT - 100), qos=0)
    yield seen("a packet below the limit")
    do.publish("large", "s/large", bytes(PACKET_LIMIT + 100), qos=0)
    yield seen("a packet above the limit")

    for how in ("term", "kill with an old store", "kill without a store"):
        do.snapshot()
        do.publish("sender", "s/after", how.encode(), qos=1, retain=True)
        do.publish("sender", "s/r/2", b"", qos=1, retain=True)
        do.connect("mortal", SessionWill("s/will/broker", how.encode(), qos=1, retain=True))
        yield seen(f"before {how}")
        do.restart(how)
        for name in ("observer", "sender"):
            do.connect(name)
        yield seen(f"after {how}, nothing without subscriptions")
        do.subscribe("observer", ["s/#"], 1)
        yield seen(f"after {how}")


class _Client:
    """A client, and what it saw since the last look."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[Seen] = []
        self.codes: list[int] = []
        self.acknowledged = 0
        self.closed = False


class Simulated:
    """Drives the simulated broker, without links."""

    def __init__(self) -> None:
        self.broker = SimulatedBroker("b")
        self.broker.packet_limit = PACKET_LIMIT
        self.broker.denied = ["secret/#"]
        self._clients: dict[str, _SimulatedClient] = {}
        self._all: list[_Client] = []
        self._old: Mapping[str, RetainedMessage] = {}

    def connect(self, name: str, will: SessionWill | None = None) -> None:
        self._clients[name] = client = _SimulatedClient(name)
        self._all.append(client)
        client.session = self.broker.connect(name, client, will=will)

    def subscribe(self, name: str, filters: list[str], qos: int) -> None:
        client = self._clients[name]
        client.codes += self.broker.subscribe(client.session, filters, qos=qos)

    def unsubscribe(self, name: str, filters: list[str]) -> None:
        self.broker.unsubscribe(self._clients[name].session, filters)

    def publish(
        self, name: str, topic: str, body: bytes, qos: int = 0, retain: bool = False
    ) -> None:
        client = self._clients[name]
        client.acknowledged += self.broker.publish(
            client.session, topic, body, qos=qos, retain=retain
        )

    def disconnect(self, name: str) -> None:
        self.broker.disconnect(self._clients[name].session)

    def abort(self, name: str) -> None:
        self.broker.abort(self._clients[name].session)

    def restart(self, how: str) -> None:
        if how == "term":
            self.broker.terminate()
            self.broker.start("current")
        else:
            self.broker.kill()
            self.broker.start("empty" if "without" in how else self._old)

    def snapshot(self) -> None:
        self._old = self.broker.snapshot()

    def look(self) -> Mapping[str, Any]:
        return _looked(self._all)


class _SimulatedClient(_Client):
    session: Any = None

    def pending(self) -> int:
        return 0

    def deliver(self, topic: str, body: bytes, *, qos: int, retain: bool) -> None:
        self.messages.append(Seen(topic, body, qos, retain))

    def closed_by_broker(self) -> None:
        self.closed = True


class Mosquitto:
    """Drives a mosquitto of its own by hand-made packets, so that every flag is seen."""

    def __init__(self, directory: Path) -> None:
        (directory / "acl").write_text(ACL)
        self._store = directory / "mosquitto.db"
        self._settings: dict[str, str | int] = {
            "persistence": "true",
            "persistence_location": f"{directory}/",
            "max_packet_size": PACKET_LIMIT,
            "acl_file": str(directory / "acl"),
        }
        self._clients: dict[str, _SocketClient] = {}
        self._all: list[_SocketClient] = []
        self._server = self._start()

    def connect(self, name: str, will: SessionWill | None = None) -> None:
        earlier = self._clients.get(name)
        self._clients[name] = client = _SocketClient(self._server.port, name, will)
        self._all.append(client)
        if earlier is not None:
            earlier.ended()

    def subscribe(self, name: str, filters: list[str], qos: int) -> None:
        asked = b"".join(_text(pattern) + bytes([qos]) for pattern in filters)
        self._clients[name].ask(0x82, b"\x00\x07" + asked, 0x90)

    def unsubscribe(self, name: str, filters: list[str]) -> None:
        self._clients[name].ask(0xA2, b"\x00\x08" + b"".join(map(_text, filters)), 0xB0)

    def publish(
        self, name: str, topic: str, body: bytes, qos: int = 0, retain: bool = False
    ) -> None:
        client = self._clients[name]
        client.send(0x30 | qos << 1 | retain, _text(topic) + (b"\x00\x09" if qos else b"") + body)
        if len(body) > PACKET_LIMIT:
            client.ended()
        else:
            client.ping()

    def disconnect(self, name: str) -> None:
        self._clients[name].send(0xE0, b"")
        self._clients[name].ended()

    def abort(self, name: str) -> None:
        self._clients[name].abort()
        self._clients[name].ended()

    def restart(self, how: str) -> None:
        os.kill(self._server.process.pid, signal.SIGTERM if how == "term" else signal.SIGKILL)
        self._server.process.wait()
        for client in self._clients.values():
            client.ended()
        if "without" in how:
            self._store.unlink(missing_ok=True)
        self._server = self._start(self._server.port)

    def snapshot(self) -> None:
        self._store.unlink(missing_ok=True)
        os.kill(self._server.process.pid, signal.SIGUSR1)
        while not self._store.exists():  # mosquitto renames the file when it is complete
            self._clients["sender"].ping()

    def _start(self, port: int = 0) -> brokers.BrokerProcess:
        return brokers.start(
            directory=self._store.parent, port=port, kind="mosquitto", settings=self._settings
        )

    def look(self) -> Mapping[str, Any]:
        for client in self._all:
            if not client.closed:
                client.ping()
        return _looked(self._all)

    def close(self) -> None:
        for client in self._all:
            client.close()
        self._server.stop()


class _SocketClient(_Client):
    def __init__(self, port: int, name: str, will: SessionWill | None) -> None:
        super().__init__(name)
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._file = self._socket.makefile("rb")
        flags, fields = 0x02, _text(name)
        if will is not None:
            flags |= 0x04 | will.qos << 3 | will.retain << 5
            fields += _text(will.topic) + len(will.body).to_bytes(2) + will.body
        self.ask(0x10, b"\x00\x04MQTT\x04" + bytes([flags]) + b"\x00\x3c" + fields, 0x20)

    def send(self, command: int, rest: bytes) -> None:
        length, size = b"", len(rest)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        self._socket.sendall(bytes([command]) + length + bytes([size]) + rest)

    def ask(self, command: int, rest: bytes, answer: int) -> None:
        self.send(command, rest)
        while self._take() != answer:
            pass

    def ping(self) -> None:
        """Wait until the broker has dealt with all that was sent, and sent what it had for this
        client.
        """
        self.ask(0xC0, b"", 0xD0)

    def ended(self) -> None:
        """Read until the broker closes the connection."""
        while not self.closed:
            try:
                self._take()
            except (EOFError, ConnectionError):
                self.close()

    def abort(self) -> None:
        """End the stream without a DISCONNECT."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.closed = True
        self._file.close()
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def _take(self) -> int:
        command, size, shift = self._read(1)[0], 0, 0
        while True:
            byte = self._read(1)[0]
            size, shift = size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        rest = self._read(size)
        if command >> 4 == 3:
            at = 2 + int.from_bytes(rest[:2])
            qos = command >> 1 & 3
            body = rest[at + 2 :] if qos else rest[at:]
            if qos:
                self.send(0x40, rest[at : at + 2])
            self.messages.append(Seen(rest[2:at].decode(), body, qos, bool(command & 1)))
        elif command == 0x90:
            self.codes += rest[2:]
        elif command == 0x40:
            self.acknowledged += 1
        return command


def _looked(clients: Iterable[_Client]) -> Mapping[str, Any]:
    """Return by client what it saw since the last look; what is retained has no order."""
    found: dict[str, Any] = defaultdict(list)
    for client in clients:
        live = [message for message in client.messages if not message.retain]
        kept = sorted(message for message in client.messages if message.retain)
        if client.messages or client.codes or client.acknowledged:
            found[client.name].append((live, kept, client.codes, client.acknowledged))
        if client.closed:
            found[client.name].append("closed")
        client.messages, client.codes, client.acknowledged = [], [], 0
    return dict(found)


def _text(value: str) -> bytes:
    data = value.encode()
    return len(data).to_bytes(2) + data


def test_clients_see_the_same_as_with_mosquitto(tmp_path: Path) -> None:
    try:
        real = Mosquitto(tmp_path)
    except ConnectionFailed:
        pytest.skip("mosquitto is not installed")
    with closing(real):
        for (step, simulated), (_, expected) in zip(script(Simulated()), script(real), strict=True):
            assert simulated == expected, step


@pytest.mark.parametrize(
    ("pattern", "topic", "covered"),
    [
        ("a/#", "a", True), ("a/#", "a/b/c", True), ("#", "a", True), ("#", "$SYS/a", False),
        ("+/a", "$SYS/a", False),
        ("$SYS/#", "$SYS/a", True), ("a/+", "a", False), ("a/+", "a/", True), ("+", "a/b", False),
        ("a//b", "a//b", True), ("+/+", "/", True), ("a", "b", False), ("a/b", "a", False),
    ],
)  # fmt: skip
def test_filters(pattern: str, topic: str, covered: bool) -> None:
    broker, client = SimulatedBroker("b"), _SimulatedClient("client")
    session = broker.connect("client", client)
    broker.subscribe(session, [pattern], qos=1)
    assert (broker.subscribers(topic) == {session: 1}) is covered
    broker.unsubscribe(session, [pattern])
    assert broker.subscribers(topic) == {}


def test_what_waits_for_a_client_is_bounded() -> None:
    broker, client = SimulatedBroker("b"), _SimulatedClient("slow")
    client.pending = lambda: len(client.messages)  # type: ignore[method-assign]
    broker.queue_most = 3
    session = broker.connect("slow", client)
    broker.subscribe(session, ["#"], qos=1)
    for number in range(5):
        broker.route("a", b"%d" % number, qos=1, retain=False)
    assert [message.body for message in client.messages] == [b"0", b"1", b"2"]
    assert broker.dropped == 2
