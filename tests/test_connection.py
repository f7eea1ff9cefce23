"""The connection to a broker: brokers that restart, that drop a client at once, or that refuse a
subscription.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.processes import free_port
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.attempts import KINDS_MOST, FailureLog, pause_s
from fedstrata.common.net.bulk import Body
from fedstrata.common.net.client import MqttClient
from fedstrata.common.net.connection import BrokerConnection, Handlers
from fedstrata.common.net.tls import is_final
from fedstrata.common.protocol.messages import NodeState
from fedstrata.common.protocol.peers import ToChildren
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.world import new_session
from fedstrata.common.settings.links import LinkSettings
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.broker import Kind
from fedstrata.deploy.brokers.guard import Guard
from tests.helpers.nodes import nothing
from tests.helpers.sites import until

PATIENCE_S = 30.0


def scenario(play: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test's coroutine, at most `PATIENCE_S`; asyncio's exception handler must not be called."""

    @wraps(play)
    def run(*arguments: Any, **named: Any) -> None:
        called: list[dict[str, Any]] = []

        async def bounded() -> None:
            asyncio.get_running_loop().set_exception_handler(
                lambda loop, context: called.append(context)
            )
            async with asyncio.timeout(PATIENCE_S):
                await play(*arguments, **named)
            gc.collect()  # a future whose exception nobody retrieved complains as it is freed
            await asyncio.sleep(0)

        asyncio.run(bounded())
        assert called == []

    return run


def connection_to(
    address: BrokerAddress,
    *,
    received: Callable[[str, bytes, bool], None] = lambda *_: None,
    connected: Callable[[], Coroutine[Any, Any, None]] = nothing,
    lost: Callable[[], None] = lambda: None,
    topics: Sequence[list[str]] = (),
) -> BrokerConnection:
    """Return a connection that makes a subscription to each of these lists of topics, or calls
    `connected`.
    """

    async def subscribe() -> None:
        for each in topics:
            connection.subscribe(each, qos=1)

    handlers = Handlers(received, subscribe if topics else connected, lost)
    connection = BrokerConnection(address, handlers, client_id="c", keepalive_s=30)
    return connection


@pytest.fixture(autouse=True)
def _logged_from_info_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedstrata")


# A broker that restarts


@scenario
async def test_a_socket_that_closes_with_a_write_pending_is_not_watched() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        client = connection_to(BrokerAddress("nowhere"))._new_client()
        client._client._sock = ours
        client._client.publish("t", b"")
        client._client._sock_close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@scenario
async def test_a_broker_that_restarts_under_traffic_leaves_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")

    served = broker.start(directory=tmp_path)
    count = 0

    def received(*_: object) -> None:
        nonlocal count
        count += 1
        connection.publish("t", b"x", qos=count % 2)
        for _ in range(10):  # a broker that has little of the processor keeps up with as many
            connection.publish("u", b"x", qos=0)

    async def connected() -> None:
        connection.subscribe(["t"], qos=1)
        connection.publish("t", b"x", qos=1)

    async def publish() -> None:
        while True:
            if not connection.up:
                connection.publish("u", b"x", qos=0)
            await asyncio.sleep(0)

    connection = connection_to(
        BrokerAddress(served.host, served.port), received=received, connected=connected
    )
    tasks = [
        asyncio.create_task(connection.run(connect_timeout_s=PATIENCE_S)),
        asyncio.create_task(publish()),
    ]
    try:
        for _ in range(3):
            before = count
            await until(lambda before=before: count > before + 50)
            served.process.kill()
            await asyncio.to_thread(served.stop)
            await until(lambda: not connection.up)
            served = broker.start(directory=tmp_path, kind="mosquitto", port=served.port)
        await until(lambda: connection.up)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        served.stop()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


# A broker that drops its clients


CONNECT, PUBLISH, SUBSCRIBE = 1, 3, 8
Answer = Callable[[int, bytes], bytes | None]


