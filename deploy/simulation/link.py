"""A link of a client: its conditions, packets through a rate and a delay, and the TCP connections
on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, cast

from fedstrata.common.accounting.counters import packet_bytes
from fedstrata.common.accounting.traffic import TcpStats
from fedstrata.common.net.bulk import CLOSED
from fedstrata.deploy.simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from fedstrata.deploy.simulation.simulated_world import SimulatedConnection


class PacketKind(Enum):
    """The kinds of packets that the simulation distinguishes."""

    PUBLISH = auto()
    ACKNOWLEDGEMENT = auto()
    SUBSCRIBE = auto()
    UNSUBSCRIBE = auto()
    DISCONNECT = auto()
    CLOSED = auto()  # TCP's FIN


@dataclass(slots=True, eq=False)
class Packet:
    """One MQTT packet of `size` bytes. `content` depends on the kind; `left` is called when the
    packet was sent.

    `link`: where it goes from a host's network interface, if that has a limit.
    """

    kind: PacketKind
    size: int
    flight: Flight
    topic: str = ""
    body: Any = b""
    qos: int = 0
    retain: bool = False
    content: Any = None
    left: Callable[[Packet], None] | None = None
    link: RateQueue | None = None


class RateQueue:
    """Queue that sends packets one after another, each in `size / rate` seconds; a new rate applies
    at once.
    """

    def __init__(self, loop: VirtualLoop, depart: Callable[[Packet], None]) -> None:
        self._loop = loop
        self._depart = depart
        self._rate: float | None = None
        self._paused = False
        self._waiting: deque[Packet] = deque()
        self._sent = 0.0  # of the first packet, at `_since`
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, packet: Packet) -> None:
        """Append a packet to the queue."""
        if not self._waiting:
            self._since = self._loop.now
            self._sent = 0.0
            if self._rate is None and not self._paused:
                self._depart(packet)
                return
        packet.flight.waiting += 1
        self._waiting.append(packet)
        if len(self._waiting) == 1:
            self._plan()

    def change(self, *, rate: float | None, paused: bool) -> None:
        """Change the rate, bytes per second, None = unlimited; or pause."""
        now = self._loop.now
        if self._waiting:
            self._sent = self._sent_by(now)
            self._since = now
        self._rate = rate
        self._paused = paused
        self._plan()

    def sent_of(self, flight: Flight) -> int:
        """Return the sent bytes of this direction's current packet."""
        if not self._waiting or self._waiting[0].flight is not flight:
            return 0
        return int(self._sent_by(self._loop.now))

    def truncate(self, flight: Flight, *, keep_bytes: int) -> None:
        """Drop the packets of one direction beyond its first `keep_bytes`, which the kernel has
        already accepted.
        """
        kept: deque[Packet] = deque()
        room = keep_bytes
        for packet in self._waiting:
            if packet.flight is flight:
                room -= packet.size
            if packet.flight is not flight or room >= 0 or not kept:
                kept.append(packet)
            else:
                flight.waiting -= 1
        self._waiting = kept

    def _sent_by(self, now: float) -> float:
        if self._paused or self._rate is None:
            return self._sent
        return min(self._sent + (now - self._since) * self._rate, self._waiting[0].size)

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._rate is None and not self._paused:
            self._depart_first()
        if self._waiting and self._rate is not None and not self._paused:
            due = self._since + (self._waiting[0].size - self._sent) / self._rate
            self._timer = self._loop.call_on(due, self._finish, due, context=Context())

    def _finish(self, due: float) -> None:
        self._timer = None
        self._since = due
        self._sent = 0.0
        self._depart_first()
        if self._timer is None:  # else the departure changed the queue and set a new timer
            self._plan()

    def _depart_first(self) -> None:
        packet = self._waiting.popleft()
        packet.flight.waiting -= 1
        self._depart(packet)


