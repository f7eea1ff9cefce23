"""The kernel's counts against the truth: a relay between an agent and a real broker that counts
each byte.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedstrata.cloud import records
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.accounting.tcp import WireMeter, tcp_info
from fedstrata.common.accounting.traffic import Measured, TcpStats, Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Section
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.packet_limit import UNLIMITED, PacketLimit
from fedstrata.common.protocol.messages import Gone, Task
from fedstrata.common.protocol.participant import ParticipantState
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.round import Dispatch, Report, WorkResult
from fedstrata.common.settings.closing import Closing
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.broker import BrokerProcess
from tests.helpers.commands import table
from tests.helpers.nodes import child_of, introduced, living, parent_of
from tests.helpers.sites import PATIENCE_S, RealSite, real, until

PARENT, CHILD = "institution-0", "device-0"
BELOW = {PARENT: [CHILD]}
TRANSFER = TransferSettings(inline_bytes=0, chunk_bytes=65_536)

linux = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")


# One socket


def connection() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection, the one that connected first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connected = socket.create_connection(server.getsockname())
        return connected, server.accept()[0]


def settle(condition: Callable[[], object]) -> None:
    """Wait for the kernel: an acknowledgement may come later than the bytes."""
    deadline = threading.Event()
    for _ in range(3000):
        if condition():
            return
        deadline.wait(0.001)
    raise AssertionError("never came true")


def counts(sock: socket.socket) -> tuple[int, int]:
    info = tcp_info(sock)
    assert info is not None
    return info.sent, info.received


@linux
def test_a_connection_counts_what_the_other_end_got_and_gave() -> None:
    ours, theirs = connection()
    with ours, theirs:
        assert counts(ours) == (0, 0)  # SYN is no byte
        ours.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(theirs.recv(65_536))
        theirs.sendall(bytes(500))
        settle(lambda: counts(ours) == (100_000, 500))
        info = tcp_info(ours)
        assert info is not None and info.measured
        assert (info.connections, info.unmeasured, info.retransmitted_unknown) == (1, 0, 0)
        assert info.sent_segments > 1 and info.received_segments > 1
        assert 0 < info.rtt_min_us <= 10**6 and 0 < info.rtt_us <= 10**6


@linux
def test_a_connection_that_the_peer_ended_still_reports_until_we_close_it() -> None:
    ours, theirs = connection()
    ours.sendall(b"x" * 10)
    theirs.sendall(b"y" * 20)
    assert theirs.recv(10) == b"x" * 10
    settle(lambda: counts(ours) == (10, 20))
    theirs.close()
    assert ours.recv(20) + ours.recv(1) == b"y" * 20  # and the end, which is no byte
    assert counts(ours) == (10, 20)
    ours.close()
    assert tcp_info(ours) is None


@linux
def test_a_reset_connection_still_reports() -> None:
    ours, theirs = connection()
    with ours:
        ours.sendall(b"x" * 10)
        settle(lambda: counts(ours) == (10, 0))
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        with pytest.raises(ConnectionResetError):
            ours.recv(1)
        assert counts(ours) == (10, 0)


@linux
def test_a_tls_connection_counts_its_records() -> None:
    def context(side: int) -> ssl.SSLContext:
        made = ssl.SSLContext(side)
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
        made.maximum_version = ssl.TLSVersion.TLSv1_2
        made.set_ciphers("aNULL:@SECLEVEL=0")  # needs no certificate
        return made

    ours, theirs = connection()

    def serve() -> None:
        with context(ssl.PROTOCOL_TLS_SERVER).wrap_socket(theirs, server_side=True) as secured:
            received = 0
            while received < 100_000:
                received += len(secured.recv(65_536))
            secured.sendall(b"all")

    serving = threading.Thread(target=serve)
    serving.start()
    with context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(ours) as secured:
        secured.sendall(bytes(100_000))
        assert secured.recv(3) == b"all"
        sent, received = counts(secured)
        serving.join()
    # the handshake, and 29 bytes for each record of 16 kB
    assert 100_000 < sent < 101_500 and 3 < received < 3000


def test_what_is_no_tcp_connection_has_no_counts() -> None:
    one, other = socket.socketpair()
    with one, other, socket.socket() as unconnected:
        assert tcp_info(one) is None
        assert tcp_info(unconnected) is None


class Kernel:
    """Answers like a kernel that knows so much of `struct tcp_info`."""

    def __init__(self, size: int, *, acked: int = 1001) -> None:
        whole = bytearray(256)
        whole[0] = 1
        struct.pack_into("=IIQQQII", whole, 68 + 4, 0, 0, 0, 0, 0, 0, 0)
        struct.pack_into("=I", whole, 68, 2500)
        struct.pack_into("=I", whole, 100, 3)
        struct.pack_into("=QQIIII", whole, 120, acked, 77, 12, 11, 0, 2**32 - 1)
        struct.pack_into("=QQ", whole, 200, 9999, 4242)
        self._data = bytes(whole[:size])

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self._data[:size]


@linux
@pytest.mark.parametrize("size", [256, 248, 216, 215, 192, 152])
def test_the_offsets_are_those_of_linux_which_counts_retransmitted_bytes_since_4_19(
    size: int,
) -> None:
    kernel: Any = Kernel(size)
    known = size >= 216
    assert tcp_info(kernel) == TcpStats(
        1000, 77, 4242 if known else 0, 12, 11, 3, 1, 0, int(not known), 2500, 0
    )


@linux
@pytest.mark.parametrize("kernel", [Kernel(151), Kernel(104), Kernel(0), Kernel(256, acked=0)])
def test_a_kernel_that_does_not_tell_is_not_believed(kernel: Any) -> None:
    assert tcp_info(kernel) is None
    meter = WireMeter()
    meter.attach(kernel)
    assert meter.received() == -1
    assert meter.sample() == TcpStats(connections=1, unmeasured=1) and not meter.sample().measured


def test_another_platform_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    ours, theirs = connection()
    with ours, theirs:
        assert tcp_info(ours) is None


@linux
def test_a_meter_adds_up_its_connections() -> None:
    meter = WireMeter()
    assert meter.sample() == TcpStats() and meter.received() == -1
    with ExitStack() as stack:
        for number, total in ((1, 1), (2, 3), (3, 6)):
            ours, theirs = map(stack.enter_context, connection())
            meter.attach(ours)  # in place of the one before, detached or not
            ours.sendall(bytes(number))
            theirs.sendall(bytes(10 * number))
            settle(lambda: (meter.sample().sent, meter.sample().received) == (total, 10 * total))  # noqa: B023
            assert meter.received() == 10 * number
            if number != 2:
                meter.detach()
                meter.detach()
                assert meter.received() == -1
    assert (meter.sample().sent, meter.sample().received, meter.sample().connections) == (6, 60, 3)


# A link, seen by a relay


class Relay:
    """Carries bytes between an agent and its broker, at one or more addresses, and keeps all of
    them.
    """

    def __init__(self, served: BrokerProcess) -> None:
        self._served = served
        self._servers: list[asyncio.Server] = []
        self._agents: set[asyncio.StreamWriter] = set()
        self.up, self.down = bytearray(), bytearray()
        self.connections = 0
        self.downward = asyncio.Event()
        self.downward.set()

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.up), len(self.down)

    async def start(self) -> BrokerAddress:
        self._servers.append(server := await asyncio.start_server(self._carry, "127.0.0.1", 0))
        return BrokerAddress(*server.sockets[0].getsockname())

    def close_first(self) -> None:
        """Let the first address refuse connections."""
        self._servers[0].close()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._agents:
            writer.close()

    def end_connections(self) -> None:
        """End them in order: what the agent has sent is still read."""
        for writer in self._agents:
            writer.write_eof()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._agents.add(writer)
        from_broker, to_broker = await asyncio.open_connection(self._served.host, self._served.port)
        down = asyncio.create_task(self._pass(from_broker, writer, self.down, when=self.downward))
        await self._pass(reader, to_broker, self.up)
        down.cancel()
        for end in (writer, to_broker):
            end.close()
        self._agents.remove(writer)

    @staticmethod
    async def _pass(
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kept: bytearray,
        *,
        when: asyncio.Event | None = None,
    ) -> None:
        while data := await reader.read(65_536):
            if when is not None:
                await when.wait()
            kept += data
            writer.write(data)
            await writer.drain()


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker.start(directory=tmp_path_factory.mktemp("broker")) as one:
        yield one


def carried(endpoint: Endpoint) -> tuple[int, int]:
    wire = endpoint.connection.meter.sample()
    return wire.sent, wire.received


@pytest.fixture(autouse=True)
def nobody_asks_for_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the connection that asks the broker for its packet limit: no meter counts it."""

    async def unlimited(address: BrokerAddress, *, topic: str, most: int) -> PacketLimit:
        return UNLIMITED

    monkeypatch.setattr("fedstrata.common.runtime.world.packet_limit", unlimited)