def acknowledge(kind: int, body: bytes, *, code: int = 0) -> bytes:
    """Return the answer to a packet: a SUBSCRIBE's has `code` for each topic, a PUBLISH is taken
    for one of QoS 1.
    """
    if kind == PUBLISH:
        mid = 2 + int.from_bytes(body[:2], "big")
        return b"\x40\x02" + body[mid : mid + 2]
    if kind != SUBSCRIBE:
        return b""
    at, count = 2, 0
    while at < len(body):
        at, count = at + 3 + int.from_bytes(body[at : at + 2], "big"), count + 1
    return bytes([0x90, 2 + count]) + body[:2] + bytes([code]) * count


def close(_kind: int, _body: bytes) -> None:
    return None


def client_id(connect: bytes) -> str:
    """Return the client id in a CONNECT of MQTT 3.1.1: after the protocol's name, its version,
    flags and keep-alive.
    """
    return connect[12 : 12 + int.from_bytes(connect[10:12], "big")].decode()


class FakeBroker:
    """A TCP server that answers each MQTT packet by `answer(type, body)`; None closes the
    connection.

    `connack(body)` answers a CONNECT. `times` are those of the connections, `packets` all that
    came: connection, type and body.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        at_once: bool = False,
        connack: Callable[[bytes], bytes | None] = lambda _: b"\x20\x02\x00\x00",
    ) -> None:
        self._answer = answer
        self._connack = connack
        self._at_once = at_once
        self._writers: list[asyncio.StreamWriter] = []
        self.times: list[float] = []
        self.packets: list[tuple[int, int, bytes]] = []

    async def __aenter__(self) -> FakeBroker:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = BrokerAddress(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    def subscriptions(self, topic: bytes, start: int = 0) -> list[int]:
        """Return the numbers of the connections on which a topic was subscribed to, from a packet
        on.
        """
        return [
            number
            for number, kind, body in self.packets[start:]
            if kind == SUBSCRIBE and topic in body
        ]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        number = len(self.times)
        self.times.append(asyncio.get_running_loop().time())
        try:
            while not self._at_once:
                kind = (await reader.readexactly(1))[0] >> 4
                length = shift = 0
                while True:
                    digit = (await reader.readexactly(1))[0]
                    length |= (digit & 127) << shift
                    shift += 7
                    if digit < 128:
                        break
                body = await reader.readexactly(length)
                self.packets.append((number, kind, body))
                answer = self._connack(body) if kind == CONNECT else self._answer(kind, body)
                if answer is None:
                    break
                writer.write(answer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        writer.close()


@asynccontextmanager
async def running(
    connection: BrokerConnection, *, connect_timeout_s: float = PATIENCE_S
) -> AsyncIterator[None]:
    task = asyncio.create_task(connection.run(connect_timeout_s=connect_timeout_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "fedstrata.connection"
    ]


@scenario
async def test_a_message_that_finds_no_connection_is_not_the_last_one_sent(
    attempts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[bool] = []
    async with FakeBroker(close, at_once=True) as fake:
        connection = connection_to(fake.address, lost=lambda: lost.append(True))
        async with running(connection):
            while len(attempts) < 5:
                connection.publish("t", b"", qos=0)
                connection.publish_body("t", Body(memoryview(b"body")), done=lambda: None)
                await asyncio.sleep(0)
    assert not lost
    (line,) = logged(caplog)
    assert "closed by the broker before CONNACK" in line


def test_pauses_grow_to_a_limit_and_are_drawn() -> None:
    drawn = [[pause_s(attempt) for _ in range(50)] for attempt in (0, 1, 3, 5, 6, 1000)]
    assert [
        max(pauses) <= most for pauses, most in zip(drawn, (0.1, 0.2, 0.8, 3.2, 5, 5), strict=True)
    ] == [True] * 6
    assert all(max(before) <= min(after) for before, after in itertools.pairwise(drawn[:4]))
    assert min(drawn[-1]) >= 2.5 and len(set(drawn[-1])) == 50


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the attempts to connect that failed; there are no pauses between them."""
    failed: list[int] = []

    def pause(attempt: int, _draw: object) -> float:
        failed.append(attempt)
        return 0.0

    monkeypatch.setattr("fedstrata.common.net.attempts.pause_s", pause)
    return failed