class Flight:
    """One direction of a connection after the rate stage: packets arrive after a delay, in the
    order of departure.

    held: nothing arrives for now, as in a partition    waiting: number of its packets in the rate
    queue stuck: a packet too large for the path; neither it nor later ones arrive    departed:
    bytes that began the delay
    """

    def __init__(
        self, loop: VirtualLoop, arrive: Callable[[Packet], None], *, context: Context
    ) -> None:
        self._loop = loop
        self._arrive = arrive
        self._context = context
        self._flying: deque[tuple[float, Packet]] = deque()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.stuck: Packet | None = None
        self.held = False
        self.waiting = self.departed = 0

    def pending(self) -> int:
        """Return the number of packets that have not arrived."""
        return self.waiting + len(self._flying)

    def add(self, packet: Packet, *, delay_s: float) -> None:
        """Schedule the arrival of a packet `delay_s` from now, but not before the previous one."""
        self._last = max(self._last, self._loop.now + delay_s)
        self._flying.append((self._last, packet))
        self._plan()

    def add_late(self, packet: Packet, *, delay_s: float) -> None:
        """Schedule the arrival of a packet out of order."""
        self._loop.call_on(
            self._loop.now + delay_s, self._arrive_late, packet, context=self._context
        )

    def release(self, *, delay_s: float) -> None:
        """Schedule the arrival of packets that are no longer held or stuck, `delay_s` from now."""
        earliest = self._loop.now + delay_s
        self._flying = deque((max(at, earliest), packet) for at, packet in self._flying)
        self._last = max(self._last, earliest) if self._flying else 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._plan()

    def _plan(self) -> None:
        if self._timer is None and self._flying and self._flying[0][1] is not self.stuck:
            self._timer = self._loop.call_on(self._flying[0][0], self._land, context=self._context)

    def _land(self) -> None:
        self._timer = None
        if self.held:
            return
        now = self._loop.now
        while self._flying and self._flying[0][0] <= now and self._flying[0][1] is not self.stuck:
            self._arrive(self._flying.popleft()[1])
        self._plan()

    def _arrive_late(self, packet: Packet) -> None:
        if not self.held and self.stuck is None:
            self._arrive(packet)


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """Conditions of a link between a process and a broker.

    up_rate, down_rate: bytes per second of MQTT, None = unlimited    delay_s: one-way delay
    loss: share of QoS 0 messages that are lost, in each direction    duplication: share of messages
    that arrive twice reordering: share of QoS 0 messages that arrive up to `reorder_s` late
    mtu_bytes: larger packets never arrive, nor do packets after them
    cut: nothing arrives, as in a partition; TCP retransmits afterwards    cut_up, cut_down: in one
    direction
    """

    up_rate: float | None = None
    down_rate: float | None = None
    delay_s: float = 0.0005
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    reorder_s: float = 2.0
    mtu_bytes: int | None = None
    cut: bool = False
    cut_up: bool = False
    cut_down: bool = False

    @property
    def up_is_cut(self) -> bool:
        """Whether nothing arrives at the broker."""
        return self.cut or self.cut_up

    @property
    def down_is_cut(self) -> bool:
        """Whether nothing arrives at the process."""
        return self.cut or self.cut_down


SOCKET_BYTES: Final = 262_144  # the kernel still sends this much for a process that has ended
ACKNOWLEDGEMENT_BYTES: Final = 4
BROKER_PATIENCE: Final = 1.5  # keep-alive intervals without a packet (MQTT 3.1.1, section 3.1.2.10)


class BrokenConnection(Exception):
    """The connection failed to open, or broke."""


