"""The environment of one simulated process, and its connections: the `World` and `Connection` of
the simulation.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections.abc import Callable
from typing import Any, Final

from fedstrata.common.accounting.counters import packet_bytes
from fedstrata.common.accounting.traffic import TcpStats
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.attempts import Attempts
from fedstrata.common.net.bulk import CLOSED, Body, Place
from fedstrata.common.net.connection import LASTED_S, Handlers
from fedstrata.common.net.packet_limit import UNLIMITED, PacketLimit
from fedstrata.common.runtime.world import Connection, nothing
from fedstrata.deploy.simulation.link import BrokenConnection, ClientStream, Packet, PacketKind
from fedstrata.deploy.simulation.simulated_broker import REFUSED, SessionWill, SimulatedBroker
from fedstrata.deploy.simulation.simulated_machines import SimulatedProcess
from fedstrata.deploy.simulation.simulated_network import SimulatedLink, SimulatedNetwork

CONNECT_TIMEOUT_S: Final = 10.0  # aiomqtt's
ROUND_TRIPS: Final = 2  # TCP's and MQTT's


class SimulatedConnection:
    """One MQTT connection that reconnects by itself, like
    `common.net.connection.BrokerConnection`.
    """

    def __init__(
        self,
        address: BrokerAddress,
        handlers: Handlers,
        *,
        reach: Callable[[BrokerAddress], tuple[SimulatedBroker, SimulatedLink]],
        process: SimulatedProcess,
        client_id: str,
        keepalive_s: int,
        will: tuple[str, bytes] | None = None,
    ) -> None:
        self.address = address
        self.reconnects = 0
        self.meter = SimulatedMeter(self)
        self._reach = reach
        self.broker, self.link = reach(address)
        self.attempts = Attempts(address, draw=self.link.rng.uniform)
        self.process = process
        self.client_id = client_id
        self.keepalive_s = keepalive_s
        self.will = SessionWill(*will) if will else None
        self.context = contextvars.copy_context()
        self.stream: ClientStream | None = None
        self._handlers = handlers
        self._ready = False
        self._subscribing = 0
        self._accepted = False
        self._early: list[Packet] = []
        self._unacknowledged: dict[object, Callable[[list[int]], None]] = {}
        self._leaving: dict[Packet, Callable[[], None]] = {}
        self._flushed: asyncio.Future[None] | None = None

    @property
    def user(self) -> object:
        """The receiver of the messages: an endpoint, or another client."""
        return getattr(self._handlers.received, "__self__", None)

    @property
    def up(self) -> bool:
        """Whether the connection is open."""
        return self.stream is not None

    async def run(self, *, connect_timeout_s: float) -> None:
        """Keep the connection open until cancelled. Raises ConnectionFailed, and errors of the
        callbacks.
        """
        loop = asyncio.get_running_loop()
        self.attempts.begin(loop.time(), timeout_s=connect_timeout_s)
        while True:
            begun = math.inf
            self._subscribing = 0
            self._accepted = False
            try:
                stream = await self._open()
                self.stream = stream
                begun = loop.time()
                try:
                    await self._handlers.connected()
                    self._ready = True
                    early = self._early
                    self._early = []
                    for packet in early:
                        self._deliver(packet)
                    await stream.ended
                finally:
                    self._drop(stream)
            except BrokenConnection as error:
                now = loop.time()
                reason = str(error)
                pause_s = self.attempts.failed(
                    reason,
                    now=now,
                    accepted=self._accepted,
                    lasted=now >= begun + LASTED_S,
                    thrown_out=begun < math.inf and reason == CLOSED,
                )
            self.reconnects += 1
            await asyncio.sleep(pause_s)

    def publish(self, topic: str, body: bytes, *, qos: int, retain: bool = False) -> None:
        """Send a message, or drop it without a connection."""
        if self.stream is not None:
            size = packet_bytes(topic, len(body), qos=qos)
            key = self._expect_acknowledgement(lambda codes: None) if qos else None
            self.stream.send(
                PacketKind.PUBLISH,
                size,
                topic=topic,
                body=body,
                qos=qos,
                retain=retain,
                content=key,
            )

    def publish_body(self, topic: str, body: Body, *, done: Callable[[], None]) -> None:
        """Send a large message; `done` is called later, when it was sent or the connection
        broke.
        """
        if self.stream is None:
            done()
            return
        size = packet_bytes(topic, len(body.view), qos=0)
        packet = self.stream.packet(
            PacketKind.PUBLISH, size, topic=topic, body=body, left=self._left
        )
        self._leaving[packet] = done
        self.stream.put(packet)

    def subscribe(
        self,
        topics: list[str],
        *,
        qos: int,
        refused: Callable[[str], None] = lambda topic: None,
        acknowledged: Callable[[], None] = nothing,
        optional: bool = False,
    ) -> None:
        """Subscribe without waiting."""

        def answered(codes: list[int]) -> None:
            self._subscribing -= not optional
            self._accepted = self._accepted or self._subscribing == 0
            for topic, code in zip(topics, codes, strict=False):
                if code >= REFUSED:
                    refused(topic)
            acknowledged()

        if self.stream is not None and topics:
            size = 4 + sum(3 + len(topic) for topic in topics)
            key = self._expect_acknowledgement(answered)
            self._subscribing += not optional
            self.stream.send(PacketKind.SUBSCRIBE, size, body=list(topics), qos=qos, content=key)

    def unsubscribe(self, topics: list[str]) -> None:
        """Unsubscribe without waiting."""
        if self.stream is not None and topics:
            size = 4 + sum(2 + len(topic) for topic in topics)
            key = self._expect_acknowledgement(lambda codes: None)
            self.stream.send(PacketKind.UNSUBSCRIBE, size, body=list(topics), content=key)

    async def flush(self) -> None:
        """Wait until everything is acknowledged or the connection breaks."""
        while self._unacknowledged:
            if self._flushed is None:
                self._flushed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._flushed)

    def arrived(self, packet: Packet) -> None:
        """Process a packet from the broker."""
        if packet.kind is PacketKind.ACKNOWLEDGEMENT:
            answered = self._unacknowledged.pop(packet.content, None)
            if answered is not None:
                answered(packet.body)
            self._settle()
        elif (place := self._place(packet)) is not None:
            if place.view is not None:
                place.view[:] = packet.body
            self._handlers.landed(packet.topic, place)
        elif self._ready:
            self._deliver(packet)
        else:
            self._early.append(packet)  # aiomqtt queues them until `connected` has returned

    def _place(self, packet: Packet) -> Place | None:
        """Return the place of a message, as `PacketReader` chooses it."""
        if packet.qos == 0 and packet.body:
            place = self._handlers.find_place(packet.topic, len(packet.body))
        else:
            place = None
        if place is not None and place.view is not None and packet.retain:
            return None
        return place

    def detach_bodies(self) -> None:
        """Copy bodies that are not sent yet: the owner may overwrite their memory from now on."""
        for packet in self._leaving:
            packet.body.detach()

    async def _open(self) -> ClientStream:
        self.broker, self.link = self._reach(self.attempts.address)
        link = self.link
        loop = asyncio.get_running_loop()
        if not self._is_cut():
            await asyncio.sleep(2 * ROUND_TRIPS * link.conditions.delay_s)
        if self._is_cut():
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            raise BrokenConnection("operation timed out")
        if not self.broker.up:
            raise BrokenConnection("connection refused")
        self._ready = False
        self._early = []
        return ClientStream(self, loop=loop)

    def _is_cut(self) -> bool:
        return self.link.conditions.up_is_cut or self.link.conditions.down_is_cut

    def _deliver(self, packet: Packet) -> None:
        self._handlers.received(packet.topic, packet.body, packet.retain)

    def _left(self, packet: Packet) -> None:
        """Copy a large body as it leaves: its owner may overwrite the memory from now on."""
        packet.body = bytes(packet.body.view)
        done = self._leaving.pop(packet, None)
        if done is not None:
            asyncio.get_running_loop().call_soon(done, context=self.context)

    def _expect_acknowledgement(self, answered: Callable[[list[int]], None]) -> object:
        key = object()
        self._unacknowledged[key] = answered
        return key

    def _settle(self) -> None:
        if self._flushed is not None and not self._unacknowledged:
            if not self._flushed.done():
                self._flushed.set_result(None)
            self._flushed = None

    def _drop(self, stream: ClientStream) -> None:
        self.stream = None
        self.meter.add(stream)
        stream.close()
        self._unacknowledged.clear()
        self._settle()
        self.detach_bodies()
        leaving = self._leaving
        self._leaving = {}
        for done in leaving.values():
            done()
        self._handlers.lost()


class SimulatedMeter:
    """Byte counts of a simulated connection; see `common.accounting.tcp.WireMeter`."""

    def __init__(self, connection: SimulatedConnection) -> None:
        self._connection = connection
        self._before = TcpStats()

    def add(self, stream: ClientStream) -> None:
        """Add the bytes of a stream that ends."""
        self._before += stream.carried()

    def sample(self) -> TcpStats:
        """Return the bytes of all connections so far."""
        stream = self._connection.stream
        if stream is None:
            return self._before
        return self._before + stream.carried()

    def received(self) -> int:
        """Return the bytes received on the current connection, including those of an incomplete
        packet.
        """
        stream: Any = self._connection.stream
        return -1 if stream is None else stream.received_bytes()


NOISE_DRAWN: Final = 1021  # a prime, so that chunks begin at different offsets of the pattern
EPOCH_S: Final = 1_700_000_000.0  # Unix seconds where the virtual time is 0


class SimulatedWorld:
    """A process's simulated network, tokens drawn from the seed, and a wall clock `clock_offset_s`
    beside the lab's.

    The host of a broker's address is the broker's name, or one of its names. `process` is set once
    it exists.
    """

    process: SimulatedProcess

    def __init__(
        self,
        network: SimulatedNetwork,
        name: str,
        *,
        generation: int = 0,
        clock_offset_s: float = 0.0,
    ) -> None:
        self._network = network
        self._name = name
        self.clock_offset_s = clock_offset_s
        self.connections: list[SimulatedConnection] = []
        self._rng = random.Random(f"{network.seed} process {name} {generation}")

    def connection(
        self,
        address: BrokerAddress,
        handlers: Handlers,
        *,
        client_id: str,
        keepalive_s: int,
        will: tuple[str, bytes] | None = None,
    ) -> Connection:
        """Return a connection to a simulated broker."""
        connection = SimulatedConnection(
            address,
            handlers,
            reach=self._reach,
            process=self.process,
            client_id=client_id,
            keepalive_s=keepalive_s,
            will=will,
        )
        self.connections.append(connection)
        return connection

    def _reach(self, address: BrokerAddress) -> tuple[SimulatedBroker, SimulatedLink]:
        return self._network.brokers[address.host], self._network.link(self._name, address.host)

    async def packet_limit(self, address: BrokerAddress, *, topic: str, most: int) -> PacketLimit:
        """Return the broker's packet limit, as if it reported it."""
        most_bytes = self._network.brokers[address.host].packet_limit
        if most_bytes is None:
            return UNLIMITED
        return PacketLimit(most_bytes, most_bytes + 1)

    def token(self, nbytes: int) -> str:
        """Return random bytes as hexadecimal digits."""
        return self._rng.randbytes(nbytes).hex()

    def wall(self) -> float:
        """Return Unix seconds by this process's clock."""
        return EPOCH_S + self.clock_offset_s + self._network.loop.now

    def noise(self, nbytes: int) -> bytes:
        """Return a repeated pattern of random bytes: fully random ones would take most of the
        simulation's time.
        """
        drawn = self._rng.randbytes(NOISE_DRAWN)
        return (drawn * (nbytes // NOISE_DRAWN + 1))[:nbytes]