LAYOUT = ModelLayout.build([("weight", (50_000,), Section.PARAMETER)])


class Pair:
    """A parent at the broker and its child behind a relay, in rounds of a model of 200 kB in 4
    chunks.
    """

    def __init__(self, served: BrokerProcess, relay: Relay, child_at: BrokerAddress) -> None:
        self.relay = relay
        self.site = RealSite(BrokerAddress(served.host, served.port))
        self.parent = parent_of(self.site, [CHILD], layout=LAYOUT, transfer=TRANSFER)
        self.child = child_of(RealSite(child_at), CHILD, transfer=TRANSFER)
        self._row, self._out = LAYOUT.empty(), LAYOUT.empty()

    def live(self) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
        """Let both live, the child until the parent has finished."""

        async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
            self._out[:] = await model.whole()
            self._out[0] = 1 + task.key.global_round
            return WorkResult(self._out.data, Work(1, 0.5, 1, 1, 0.0, 0.0))

        parent, child = self.parent, self.child
        begin, serve = partial(living, self.site, parent), partial(living, self.site, child)
        return (
            begin(work=self.finished(), goodbye=partial(parent.farewells, timeout_s=PATIENCE_S)),
            serve(
                work=child.serve(LinkLayouts.plain(LAYOUT), work),
                goodbye=partial(child.farewell, (), timeout_s=PATIENCE_S),
            ),
        )

    async def finished(self) -> None:
        self.over = asyncio.Event()
        await self.over.wait()

    async def play(self, global_round: int) -> None:
        """Play a round, and wait until the child's connection is at rest: the acknowledgement comes
        last.
        """
        await introduced(self.child)  # else it may refuse the first task, and does not count it
        # all new: what the child has would not travel
        LAYOUT.floats(self._row)[:] = 1 + global_round
        await self.parent.round(
            Dispatch(
                global_round, 0, models=[(self._row, [CHILD])], epochs={CHILD: 1}, closing=Closing()
            )
        )
        await until(lambda: self.child.session.participant.state is ParticipantState.DONE)
        await until(lambda: carried(self.child) == self.relay.counts)


