"""The links between simulated processes and brokers, and what can happen on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from deploy.simulation.broker import Routed, SimulatedBroker
from deploy.simulation.loop import VirtualLoop
from deploy.simulation.packets import Packet, PacketKind, RateQueue


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """How a link between a process and a broker is. Rates in bytes per second of MQTT, None without a limit.

    `loss` is the share of QoS 0 messages that vanish, each way; `duplication` that of messages which arrive twice;
    `reordering` that of QoS 0 messages which arrive up to `reorder_s` late. Packets of more than `mtu_bytes` never
    arrive, nor does what follows them. `cut`: nothing arrives, as in a partition; TCP sends it again afterwards.
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


class LinkEnd(Protocol):
    """A connection on a link."""

    def link_changed(self, before: LinkConditions, now: LinkConditions) -> None:
        """Adapt to new conditions."""


class SimulatedLink:
    """One process's link to one broker, shared by its connections, over restarts of both."""

    def __init__(self, loop: VirtualLoop, *, conditions: LinkConditions, draw: random.Random) -> None:
        self.conditions = conditions
        self.connections: dict[LinkEnd, None] = {}
        self.draw = draw
        self.up = RateQueue(loop, self._depart)
        self.down = RateQueue(loop, self._depart)
        self._rates()

    def change(self, **changes: Any) -> LinkConditions:
        """Change fields of the conditions, from now on, and return what they were."""
        before, self.conditions = self.conditions, replace(self.conditions, **changes)
        self._rates()
        for connection in list(self.connections):
            connection.link_changed(before, self.conditions)
        return before

    def restore(self, conditions: LinkConditions) -> None:
        """Change all conditions."""
        self.change(**{name: getattr(conditions, name) for name in LinkConditions.__slots__})

    def _rates(self) -> None:
        conditions = self.conditions
        self.up.change(rate=conditions.up_rate, paused=conditions.cut)
        self.down.change(rate=conditions.down_rate, paused=conditions.cut)

    def _depart(self, packet: Packet) -> None:
        conditions, draw, flight = self.conditions, self.draw, packet.flight
        if packet.left is not None:
            packet.left(packet)
        is_message = packet.kind is PacketKind.PUBLISH
        may_fail = is_message and packet.qos == 0
        if may_fail and conditions.loss and draw.random() < conditions.loss:
            return
        if conditions.mtu_bytes is not None and packet.size > conditions.mtu_bytes and flight.stuck is None:
            flight.stuck = packet
            flight.add(packet, delay_s=conditions.delay_s)
            for connection in list(self.connections):
                connection.link_changed(conditions, conditions)
            return
        times = 2 if is_message and conditions.duplication and draw.random() < conditions.duplication else 1
        for _ in range(times):
            if may_fail and conditions.reordering and draw.random() < conditions.reordering:
                flight.add_late(packet, delay_s=conditions.delay_s + draw.random() * conditions.reorder_s)
            else:
                flight.add(packet, delay_s=conditions.delay_s)


@dataclass(slots=True)
class SimulatedNetwork:
    """The brokers by name, and the links by process and broker.

    `filters` may each refuse a message of any broker by returning False; `hooks` are called with each that is routed.
    """

    loop: VirtualLoop
    seed: int
    conditions: LinkConditions = field(default_factory=LinkConditions)
    brokers: dict[str, SimulatedBroker] = field(default_factory=dict)
    links: dict[tuple[str, str], SimulatedLink] = field(default_factory=dict)
    filters: list[Callable[[Routed], bool]] = field(default_factory=list)
    hooks: list[Callable[[Routed], None]] = field(default_factory=list)

    def add_broker(self, name: str) -> SimulatedBroker:
        """Start a broker."""
        broker = SimulatedBroker(name, accepts=self._accepts, routed=self._routed)
        self.brokers[name] = broker
        return broker

    def link(self, process: str, broker: str) -> SimulatedLink:
        """Return a process's link to a broker; its random numbers are its own."""
        found = self.links.get((process, broker))
        if found is None:
            draw = random.Random(f"{self.seed} link {process} {broker}")
            found = self.links[process, broker] = SimulatedLink(self.loop, conditions=self.conditions, draw=draw)
        return found

    def _accepts(self, message: Routed) -> bool:
        return all(accepts(message) for accepts in self.filters)

    def _routed(self, message: Routed) -> None:
        for hook in list(self.hooks):
            hook(message)
