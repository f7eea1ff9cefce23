"""The links between simulated processes and brokers, and their disturbances."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedstrata.deploy.simulation.link import (
    ClientStream,
    LinkConditions,
    Packet,
    PacketKind,
    RateQueue,
)
from fedstrata.deploy.simulation.simulated_broker import Routed, SimulatedBroker
from fedstrata.deploy.simulation.simulated_machines import ClientPath, Machines
from fedstrata.deploy.simulation.virtual_loop import VirtualLoop


class SimulatedLink:
    """One process's link to one broker, shared by its connections; it survives restarts of both.

    `path`: the machines at its ends, None: they take no time.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        *,
        conditions: LinkConditions,
        rng: random.Random,
        path: ClientPath | None = None,
    ) -> None:
        self.conditions = conditions
        self.path = path
        self.connections: dict[ClientStream, None] = {}
        self.rng = rng
        self.up = RateQueue(loop, self._depart)
        self.down = RateQueue(loop, self._depart)
        self._rates()

    def change(self, **changes: Any) -> LinkConditions:
        """Change fields of the conditions from now on; return the earlier conditions."""
        before = self.conditions
        self.conditions = replace(self.conditions, **changes)
        self._rates()
        for connection in list(self.connections):
            connection.link_changed(before, self.conditions)
        return before

    def restore(self, conditions: LinkConditions) -> None:
        """Replace all conditions."""
        self.change(**{name: getattr(conditions, name) for name in LinkConditions.__slots__})

    def _rates(self) -> None:
        conditions = self.conditions
        self.up.change(rate=conditions.up_rate, paused=conditions.up_is_cut)
        self.down.change(rate=conditions.down_rate, paused=conditions.down_is_cut)

    def _depart(self, packet: Packet) -> None:
        conditions = self.conditions
        rng = self.rng
        flight = packet.flight
        if packet.left is not None:
            packet.left(packet)
        is_message = packet.kind is PacketKind.PUBLISH
        may_fail = is_message and packet.qos == 0
        if may_fail and conditions.loss and rng.random() < conditions.loss:
            return  # as if the broker dropped it: its bytes are never sent
        if (
            conditions.mtu_bytes is not None
            and packet.size > conditions.mtu_bytes
            and flight.stuck is None
        ):
            flight.stuck = packet
            flight.add(packet, delay_s=conditions.delay_s)
            for connection in list(self.connections):
                connection.link_changed(conditions, conditions)
            return
        if is_message and conditions.duplication and rng.random() < conditions.duplication:
            times = 2
        else:
            times = 1
        if flight.stuck is None:
            flight.departed += times * packet.size
        for _ in range(times):
            if may_fail and conditions.reordering and rng.random() < conditions.reordering:
                flight.add_late(
                    packet, delay_s=conditions.delay_s + rng.random() * conditions.reorder_s
                )
            else:
                flight.add(packet, delay_s=conditions.delay_s)


@dataclass(slots=True)
class SimulatedNetwork:
    """The brokers by name, and the links by process and broker's name.

    A broker may have several names, as a server has addresses: then a process has a link to each.

    filters: called with each message; False drops it    hooks: called with each routed message
    machines: where processes and brokers run, None: they take no time
    """

    loop: VirtualLoop
    seed: int
    conditions: LinkConditions = field(default_factory=LinkConditions)
    brokers: dict[str, SimulatedBroker] = field(default_factory=dict)
    links: dict[tuple[str, str], SimulatedLink] = field(default_factory=dict)
    filters: list[Callable[[Routed], bool]] = field(default_factory=list)
    hooks: list[Callable[[Routed], None]] = field(default_factory=list)
    machines: Machines | None = None

    def add_broker(self, name: str) -> SimulatedBroker:
        """Start a broker."""
        broker = SimulatedBroker(name, accepts=self._accepts, routed=self._routed)
        self.brokers[name] = broker
        return broker

    def link(self, process: str, broker: str) -> SimulatedLink:
        """Return a process's link to a broker, with its own random generator."""
        found = self.links.get((process, broker))
        if found is None:
            rng = random.Random(f"{self.seed} link {process} {broker}")
            path = None if self.machines is None else ClientPath(self.machines, process, broker)
            found = SimulatedLink(self.loop, conditions=self.conditions, rng=rng, path=path)
            self.links[process, broker] = found
        return found

    def _accepts(self, message: Routed) -> bool:
        return all(accepts(message) for accepts in self.filters)

    def _routed(self, message: Routed) -> None:
        for hook in list(self.hooks):
            hook(message)
