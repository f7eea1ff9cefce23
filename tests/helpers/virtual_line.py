"""A clock and a line in virtual time, and an MQTT broker on it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

DELAY_S = 0.005


class VirtualLine:
    """A clock, what is to happen by it, and a line that loses, duplicates and reorders."""

    def __init__(
        self,
        *,
        seed: int = 0,
        loss: float = 0.0,
        duplicates: float = 0.0,
        delay_s: float = DELAY_S,
        jitter_s: float = 0.0,
    ) -> None:
        self.now = 1000.0
        self.loss, self.duplicates = loss, duplicates
        self.delay_s, self.jitter_s = delay_s, jitter_s
        self.due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._draw = random.Random(seed)

    def at(self, due: float, action: Callable[[], object]) -> None:
        """Do something at a time, never if that is infinite."""
        heapq.heappush(self.due, (max(due, self.now), next(self._order), action))

    def after(self, delay: float, action: Callable[..., object], *args: Any) -> None:
        self.at(self.now + delay, lambda: action(*args))

    def carry(self, action: Callable[[], object], extra_s: float = 0.0) -> None:
        """Do what a message does that the line carries."""
        for _ in range(1 + (self._draw.random() < self.duplicates)):
            if self._draw.random() >= self.loss:
                self.after(self.delay_s + extra_s + self._draw.random() * self.jitter_s, action)

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let everything happen until `done`, or until `end`; return whether it is done."""
        while not done():
            if not self.due or self.due[0][0] > end:
                self.now = max(self.now, end)
                return False
            self.now, _, action = heapq.heappop(self.due)
            action()
        return True


@dataclass(eq=False)
class Connection:
    """One connection of a client to the broker."""

    receive: Callable[[str, bytes, bool], None]
    will: tuple[str, bytes]
    filters: dict[str, list[str]] = field(default_factory=dict)  # with wildcards, in levels
    topics: set[str] = field(default_factory=set)
    open: bool = True

    def matches(self, topic: str, levels: list[str]) -> bool:
        """Return whether it is subscribed to a topic."""
        return topic in self.topics or any(matches(each, levels) for each in self.filters.values())


class SessionBroker:
    """An MQTT broker. Presences arrive once and in order, all else as the line carries it."""

    def __init__(self, line: VirtualLine) -> None:
        self.line = line
        self.up = True
        self.retained: dict[str, bytes] = {}
        self.connections: list[Connection] = []
        self.drop: Callable[[str], bool] = lambda topic: False

    def connect(
        self, receive: Callable[[str, bytes, bool], None], will: tuple[str, bytes]
    ) -> Connection:
        self.connections.append(connection := Connection(receive, will))
        return connection

    def end(self, connection: Connection, *, will_after_s: float) -> None:
        """End a connection; its will comes so much later."""
        if connection.open:
            connection.open = False
            self.connections.remove(connection)
            self.line.after(will_after_s, self.route, *connection.will, True)

    def restart(self, *, retained: Mapping[str, bytes]) -> None:
        """Lose all connections and what is on its way; come back with that store."""
        for connection in self.connections:
            connection.open = False
        self.connections = []
        self.retained = dict(retained)

    def publish(self, connection: Connection, topic: str, body: bytes, *, retain: bool) -> None:
        """Take a client's message, which is on its way for a while."""
        if connection.open:
            self.line.after(DELAY_S, self.route, topic, body, retain)

    def subscribe(self, connection: Connection, filters: Iterable[str]) -> None:
        def arrive() -> None:
            for each in filters:
                if "+" in each:
                    connection.filters[each] = each.split("/")
                else:
                    connection.topics.add(each)
                for topic, body in list(self.retained.items()):
                    if matches(each.split("/"), topic.split("/")):
                        self._deliver(connection, topic, body, retained=True)

        self.line.after(DELAY_S, arrive)

    def unsubscribe(self, connection: Connection, filters: Iterable[str]) -> None:
        for each in filters:
            connection.filters.pop(each, None)
            connection.topics.discard(each)

    def route(self, topic: str, body: bytes, retain: bool) -> None:
        """Pass a message on."""
        if not self.up:
            return
        if retain and body:
            self.retained[topic] = body
        elif retain:
            self.retained.pop(topic, None)
        levels = topic.split("/")
        for connection in self.connections:
            if connection.matches(topic, levels):
                self._deliver(connection, topic, body, retained=False)

    def _deliver(self, connection: Connection, topic: str, body: bytes, *, retained: bool) -> None:
        def arrive() -> None:
            if connection.open:
                connection.receive(topic, body, retained)

        if self.drop(topic):
            return
        if topic.endswith("/state"):
            self.line.after(DELAY_S, arrive)
        else:
            self.line.carry(arrive)


def matches(wanted: list[str], levels: list[str]) -> bool:
    """Return whether an MQTT filter matches a topic, both in levels."""
    if len(wanted) != len(levels):
        return False
    return all(each in ("+", level) for each, level in zip(wanted, levels, strict=True))
