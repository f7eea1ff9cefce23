"""One script, run against the simulated broker and against mosquitto: every client must see the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from common.errors import ConnectionFailed
from deploy.brokers import broker as brokers
from deploy.simulation.broker import RetainedMessage, SessionWill, SimulatedBroker

PATIENCE_S = 10.0
PACKET_LIMIT = 5000
ACL = "topic readwrite #\ntopic deny secret/#\n"


class Seen(NamedTuple):
    """A message that a client received."""

    topic: str
    body: bytes
    qos: int
    retain: bool


class Driver(Protocol):
    """What the script does, and what the clients saw since the last look."""

    async def connect(self, name: str, will: SessionWill | None = None) -> None: ...
    async def subscribe(self, name: str, filters: list[str], qos: int) -> None: ...
    async def unsubscribe(self, name: str, filters: list[str]) -> None: ...
    async def publish(self, name: str, topic: str, body: bytes, qos: int = 0, retain: bool = False) -> None: ...
    async def disconnect(self, name: str) -> None: ...
    async def abort(self, name: str) -> None: ...
    async def restart(self, how: str) -> None: ...
    async def snapshot(self) -> None: ...
    async def look(self) -> Mapping[str, Any]: ...


Step = tuple[str, Any]


async def script(do: Driver) -> AsyncIterator[Step]:
    """Do everything that the agents rely on; after each step yield its name and what the clients saw."""

    async def seen(step: str) -> Step:
        return step, await do.look()

    for name in ("observer", "sender"):
        await do.connect(name)
    await do.subscribe("observer", ["s/#", "i/+/x"], 1)
    yield await seen("subscribe, nothing retained")
    for topic in ("s", "s/a", "s/a/b", "i/a/x", "i/a/y", "i/x", "other", "s//b", "$SYS/s", "i//x"):
        await do.publish("sender", topic, topic.encode(), qos=1)
    yield await seen("filters")
    for number in range(10):
        await do.publish("sender", f"s/{number % 2}", b"%d" % number, qos=number % 2)
    yield await seen("order of one sender")

    await do.publish("sender", "s/r/1", b"one", qos=1, retain=True)
    await do.publish("sender", "s/r/2", b"two", qos=0, retain=True)
    await do.publish("sender", "s/r/2/deep", b"three", qos=1, retain=True)
    yield await seen("retained, as a live subscriber sees it")
    await do.connect("late")
    await do.subscribe("late", ["s/r/+"], 1)
    yield await seen("retained at a wildcard")
    await do.subscribe("late", ["s/r/+"], 0)
    yield await seen("subscribed again at another QoS")
    await do.subscribe("late", ["s/r/1", "s/r/#"], 1)
    yield await seen("retained at overlapping subscriptions")
    await do.publish("sender", "s/r/1", b"live", qos=1)
    yield await seen("one message for three subscriptions")
    await do.unsubscribe("late", ["s/r/1", "s/r/#", "never/there"])
    await do.publish("sender", "s/r/1", b"", qos=1, retain=True)
    yield await seen("clearing, as live subscribers see it")
    await do.publish("sender", "s/r/1", b"", qos=1, retain=True)
    yield await seen("clearing what is not there")
    await do.publish("sender", "s/r/2", b"new", qos=0, retain=True)
    await do.publish("sender", "s/r/2", b"not kept", qos=0)
    await do.disconnect("late")
    await do.connect("late")
    await do.publish("sender", "s/r/2", b"for nobody of that name any more", qos=1)
    yield await seen("a clean session has no subscriptions")
    await do.subscribe("late", ["#"], 1)
    yield await seen("everything that is retained")
    await do.disconnect("late")

    for qos in (0, 1):
        await do.connect(f"low-{qos}")
        await do.subscribe(f"low-{qos}", ["q/#"], qos)
    for qos in (0, 1):
        await do.publish("sender", "q/a", b"%d" % qos, qos=qos)
    yield await seen("QoS is the lower of both")
    await do.publish("low-1", "q/own", b"own", qos=1)
    yield await seen("one's own message")

    gone = SessionWill("s/will/gone", b"gone", qos=1, retain=True)
    await do.connect("mortal", gone)
    await do.abort("mortal")
    yield await seen("will at an abrupt end")
    await do.connect("mortal", gone)
    await do.publish("mortal", "s/will/gone", b"here", qos=1, retain=True)
    await do.disconnect("mortal")
    yield await seen("no will at a clean end")
    await do.connect("twin", SessionWill("s/will/twin", b"first", qos=0, retain=False))
    await do.subscribe("twin", ["s/twin"], 1)
    await do.connect("twin", SessionWill("s/will/twin", b"second", qos=1, retain=True))
    yield await seen("take-over by client id")
    await do.publish("sender", "s/twin", b"for the second", qos=1)
    yield await seen("the second has no subscriptions")
    await do.abort("twin")
    yield await seen("the second's will")

    await do.connect("late")
    await do.subscribe("late", ["secret/#", "open/#", "secret/a"], 1)
    await do.publish("sender", "secret/a", b"denied", qos=1, retain=True)
    await do.publish("sender", "open/a", b"allowed", qos=1)
    yield await seen("denied topics")
    await do.connect("large", SessionWill("s/will/large", b"too large", qos=1, retain=False))
    await do.publish("large", "s/large", bytes(PACKET_LIMIT - 100), qos=0)
    yield await seen("a packet below the limit")
    await do.publish("large", "s/large", bytes(PACKET_LIMIT + 100), qos=0)
    yield await seen("a packet above the limit")

    for how in ("term", "kill with an old store", "kill without a store"):
        await do.snapshot()
        await do.publish("sender", "s/after", how.encode(), qos=1, retain=True)
        await do.publish("sender", "s/r/2", b"", qos=1, retain=True)
        await do.connect("mortal", SessionWill("s/will/broker", how.encode(), qos=1, retain=True))
        yield await seen(f"before {how}")
        await do.restart(how)
        for name in ("observer", "sender"):
            await do.connect(name)
        yield await seen(f"after {how}, nothing without subscriptions")
        await do.subscribe("observer", ["s/#"], 1)
        yield await seen(f"after {how}")


class Simulated:
    """Drives the simulated broker, without links."""

    def __init__(self) -> None:
        self.broker = SimulatedBroker("b")
        self.broker.packet_limit = PACKET_LIMIT
        self.broker.denied = ["secret/#"]
        self._clients: dict[str, _SimulatedClient] = {}
        self._all: list[_SimulatedClient] = []
        self._old: Mapping[str, RetainedMessage] = {}

    async def connect(self, name: str, will: SessionWill | None = None) -> None:
        self._clients[name] = client = _SimulatedClient(name)
        self._all.append(client)
        client.session = self.broker.connect(name, client, will=will)

    async def subscribe(self, name: str, filters: list[str], qos: int) -> None:
        client = self._clients[name]
        client.codes += self.broker.subscribe(client.session, filters, qos=qos)

    async def unsubscribe(self, name: str, filters: list[str]) -> None:
        self.broker.unsubscribe(self._clients[name].session, filters)

    async def publish(self, name: str, topic: str, body: bytes, qos: int = 0, retain: bool = False) -> None:
        client = self._clients[name]
        client.acknowledged += self.broker.publish(client.session, topic, body, qos=qos, retain=retain)

    async def disconnect(self, name: str) -> None:
        self.broker.disconnect(self._clients[name].session)

    async def abort(self, name: str) -> None:
        self.broker.abort(self._clients[name].session)

    async def restart(self, how: str) -> None:
        if how == "term":
            self.broker.terminate()
            self.broker.start("current")
        else:
            self.broker.kill()
            self.broker.start("empty" if "without" in how else self._old)

    async def snapshot(self) -> None:
        self._old = self.broker.snapshot()

    async def look(self) -> Mapping[str, Any]:
        return _looked(self._all)


class _SimulatedClient:
    def __init__(self, name: str) -> None:
        self.name = name
        self.session: Any = None
        self.messages: list[Seen] = []
        self.codes: list[int] = []
        self.acknowledged = 0
        self.closed = False

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
        self._directory = directory
        self._store = directory / "mosquitto.db"
        self._settings = {
            "persistence": "true",
            "persistence_location": f"{directory}/",
            "max_packet_size": PACKET_LIMIT,
            "acl_file": str(directory / "acl"),
        }
        self._clients: dict[str, _SocketClient] = {}
        self._all: list[_SocketClient] = []
        self._server = brokers.start(directory=directory, kind="mosquitto", settings=self._settings)

    async def connect(self, name: str, will: SessionWill | None = None) -> None:
        earlier = self._clients.get(name)
        self._clients[name] = client = await _SocketClient.open(self._server.port, name, will)
        self._all.append(client)
        if earlier is not None:
            await earlier.ended()

    async def subscribe(self, name: str, filters: list[str], qos: int) -> None:
        asked = b"".join(_text(pattern) + bytes([qos]) for pattern in filters)
        await self._clients[name].ask(0x82, b"\x00\x07" + asked, 0x90)

    async def unsubscribe(self, name: str, filters: list[str]) -> None:
        await self._clients[name].ask(0xA2, b"\x00\x08" + b"".join(map(_text, filters)), 0xB0)

    async def publish(self, name: str, topic: str, body: bytes, qos: int = 0, retain: bool = False) -> None:
        client = self._clients[name]
        client.send(0x30 | qos << 1 | retain, _text(topic) + (b"\x00\x09" if qos else b"") + body)
        if len(body) > PACKET_LIMIT:
            await client.ended()
        else:
            await client.ping()

    async def disconnect(self, name: str) -> None:
        self._clients[name].send(0xE0, b"")
        await self._clients[name].ended()

    async def abort(self, name: str) -> None:
        self._clients[name].abort()
        await self._clients[name].ended()

    async def restart(self, how: str) -> None:
        os.kill(self._server.process.pid, signal.SIGTERM if how == "term" else signal.SIGKILL)
        await asyncio.to_thread(self._server.process.wait)
        for client in self._clients.values():
            await client.ended()
        if "without" in how:
            self._store.unlink(missing_ok=True)
        port = self._server.port
        self._server = brokers.start(directory=self._directory, port=port, kind="mosquitto", settings=self._settings)

    async def snapshot(self) -> None:
        self._store.unlink(missing_ok=True)
        os.kill(self._server.process.pid, signal.SIGUSR1)
        async with asyncio.timeout(PATIENCE_S):
            while not self._store.exists():  # mosquitto renames the file when it is complete
                await self._clients["sender"].ping()

    async def look(self) -> Mapping[str, Any]:
        for client in self._all:
            if not client.closed:
                await client.ping()
        return _looked(self._all)

    def close(self) -> None:
        for client in self._all:
            client.close()
        self._server.stop()


class _SocketClient:
    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.messages: list[Seen] = []
        self.codes: list[int] = []
        self.acknowledged = 0
        self.closed = False
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int, name: str, will: SessionWill | None) -> _SocketClient:
        client = cls(name, *await asyncio.open_connection("127.0.0.1", port))
        flags, fields = 0x02, _text(name)
        if will is not None:
            flags |= 0x04 | will.qos << 3 | will.retain << 5
            fields += _text(will.topic) + len(will.body).to_bytes(2) + will.body
        await client.ask(0x10, b"\x00\x04MQTT\x04" + bytes([flags]) + b"\x00\x3c" + fields, 0x20)
        return client

    def send(self, command: int, rest: bytes) -> None:
        length, size = b"", len(rest)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        self._writer.write(bytes([command]) + length + bytes([size]) + rest)

    async def ask(self, command: int, rest: bytes, answer: int) -> None:
        self.send(command, rest)
        async with asyncio.timeout(PATIENCE_S):
            while await self._take() != answer:
                pass

    async def ping(self) -> None:
        """Wait until the broker has dealt with all that was sent, and sent what it had for this client."""
        await self.ask(0xC0, b"", 0xD0)

    async def ended(self) -> None:
        """Read until the broker closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.closed:
                try:
                    await self._take()
                except (asyncio.IncompleteReadError, ConnectionError):
                    self.close()

    def abort(self) -> None:
        """End the stream without a DISCONNECT."""
        self._writer.write_eof()

    def close(self) -> None:
        self.closed = True
        self._writer.close()

    async def _take(self) -> int:
        command, size, shift = (await self._reader.readexactly(1))[0], 0, 0
        while True:
            byte = (await self._reader.readexactly(1))[0]
            size, shift = size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        rest = await self._reader.readexactly(size)
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


def _looked(clients: Iterable[_SimulatedClient | _SocketClient]) -> Mapping[str, Any]:
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


async def run_script(driver: Driver) -> dict[str, Any]:
    return {step: seen async for step, seen in script(driver)}


@asynccontextmanager
async def mosquitto(directory: Path) -> AsyncIterator[Mosquitto]:
    try:
        driver = Mosquitto(directory)
    except ConnectionFailed:
        pytest.skip("mosquitto is not installed")
    try:
        yield driver
    finally:
        driver.close()


def test_clients_see_the_same_as_with_mosquitto(tmp_path: Path) -> None:
    async def real() -> dict[str, Any]:
        async with mosquitto(tmp_path) as driver:
            return await run_script(driver)

    simulated, expected = asyncio.run(run_script(Simulated())), asyncio.run(real())
    assert list(simulated) == list(expected)
    for step, seen in expected.items():
        assert simulated[step] == seen, step


@pytest.mark.parametrize(
    ("pattern", "topic", "covered"),
    [
        ("a/#", "a", True), ("a/#", "a/b/c", True), ("#", "a", True), ("#", "$SYS/a", False), ("+/a", "$SYS/a", False),
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