@pytest.mark.parametrize("at_once", [True, False], ids=["before CONNACK", "after CONNACK"])
@scenario
async def test_a_broker_that_drops_clients_is_asked_less_and_less_often(
    attempts: list[int], caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    async with FakeBroker(close, at_once=at_once) as fake:
        connection = connection_to(fake.address, topics=[["a", "b", "c"]])
        async with running(connection):
            await until(lambda: len(attempts) >= 20)
    assert attempts == list(range(len(attempts)))
    first, *examined = logged(caplog)
    reason = (
        "closed by the broker before CONNACK"
        if at_once
        else "s after SUBSCRIBE to 3 topics (a, ...)"
    )
    assert reason in first and "127.0.0.1" in first
    assert ["refuses a subscription" in line for line in examined] == ([] if at_once else [True])


@scenario
async def test_a_connection_that_ends_together_with_its_connack_is_lost(
    attempts: list[int],
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(b"\x20\x02\x00\x00")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        connection = connection_to(BrokerAddress(*server.sockets[0].getsockname()))
        async with running(connection):
            await until(lambda: len(attempts) >= 3)


@pytest.mark.parametrize("at_once", [True, False], ids=["before CONNACK", "after CONNACK"])
@scenario
async def test_a_broker_that_never_works_ends_the_attempts(at_once: bool) -> None:
    async with FakeBroker(close, at_once=at_once) as fake:
        connection = connection_to(fake.address, topics=[["a"]])
        with pytest.raises(
            ConnectionFailed, match=r"closed by the broker (before CONNACK|.* SUBSCRIBE to a)"
        ):
            await connection.run(connect_timeout_s=0.3)


@scenario
async def test_a_connection_that_is_accepted_and_ends_soon_does_not_reset_the_pauses(
    attempts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # it would connect, too
    monkeypatch.setattr("fedstrata.common.net.connection.find_lack", lambda *_: None)

    def answer(kind: int, body: bytes) -> bytes | None:
        place = len(fake.times)
        if place == 4:  # only one of two subscriptions is acknowledged
            return None if b"second" in body else acknowledge(kind, body)
        return None if kind == PUBLISH or place < 4 else acknowledge(kind, body)

    async with FakeBroker(answer) as fake:
        connection = connection_to(fake.address, topics=[["first"], ["second"]])
        async with running(connection):
            await until(lambda: connection._accepted)
            assert attempts == [0, 1, 2, 3]
            connection.publish("drop", b"", qos=0)
            await until(lambda: len(fake.times) == 6)
            assert attempts == [0, 1, 2, 3, 4]


@scenario
async def test_two_clients_of_one_id_end_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """mosquitto and EMQX may make ids of logins: each connection of a login then ends the one
    before.
    """
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    monkeypatch.setattr("fedstrata.common.net.attempts.BACKOFF_MOST_S", 0.2)
    settings = {"use_username_as_clientid": "true"}
    guard = Guard(login=("me", "secret"))
    with broker.start(
        directory=tmp_path, kind="mosquitto", guard=guard, settings=settings
    ) as served:
        where = BrokerAddress(served.host, served.port, "me", "secret")
        ends = [connection_to(where, topics=[["a"]]).run(connect_timeout_s=1.0) for _ in range(2)]
        for end in asyncio.as_completed(ends):
            with pytest.raises(ConnectionFailed, match="makes ids of logins"):
                await end
            break  # the other one is alone now
    first, *_ = logged(caplog)
    assert "closed by the broker" in first and "s after SUBSCRIBE to a; trying again" in first


@scenario
async def test_a_connection_that_lasts_resets_the_pauses(
    attempts: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrata.common.net.connection.LASTED_S", 0.3)

    def answer(kind: int, _body: bytes) -> bytes | None:
        return None if len(fake.times) < 4 else b""

    async with FakeBroker(answer) as fake:

        async def connected() -> None:
            connection.publish("t", b"12345", qos=0)

        connection = connection_to(fake.address, connected=connected)
        async with running(connection):
            await until(lambda: "connected, after 3 failures" in "".join(logged(caplog)))
            assert connection._lasted and attempts == [0, 1, 2]
    assert "PUBLISH of 5 bytes to t; trying again" in logged(caplog)[0]


@scenario
async def test_a_connection_that_is_cancelled_while_the_broker_reads_nothing_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection = connection_to(BrokerAddress(*server.getsockname()))
        make = connection._new_client

        def hasty() -> MqttClient:
            client = make()
            client.timeout = 0.3
            return client

        connection._new_client = hasty  # type: ignore[method-assign]
        task = asyncio.create_task(connection.run(connect_timeout_s=PATIENCE_S))
        peer, _ = await asyncio.to_thread(server.accept)
        with peer:
            peer.sendall(b"\x20\x02\x00\x00")
            await until(lambda: connection.up)
            connection.publish("t", bytes(20_000_000), qos=0)
            task.cancel()
            await asyncio.wait((task,))
        assert task.cancelled()


def test_equal_failures_are_reported_once_a_minute_with_their_count() -> None:
    failures = FailureLog()
    assert failures.recovered(0.0) is None
    assert failures.failed("closed", "closed after A", 10.0) == "closed after A"
    assert [failures.failed("closed", "closed", 10.0 + i) for i in range(1, 60)] == [None] * 59
    assert failures.failed("refused", "refused", 70.0) == "refused"
    assert failures.failed("closed", "closed after B", 71.0) == "closed after B (60 times in 61 s)"
    assert failures.failed("closed", "closed", 72.0) is None
    assert failures.recovered(75.0) == "63 failures in 65 s"
    assert failures.failed("closed", "closed", 76.0) == "closed"
    assert failures.recovered(77.0) == "1 failure in 1 s"


def test_kinds_of_failures_are_bounded() -> None:
    failures = FailureLog()
    for number in range(100):
        assert failures.failed(str(number), "text", float(number)) == "text"
    assert len(failures._kinds) == KINDS_MOST


# What is reported at once, and what ends at once


def outcome_of(
    address: BrokerAddress,
    caplog: pytest.LogCaptureFixture,
    then: Callable[[], object] = lambda: None,
) -> str:
    """Connect, with a thousand seconds of patience; return the error, or the first line that is
    logged.
    """

    async def run() -> str:
        running = asyncio.create_task(connection_to(address).run(connect_timeout_s=1000.0))
        await until(lambda: running.done() or bool(logged(caplog)))
        then()
        running.cancel()
        await asyncio.wait((running,))
        if not running.cancelled():
            return str(running.exception())
        return logged(caplog)[0]

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["mosquitto", "embedded"])
def test_a_wrong_password_ends_at_once(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        broker.choose(kind)
    except ConnectionFailed as error:
        pytest.skip(str(error))
    with broker.start(directory=tmp_path, kind=kind, guard=Guard(login=("me", "secret"))) as served:
        where = BrokerAddress(served.host, served.port, "me", "wrong")
        line = (
            f"broker {where}: the broker refuses the login: Not authorized. Are the login and "
            "its files right?"
        )
        assert outcome_of(where, caplog) == line
        both = replace(where, others=(("127.0.0.1", free_port()),))
        assert "; trying 127.0.0.1:" in outcome_of(both, caplog), "somebody may come there"


def test_what_may_come_yet_is_reported_at_once_and_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nobody = BrokerAddress("127.0.0.1", free_port())
    assert outcome_of(nobody, caplog) == f"broker {nobody}: connection refused; trying again"
    caplog.clear()
    unknown = outcome_of(BrokerAddress("no-such-host.invalid"), caplog)
    assert (
        unknown.startswith("broker no-such-host.invalid:1883: ")
        and "Errno" not in unknown
        and unknown.endswith("; trying again")
    )
    caplog.clear()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.common.net.connection.ANSWER_S", 0.01)
        where = BrokerAddress(*silent.getsockname())
        assert outcome_of(where, caplog, then=silent.close) == f"broker {where}: no answer yet"


@pytest.mark.parametrize(
    ("code", "final"),
    [(18, True), (19, True), (20, True), (23, True), (10, True), (9, False), (11, False)],
)
def test_a_certificate_that_is_not_yet_valid_may_wait_for_the_clock(code: int, final: bool) -> None:
    error = ssl.SSLCertVerificationError()
    error.verify_code = code
    assert is_final(error) is final
    assert not is_final(ssl.SSLEOFError()) and not is_final(ConnectionRefusedError())


# A broker that refuses its statistics


def answering_statistics(answer: Answer) -> Answer:
    """Return an answer that acknowledges everything but subscriptions to $SYS."""
    return lambda kind, body: (answer if kind == SUBSCRIBE and b"$SYS" in body else acknowledge)(
        kind, body
    )


@asynccontextmanager
async def parent_at(address: BrokerAddress) -> AsyncIterator[BrokerConnection]:
    """Run a parent with one child; yield its connection. It soon stops asking for the limits of the
    broker.
    """
    identity = Identity("r-1", "cloud", "cloud", new_session())
    parent = ParentEndpoint(
        address, identity, ToChildren(links={"i0": LinkSettings()}, transfer=TransferSettings())
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.common.net.plain_client.LIMIT_ANSWER_S", 0.05)
        patch.setattr("fedstrata.common.net.packet_limit.ANSWER_S", 0.05)
        serving = asyncio.create_task(parent.run(connect_timeout_s=PATIENCE_S))
        try:
            assert isinstance(parent.connection, BrokerConnection)
            yield parent.connection
            parent.set_state(NodeState.READY)
            async with asyncio.timeout(PATIENCE_S / 3):
                await parent.connection.flush()
        finally:
            serving.cancel()
            await asyncio.wait((serving,))


@pytest.mark.parametrize(
    "answer",
    [lambda kind, body: acknowledge(kind, body, code=0x80), lambda kind, body: b""],
    ids=["refuses", "does not answer"],
)
@scenario
async def test_a_broker_that_gives_no_statistics_is_usable(answer: Answer) -> None:
    async with (
        FakeBroker(answering_statistics(answer)) as fake,
        parent_at(fake.address) as connection,
    ):
        await until(lambda: fake.subscriptions(b"$SYS"))
        # others ask for its limits
        own = [(kind, body) for number, kind, body in fake.packets if number == 0]
        assert [b"$SYS" in body for kind, body in own if kind == SUBSCRIBE] == [False, True]
        assert connection.up and connection.reconnects == 0


@scenario
async def test_a_broker_that_closes_at_its_statistics_is_asked_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeBroker(answering_statistics(close)) as fake:
        async with parent_at(fake.address) as connection:
            await until(
                lambda: connection.reconnects == 1 and connection.up and connection._accepted
            )
        assert len(fake.subscriptions(b"$SYS")) == 1
    (line,) = (record for record in caplog.records if record.name == "fedstrata.endpoint")
    assert line.levelname == "INFO" and "no broker statistics" in line.getMessage()
    unanswered, drop = logged(caplog)
    assert "trials of its largest packet stayed unanswered" in unanswered
    assert "after SUBSCRIBE to 2 topics ($SYS/" in drop


@scenario
async def test_statistics_are_asked_for_only_where_subscriptions_are_acknowledged() -> None:
    async with FakeBroker(lambda kind, body: b"") as fake:
        asked = []

        async def connected() -> None:
            connection.subscribe(["a"], qos=1, acknowledged=lambda: asked.append(True))
            connection.publish("b", b"", qos=0)

        connection = connection_to(fake.address, connected=connected)
        async with running(connection):
            await until(lambda: any(kind == PUBLISH for _, kind, _ in fake.packets))
        assert not asked


@scenario
async def test_a_cancelled_connection_is_not_lost() -> None:
    async with FakeBroker(acknowledge) as fake:
        lost: list[bool] = []
        connection = connection_to(fake.address, lost=lambda: lost.append(True))
        async with running(connection):
            await until(lambda: connection.up)
        assert not lost and not connection.up


@scenario
async def test_a_client_that_disconnects_reads_until_the_broker_has_closed() -> None:
    """Else what the broker still sends is answered by a reset, which may overtake DISCONNECT: a
    will is published.
    """
    sent: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(b"\x20\x02\x00\x00")
        received = b""
        while not received.endswith(b"\xe0\x00"):  # DISCONNECT
            received += await reader.readexactly(1)
        for number in range(3):
            writer.write(b"\x30\x04\x00\x01tx")
            await writer.drain()
            await asyncio.sleep(0.02)  # a reset would come meanwhile
            sent.append(number)
        assert await reader.read() == b""
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        connection = connection_to(BrokerAddress(*server.sockets[0].getsockname()))
        async with running(connection):
            await until(lambda: connection.up)
        assert sent == [0, 1, 2]


# A broker with several addresses


def joined(*addresses: BrokerAddress) -> BrokerAddress:
    return replace(addresses[0], others=tuple((one.host, one.port) for one in addresses[1:]))


async def away() -> BrokerAddress:
    """Return an address at which nobody answers."""
    async with FakeBroker(acknowledge) as fake:
        return fake.address


@scenario
async def test_an_address_that_refuses_is_followed_by_the_next(
    attempts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    nobody = await away()
    async with FakeBroker(acknowledge) as fake:
        connection = connection_to(joined(nobody, fake.address))
        async with running(connection):
            await until(lambda: connection.up)
            assert connection.attempts.address == fake.address
            assert connection.reconnects == 1 and len(fake.times) == 1
    (line,) = logged(caplog)
    assert line.startswith(f"broker {nobody}: ") and line.endswith(
        f"refused; trying {fake.address}"
    )
    assert attempts == []  # no pause


@scenario
async def test_a_connection_goes_to_the_next_address_when_it_dies_and_stays_there(
    attempts: list[int],
) -> None:
    served: list[str] = []

    def counted(name: str) -> Answer:
        def answer(kind: int, body: bytes) -> bytes | None:
            served.append(name)
            return None if b"drop" in body else acknowledge(kind, body)

        return answer

    async with FakeBroker(counted("first")) as first, FakeBroker(counted("second")) as second:
        left: list[bool] = []
        connection = connection_to(joined(first.address, second.address), topics=[["t"]])
        async with running(connection):
            await until(lambda: connection._accepted)
            connection.publish_body(
                "drop", Body(memoryview(b"body")), done=lambda: left.append(True)
            )
            await until(lambda: connection._accepted and second.times)
            assert left and attempts == []
            connection.publish("t", b"", qos=1)
            await connection.flush()
            assert (connection.attempts.address, served[-1], len(first.times)) == (
                second.address,
                "second",
                1,
            )
            connection.publish("drop", b"", qos=0)
            await until(lambda: connection._accepted and len(first.times) == 2)
            assert attempts == [0]  # both addresses have failed, though after they had worked
            names = [
                client_id(body)
                for _, kind, body in first.packets + second.packets
                if kind == CONNECT
            ]
            # a server of a cluster cleans up after a dead one by client ids
            assert names == ["c-0", "c-0", "c-1"]


@scenario
async def test_addresses_that_all_fail_are_named_with_their_reasons() -> None:
    nobody = await away()
    async with FakeBroker(close, at_once=True) as fake:
        connection = connection_to(joined(nobody, fake.address))
        with pytest.raises(ConnectionFailed) as failed:
            await connection.run(connect_timeout_s=0.0)  # each address gets an attempt
    refused, closed = str(failed.value).split("; ")
    assert refused.startswith(f"broker {nobody}: ") and "refused" in refused
    assert closed.startswith(
        f"{fake.address}: closed by the broker before CONNACK, whatever is asked for. "
    )