@asynccontextmanager
async def pair_of(
    served: BrokerProcess, *, addresses: int = 1
) -> AsyncIterator[tuple[Pair, tuple[asyncio.Task[Any], asyncio.Task[Any]]]]:
    relay = Relay(served)
    first, *others = [await relay.start() for _ in range(addresses)]
    pair = Pair(served, relay, replace(first, others=tuple((one.host, one.port) for one in others)))
    tasks = pair.live()
    try:
        yield pair, tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await relay.close()


@linux
def test_the_wire_bytes_are_those_that_a_relay_counts_over_reconnections_too(
    served: BrokerProcess,
) -> None:
    async def run() -> None:
        async with pair_of(served) as (pair, (parent, child)):
            relay, end = pair.relay, pair.child
            for global_round in range(3):
                await pair.play(global_round)
                if global_round < 2:
                    relay.end_connections()
                    expected = global_round + 1
                    await until(
                        lambda end=end, n=expected: (
                            end.connection.reconnects == n and end.connection.up
                        )
                    )
            assert relay.connections == 3 and min(relay.counts) > 3 * LAYOUT.row_bytes
            reported = pair.parent.ledger.links()[CHILD].wire
            assert 0 < reported.sent <= relay.counts[0] and 0 < reported.received <= relay.counts[1]
            pair.over.set()
            await asyncio.gather(parent, child)
            await until(lambda: relay.up.endswith(b"\xe0\x00"))  # DISCONNECT
            wire, counted = end.connection.meter.sample(), pair.relay.counts
            # what left with the end is not known to have arrived
            assert counted[0] - 16 <= wire.sent <= counted[0]
            assert counted[1] == wire.received
            assert wire.connections == 3 and wire.measured
            reported = pair.parent.ledger.links()[CHILD].wire
            assert (
                counted[0] - 400 < reported.sent < counted[0]
                and counted[1] - 500 < reported.received <= counted[1]
            )

    real(run())