class ClientStream:
    """A connection that lasts until `ended` raises BrokenConnection or an error of a client's
    callback.

    The broker receives nothing from a stopped or cut-off client, and disconnects it after 1.5
    keep-alive intervals. The client times out one to two intervals after the last possible packet
    from the broker.
    """

    def __init__(self, connection: SimulatedConnection, *, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._link = connection.link
        self._broker = connection.broker
        self._path = connection.link.path
        self._loop = cast(VirtualLoop, loop)
        self._up = Flight(self._loop, self._at_broker, context=Context())
        self._down = Flight(self._loop, self._at_client, context=connection.context)
        self._sent = self._got = 0
        self._open = True
        self._last_packet_at = 0.0
        self._broker_check: asyncio.TimerHandle | None = None
        self._client_check: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        self._link.connections[self] = None
        connection.process.sockets[self] = None
        # In an empty context: effects such as a will do not belong to this process.
        self._session = Context().run(
            self._broker.connect, connection.client_id, self, will=connection.will
        )

    # The client's end

    def packet(self, kind: PacketKind, size: int, **fields: Any) -> Packet:
        """Return a packet for the broker."""
        return Packet(kind, size, self._up, **fields)

    def put(self, packet: Packet) -> None:
        """Send a packet to the broker."""
        self._sent += packet.size
        if self._path is None:
            self._link.up.put(packet)
        else:
            self._path.send(packet, self._link.up)

    def send(self, kind: PacketKind, size: int, **fields: Any) -> None:
        """Send a packet to the broker."""
        self.put(self.packet(kind, size, **fields))

    def close(self) -> None:
        """Disconnect after all packets sent so far."""
        if self._open:
            self._leave()
            self.send(PacketKind.DISCONNECT, 2)

    def carried(self) -> TcpStats:
        """Return the byte counts of this connection."""
        return TcpStats(sent=self._sent, received=self.received_bytes(), connections=1)

    def received_bytes(self) -> int:
        """Return the received bytes, including the received part of an incomplete packet and what
        is on its way.
        """
        if not self._open:
            return self._got
        whole = max(self._got, self._down.departed)
        if self._link.conditions.mtu_bytes is not None or self._down.stuck is not None:
            return whole  # no segment of a packet that is too large arrives
        return whole + self._link.down.sent_of(self._down)

    def process_killed(self) -> None:
        """Close the socket of a killed process: the broker publishes the will."""
        if self._open:
            self._connection.detach_bodies()
            self._leave()
            self._link.up.truncate(self._up, keep_bytes=SOCKET_BYTES)
            self._link.up.put(self.packet(PacketKind.CLOSED, 0))

    def process_paused(self) -> None:
        """React to the process being stopped or continued."""
        self._watch()

    def link_changed(self, before: LinkConditions, now: LinkConditions) -> None:
        """Adapt to new conditions of the link."""
        self._up.held = now.up_is_cut
        self._down.held = now.down_is_cut
        for flight in (self._up, self._down):
            if before.mtu_bytes != now.mtu_bytes:
                flight.stuck = None
            if before != now:
                flight.release(delay_s=now.delay_s)
        self._watch()

    # The broker's end

    def pending(self) -> int:
        """Return the number of messages for the client that have not arrived."""
        return self._down.pending()

    def deliver(self, topic: str, body: bytes, *, qos: int, retain: bool) -> None:
        """Send a message to the client."""
        size = packet_bytes(topic, len(body), qos=qos)
        self._put_down(Packet(PacketKind.PUBLISH, size, self._down, topic, body, qos, retain))

    def closed_by_broker(self) -> None:
        """Close the connection; the client notices when the FIN arrives."""
        self._stop_checks(client=False)
        self._link.down.truncate(self._down, keep_bytes=SOCKET_BYTES)
        self._link.down.put(Packet(PacketKind.CLOSED, 0, self._down))
        self._forget()

    def _at_broker(self, packet: Packet) -> None:
        if self._path is None:
            self._process_at_broker(packet)
        else:
            self._path.at_broker(packet, self._process_at_broker)

    def _process_at_broker(self, packet: Packet) -> None:
        broker = self._broker
        session = self._session
        if not session.alive:
            return
        self._last_packet_at = self._loop.now
        if packet.kind is PacketKind.PUBLISH:
            if broker.publish(
                session, packet.topic, packet.body, qos=packet.qos, retain=packet.retain
            ):
                self._acknowledge(packet, [])
        elif packet.kind is PacketKind.SUBSCRIBE:
            self._acknowledge(packet, broker.subscribe(session, packet.body, qos=packet.qos))
        elif packet.kind is PacketKind.UNSUBSCRIBE:
            broker.unsubscribe(session, packet.body)
            self._acknowledge(packet, [])
        elif packet.kind is PacketKind.DISCONNECT:
            broker.disconnect(session)
        else:
            broker.abort(session)

    def _acknowledge(self, packet: Packet, codes: list[int]) -> None:
        size = ACKNOWLEDGEMENT_BYTES + len(codes)
        self._put_down(
            Packet(
                PacketKind.ACKNOWLEDGEMENT,
                size,
                self._down,
                body=codes,
                qos=1,
                content=packet.content,
            )
        )

    def _put_down(self, packet: Packet) -> None:
        if self._path is None:
            self._link.down.put(packet)
        else:
            self._path.send_down(packet, self._link.down)

    def _at_client(self, packet: Packet) -> None:
        if not self._open:
            return
        self._got += packet.size
        if self._path is None:
            self._process_at_client(packet)
        else:
            self._path.at_agent(packet, self._process_at_client, self._connection.context)

    def _process_at_client(self, packet: Packet) -> None:
        if not self._open:
            return
        if packet.kind is PacketKind.CLOSED:
            self._break(CLOSED)
            return
        try:
            self._connection.arrived(packet)
        except Exception as error:  # noqa: BLE001 - raised by `ended`, as by aiomqtt's message loop
            self._end(error)

    # Keep-alive

    def _watch(self) -> None:
        """Start or stop the keep-alive timers of both ends."""
        if not self._open and not self._session.alive:
            return
        keepalive_s = self._connection.keepalive_s
        rng = self._link.rng
        now = self._loop.now
        up_stuck = self._link.conditions.up_is_cut or self._up.stuck is not None
        down_stuck = self._link.conditions.down_is_cut or self._down.stuck is not None
        mute = self._session.alive and (up_stuck or self._connection.process.stopped)
        deaf = self._open and (up_stuck or down_stuck)
        if mute and self._broker_check is None:
            # its last ping
            self._last_packet_at = max(self._last_packet_at, now - rng.random() * keepalive_s)
            self._check_broker()
        elif not mute:
            self._stop_checks(client=False)
        if deaf and self._client_check is None:
            due = now + keepalive_s * (1 + rng.random())
            self._client_check = self._loop.call_on(
                due, self._break, "Keep alive timeout", context=self._connection.context
            )
        elif not deaf:
            self._stop_checks(broker=False)

    def _check_broker(self) -> None:
        due = self._last_packet_at + BROKER_PATIENCE * self._connection.keepalive_s
        if self._loop.now >= due:
            self._broker_check = None
            self._broker.abort(self._session)
        else:
            self._broker_check = self._loop.call_on(due, self._check_broker, context=Context())

    def _stop_checks(self, *, broker: bool = True, client: bool = True) -> None:
        if broker and self._broker_check is not None:
            self._broker_check.cancel()
            self._broker_check = None
        if client and self._client_check is not None:
            self._client_check.cancel()
            self._client_check = None

    def _break(self, reason: str) -> None:
        self._leave()
        self._link.up.put(self.packet(PacketKind.CLOSED, 0))
        self._end(BrokenConnection(reason))

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # mark as retrieved: the client may be cancelled before

    def _leave(self) -> None:
        """Close the client's end."""
        self._open = False
        self._stop_checks(broker=False)
        self._connection.process.sockets.pop(self, None)
        self._forget()

    def _forget(self) -> None:
        """Leave the link once both ends are closed."""
        if not (self._open or self._session.alive):
            self._link.connections.pop(self, None)
