"""Packets between a client and a broker, and the two stages of a link: a rate, then a delay."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from deploy.simulation.loop import VirtualLoop


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
    """One MQTT packet of `size` bytes. `content` depends on the kind; `left` is called when the packet was sent.

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
    """Queue that sends packets one after another, each in `size / rate` seconds; a new rate applies at once."""

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
            self._since, self._sent = self._loop.time(), 0.0
            if self._rate is None and not self._paused:
                self._depart(packet)
                return
        packet.flight.waiting += 1
        self._waiting.append(packet)
        if len(self._waiting) == 1:
            self._plan()

    def change(self, *, rate: float | None, paused: bool) -> None:
        """Change the rate, bytes per second, None = unlimited; or pause."""
        now = self._loop.time()
        if self._waiting:
            self._sent, self._since = self._sent_by(now), now
        self._rate, self._paused = rate, paused
        self._plan()

    def sent_of(self, flight: Flight) -> int:
        """Return the sent bytes of this direction's current packet."""
        if not self._waiting or self._waiting[0].flight is not flight:
            return 0
        return int(self._sent_by(self._loop.time()))

    def truncate(self, flight: Flight, *, keep_bytes: int) -> None:
        """Drop the packets of one direction beyond its first `keep_bytes`, which the kernel has already accepted."""
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
            self._timer = self._loop.call_at(due, self._finish, due, context=Context())

    def _finish(self, due: float) -> None:
        self._timer = None
        self._since, self._sent = due, 0.0
        self._depart_first()
        if self._timer is None:  # else the departure changed the queue and set a new timer
            self._plan()

    def _depart_first(self) -> None:
        packet = self._waiting.popleft()
        packet.flight.waiting -= 1
        self._depart(packet)


class Flight:
    """One direction of a connection after the rate stage: packets arrive after a delay, in the order of departure.

    held: nothing arrives for now, as in a partition    waiting: number of its packets in the rate queue
    stuck: a packet too large for the path; neither it nor later ones arrive    departed: bytes that began the delay
    """

    def __init__(self, loop: VirtualLoop, arrive: Callable[[Packet], None], *, context: Context) -> None:
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
        self._last = max(self._last, self._loop.time() + delay_s)
        self._flying.append((self._last, packet))
        self._plan()

    def add_late(self, packet: Packet, *, delay_s: float) -> None:
        """Schedule the arrival of a packet out of order."""
        self._loop.call_later(delay_s, self._arrive_late, packet, context=self._context)

    def release(self, *, delay_s: float) -> None:
        """Schedule the arrival of packets that are no longer held or stuck, `delay_s` from now."""
        earliest = self._loop.time() + delay_s
        self._flying = deque((max(at, earliest), packet) for at, packet in self._flying)
        self._last = max(self._last, earliest) if self._flying else 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._plan()

    def _plan(self) -> None:
        if self._timer is None and self._flying and self._flying[0][1] is not self.stuck:
            self._timer = self._loop.call_at(self._flying[0][0], self._land, context=self._context)

    def _land(self) -> None:
        self._timer = None
        if self.held:
            return
        now = self._loop.time()
        while self._flying and self._flying[0][0] <= now and self._flying[0][1] is not self.stuck:
            self._arrive(self._flying.popleft()[1])
        self._plan()

    def _arrive_late(self, packet: Packet) -> None:
        if not self.held and self.stuck is None:
            self._arrive(packet)