@linux
def test_the_wire_bytes_are_those_of_all_addresses_that_a_connection_has_used(
    served: BrokerProcess,
) -> None:
    async def run() -> None:
        async with pair_of(served, addresses=2) as (pair, _):
            relay, connection = pair.relay, pair.child.connection
            await pair.play(0)
            first, before = connection.attempts.address, relay.counts
            relay.close_first()
            relay.end_connections()
            await until(lambda: connection.reconnects == 1 and connection.up)
            await pair.play(1)  # to its end: until the counts agree
            assert connection.attempts.address.port == connection.address.others[0][1] != first.port
            assert min(relay.counts) > min(before) + LAYOUT.row_bytes
            wire = connection.meter.sample()
            assert (wire.connections, relay.connections, wire.measured) == (2, 2, True)

    real(run())


CONNECT, CONNACK, PUBLISH, PUBACK = range(1, 5)
SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP = range(8, 14)


def packets(stream: bytes) -> Iterator[tuple[int, str, int]]:
    """Return (first byte, topic of a PUBLISH, size) for each MQTT packet of a stream."""
    at = 0
    while at < len(stream):
        body, length, shift = at + 1, 0, 0
        while True:
            length |= (stream[body] & 127) << shift
            shift, body = shift + 7, body + 1
            if stream[body - 1] < 128:
                break
        topic = ""
        if stream[at] >> 4 == PUBLISH:
            topic = stream[
                body + 2 : body + 2 + int.from_bytes(stream[body : body + 2], "big")
            ].decode()
        yield stream[at], topic, body + length - at
        at = body + length
    assert at == len(stream)


@linux
def test_what_the_wire_has_more_than_the_messages_are_mqtts_own_packets(
    served: BrokerProcess,
) -> None:
    async def run() -> None:
        async with pair_of(served) as (pair, _):
            for global_round in range(3):
                await pair.play(global_round)
            wire = pair.child.connection.meter.sample()
            link = pair.parent.ledger.links()[CHILD]
            reported = pair.child.session.link.counters.traffic(PARENT)
            assert (link.received, reported.received) == (reported.sent, reported.received)
            qos_1 = {}
            more: dict[str, Counter[int]] = {}
            for name, stream, carried_bytes, message_bytes in (
                ("up", pair.relay.up, wire.sent, reported.sent),
                ("down", pair.relay.down, wire.received, reported.received),
            ):
                found = list(packets(bytes(stream)))
                ours = [size for _, topic, size in found if "/inbox/" in topic or "/blob/" in topic]
                assert sum(ours) == message_bytes
                rest = [
                    (first >> 4, size)
                    for first, topic, size in found
                    if not topic or topic.endswith("/state") or "/ask/" in topic
                ]
                assert carried_bytes - message_bytes == sum(size for _, size in rest)
                assert 0 < carried_bytes - message_bytes < 2000 + 4 * len(ours)
                more[name] = Counter(kind for kind, _ in rest)
                qos_1[name] = sum(
                    first >> 4 == PUBLISH and first >> 1 & 3 == 1 for first, _, _ in found
                )
            assert set(more["up"]) <= {CONNECT, SUBSCRIBE, UNSUBSCRIBE, PUBACK, PINGREQ, PUBLISH}
            assert set(more["down"]) <= {CONNACK, SUBACK, UNSUBACK, PUBACK, PINGRESP, PUBLISH}
            assert more["up"][PUBACK] == qos_1["down"] == 0 and more["down"][PUBACK] == qos_1["up"]
            assert more["up"][CONNECT] == more["down"][CONNACK] == 1
            assert more["up"][SUBSCRIBE] == more["down"][SUBACK]
            assert more["up"][UNSUBSCRIBE] == more["down"][UNSUBACK]

    real(run())


@linux
def test_refused_connections_are_counted_too() -> None:
    async def run() -> None:
        asked: list[bytes] = []

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            login = await reader.read(65_536)
            own = f"{CHILD}-".encode() in login  # else it is a trial of what the broker lacks
            if own and len(asked) == 1:
                server.close()  # who comes now finds nobody
            # the server is unavailable: a refused login would end the child
            writer.write(b"\x20\x02\x00\x03")
            rest = await reader.read()
            if own:
                asked.append(login + rest)
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        child = child_of(
            RealSite(BrokerAddress(*server.sockets[0].getsockname())), CHILD, transfer=TRANSFER
        )
        running = asyncio.create_task(child.run(connect_timeout_s=PATIENCE_S))
        await until(lambda: child.connection.reconnects > 2 and len(asked) == 2)
        running.cancel()
        await asyncio.wait((running,))
        wire = child.connection.meter.sample()
        assert wire == replace(
            wire, sent=sum(map(len, asked)), received=8, connections=2, unmeasured=0
        )

    real(run())


def test_a_child_is_received_though_its_acknowledgements_wait_behind_a_chunk(
    served: BrokerProcess,
) -> None:
    async def run() -> None:
        async with pair_of(served) as (pair, _):
            await pair.play(0)
            pair.relay.downward.clear()
            for _ in range(100):
                pair.child.session.link.outbox.send(PARENT, Gone("f" * 16), pair.child.now())
            pair.child.wake()
            sent = pair.child.session.link.counters.traffic(PARENT).sent
            await until(lambda: pair.parent.session.link.counters.traffic(CHILD).received == sent)
            pair.relay.downward.set()

    real(run())


# links.csv


def a_link(wire: TcpStats) -> Traffic:
    return Traffic(10_000, 10_100, 200, 300, 20_000, 20_100, 400, 500, wire=wire)


def links_of(folder: RunFolder) -> dict[tuple[str, str, str], dict[str, str]]:
    return {(row["from"], row["to"], row["kind"]): row for row in table(folder.path / "links.csv")}


def reported(folder: RunFolder) -> object:
    return json.loads((folder.path / "manifest.json").read_text()).get("wire_bytes")


MEASURED = TcpStats(21_000, 12_000, 1448, 40, 50, 2, 1, 0, 0, 2500, 1250)
BLIND = TcpStats(connections=1, unmeasured=1)


def test_links_csv_shows_the_three_counts_side_by_side(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    account = Account()
    ledger = Ledger([PARENT], account, wire=lambda: MEASURED, below=BELOW)
    folder.write_of_links(ledger)()
    assert reported(folder) is None and links_of(folder)["cloud", PARENT, "all"]["wire_bytes"] == ""
    account.add(PARENT, "received", message=20_600, model=20_000, control=400)
    down = Traffic(received_model_payload=10_000, received_model_message=10_200, wire=MEASURED)
    ledger.enter(PARENT, "s", link=down, below=(Traffic(wire=MEASURED),))
    ledger.enter_reports(PARENT, "s", [ChildReport(CHILD, traffic=a_link(MEASURED))])
    ledger.measured[PARENT] = Measured(down=2e6, down_bytes=1000)
    folder.write_of_links(ledger)()
    assert reported(folder) == records.MEASURED
    table = links_of(folder)
    assert len(table) == 2 * (3 + 3 + 1 + 1)
    down_line, up_line = (
        ",".join(table[link].values())
        for link in (("cloud", PARENT, "all"), (CHILD, PARENT, "all"))
    )
    assert down_line == "wan,cloud,institution-0,all,10000,10200,12000,10,50,,,2.5,1.25,16,1000"
    assert up_line == "lan,device-0,institution-0,all,20400,20600,21000,2.941,40,1448,2,2.5,1.25,,"
    for kind in ("model", "control"):  # TCP knows no kinds
        row = table[CHILD, PARENT, kind]
        assert row["payload_bytes"] and not row["wire_bytes"] and not row["overhead_percent"]
    assert (
        table["cloud", "broker", "broker"]["wire_bytes"]
        == table[PARENT, "broker", "broker"]["wire_bytes"]
        == "21000"
    )
    assert table["broker", "cloud", "broker"]["wire_bytes"] == "12000"
    assert (
        table["broker", "cloud", "broker"]["tier"] == "wan"
        and table["broker", PARENT, "broker"]["tier"] == "lan"
    )


@pytest.mark.parametrize(("lan", "reports"), [(MEASURED, ("not available on this platform: "
"institution-0")),
                                           (BLIND, "not available on this platform")])  # fmt: skip
def test_what_no_kernel_reported_stays_empty_and_the_manifest_reports_it(
    lan: TcpStats, reports: str, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    ledger = Ledger([PARENT], Account(), wire=lambda: BLIND, below=BELOW)
    ledger.enter(PARENT, "s", link=a_link(BLIND), below=(Traffic(wire=BLIND),))
    # half a count is none
    ledger.enter(PARENT, "later", link=a_link(MEASURED), below=(Traffic(wire=MEASURED),))
    ledger.enter_reports(PARENT, "later", [ChildReport(CHILD, traffic=a_link(lan))])
    folder.write_of_links(ledger)()
    assert reported(folder) == reports
    for (source, target, _), row in links_of(folder).items():
        known = CHILD in (source, target) and lan is MEASURED and row["kind"] == "all"
        assert all(
            bool(row[name]) is known
            for name in ("wire_bytes", "segments", "overhead_percent", "rtt_ms")
        ), row


@pytest.mark.parametrize(
    ("wire", "wanted", "overhead"),
    [
        # before 4.19
        (TcpStats(21_000, 12_000, 0, 40, 50, 2, 1, 0, 1, 2500, 1250), (21_000, None, 2), True),
        # counted before the last messages
        (TcpStats(15_000, 9_000, connections=1), (15_000, 0, 0), False),
    ],
)
def test_a_cell_that_nothing_is_known_of_is_empty(
    wire: TcpStats, wanted: tuple[object, ...], overhead: bool
) -> None:
    ledger = Ledger([PARENT], Account(), below=BELOW)
    ledger.enter_reports(PARENT, "s", [ChildReport(CHILD, traffic=a_link(wire))])
    rows = records.link_records(ledger.reports(), ledger.broker(), parse({}))
    (up,) = (row for row in rows if (row.from_, row.kind) == (CHILD, "all"))
    assert (up.wire_bytes, up.retransmitted_bytes, up.retransmitted_segments) == wanted
    assert any(row.overhead_percent for row in rows) is overhead
