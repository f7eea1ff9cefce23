"""An MQTT 3.1.1 broker without sockets; `tests/test_simulated_broker.py` compares it with
mosquitto.

It has retained messages, wills, wildcards, take-over by client id, QoS 0 and 1, and bounded queues;
sessions are always clean. Packets between clients and the broker cross simulated links:
`deploy.simulation.simulated_network`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from paho.mqtt.client import topic_matches_sub

from fedstrata.common.accounting.counters import packet_bytes

_V = TypeVar("_V")


@dataclass(slots=True)
class _Level(Generic[_V]):
    value: _V | None = None  # of the topic that ends here
    below: dict[str, _Level[_V]] = field(default_factory=dict)


class TopicTree(Generic[_V]):
    """Values by topic, or by topic filter."""

    def __init__(self) -> None:
        self._root: _Level[_V] = _Level()

    def setdefault(self, topic: str, value: _V) -> _V:
        """Return the value of a topic, which is this one if it has none yet."""
        level = self._root
        for part in topic.split("/"):
            level = level.below.setdefault(part, _Level())
        if level.value is None:
            level.value = value
        return level.value

    def remove(self, topic: str) -> None:
        """Remove an existing topic."""
        passed: list[tuple[_Level[_V], str]] = []
        level = self._root
        for part in topic.split("/"):
            passed.append((level, part))
            level = level.below[part]
        level.value = None
        for above, part in reversed(passed):
            if above.below[part].value is not None or above.below[part].below:
                break
            del above.below[part]

    def covering(self, topic: str) -> list[_V]:
        """Return the values of the filters that cover a topic."""
        found: list[_Level[_V] | None] = []
        levels = [self._root]
        for depth, part in enumerate(topic.split("/")):
            wild = depth > 0 or not topic.startswith("$")
            if wild:
                found += [level.below.get("#") for level in levels]
            names = ("+", part) if wild else (part,)
            levels = [
                level.below[name] for level in levels for name in names if name in level.below
            ]
        for level in levels:
            found += [level, level.below.get("#")]
        return [level.value for level in found if level is not None and level.value is not None]

    def covered(self, topic_filter: str) -> Iterator[_V]:
        """Yield the values of the topics that a filter covers."""
        return self._below(self._root, topic_filter.split("/"))

    def _below(self, level: _Level[_V], parts: list[str]) -> Iterator[_V]:
        if (not parts or parts == ["#"]) and level.value is not None:
            yield level.value
        if not parts:
            return
        part = parts[0]
        rest = parts if parts[0] == "#" else parts[1:]
        for name in level.below if part in ("+", "#") else (part,):
            hidden = level is self._root and part != name and name.startswith("$")
            if name in level.below and not hidden:
                yield from self._below(level.below[name], rest)


QUEUE_MOST = 1_000_000  # as `deploy.brokers.broker` configures mosquitto, whose default is 1000
REFUSED = 0x80


class Routed(NamedTuple):
    """A message that a broker accepted."""

    broker: str
    topic: str
    body: bytes
    qos: int
    retain: bool


class RetainedMessage(NamedTuple):
    """The retained message of a topic."""

    body: bytes
    qos: int


class SessionWill(NamedTuple):
    """The message that a broker publishes for a client that left without a DISCONNECT."""

    topic: str
    body: bytes
    qos: int = 1
    retain: bool = True


class Subscriber(Protocol):
    """The broker's end of a connection to a client."""

    def pending(self) -> int:
        """Return the number of messages for the client that have not arrived."""

    def deliver(self, topic: str, body: bytes, *, qos: int, retain: bool) -> None:
        """Send a message to the client."""

    def closed_by_broker(self) -> None:
        """Close the connection."""


@dataclass(slots=True, eq=False)
class BrokerSession:
    """A connected client; `filters` has the QoS of each of its subscriptions."""

    client_id: str
    subscriber: Subscriber
    will: SessionWill | None
    alive: bool = True
    filters: dict[str, int] = field(default_factory=dict)


Store = Literal["empty", "current"] | Mapping[str, RetainedMessage]


class SimulatedBroker:
    """One broker. A message is dropped if `accepts` returns False; `routed` is called after each
    routed message.

    queue_most: most messages queued for one client; further ones are dropped
    packet_limit: bytes; a client that sends a larger packet is disconnected
    denied: topic filters whose messages are discarded, as by an access control list
    refused: topic filters that may not be subscribed to
    """

    def __init__(
        self,
        name: str,
        *,
        accepts: Callable[[Routed], bool] = lambda message: True,
        routed: Callable[[Routed], None] = lambda message: None,
    ) -> None:
        self.name = name
        self.up = True
        self.queue_most = QUEUE_MOST
        self.packet_limit: int | None = None
        self.denied: list[str] = []
        self.refused: Container[str] = ()
        self.messages = 0
        self.dropped = 0
        self.sessions: dict[str, BrokerSession] = {}
        self.retained: dict[str, RetainedMessage] = {}
        self._subscriptions: TopicTree[dict[BrokerSession, int]] = TopicTree()  # with their QoS
        # those of `retained`, in their order
        self._topics: TopicTree[tuple[int, str]] = TopicTree()
        self._numbers = count()
        self._accepts = accepts
        self._routed = routed

    # A client's packets

    def connect(
        self, client_id: str, subscriber: Subscriber, *, will: SessionWill | None = None
    ) -> BrokerSession:
        """Accept a client. A client connected with the same id is disconnected, and its will is
        published.
        """
        session = BrokerSession(client_id, subscriber, will)
        earlier = self.sessions.get(client_id)
        if earlier is not None:
            self.abort(earlier)
        self.sessions[client_id] = session
        return session

    def publish(
        self, session: BrokerSession, topic: str, body: bytes, *, qos: int, retain: bool
    ) -> bool:
        """Accept a message; return whether it must be acknowledged."""
        if not session.alive:
            return False
        if (
            self.packet_limit is not None
            and packet_bytes(topic, len(body), qos=qos) > self.packet_limit
        ):
            self.abort(session)
            return False
        self.route(topic, body, qos=qos, retain=retain)
        return session.alive and qos > 0

    def subscribe(self, session: BrokerSession, topic_filters: list[str], *, qos: int) -> list[int]:
        """Add subscriptions, send their retained messages, and return the codes of the SUBACK."""
        codes = []
        for topic_filter in topic_filters if session.alive else ():
            if topic_filter in self.refused:
                codes.append(REFUSED)
                continue
            codes.append(qos)
            session.filters[topic_filter] = qos
            self._subscriptions.setdefault(topic_filter, {})[session] = qos
            for _, topic in sorted(self._topics.covered(topic_filter)):
                message = self.retained[topic]
                self._send(session, topic, message.body, qos=min(qos, message.qos), retain=True)
        return codes

    def unsubscribe(self, session: BrokerSession, topic_filters: list[str]) -> None:
        """Remove subscriptions."""
        for topic_filter in topic_filters:
            if session.filters.pop(topic_filter, None) is not None:
                subscribers = self._subscriptions.setdefault(topic_filter, {})
                del subscribers[session]
                if not subscribers:
                    self._subscriptions.remove(topic_filter)

    def disconnect(self, session: BrokerSession) -> None:
        """End a session after a DISCONNECT, without its will."""
        self._end(session)

    def abort(self, session: BrokerSession) -> None:
        """End a session without a DISCONNECT, and publish its will."""
        if session.alive:
            self._end(session)
            self._publish_will(session)

    # The broker itself

    def route(self, topic: str, body: bytes, *, qos: int, retain: bool) -> None:
        """Retain and forward a message as if a client had sent it."""
        message = Routed(self.name, topic, body, qos, retain)
        if not self.up or self._is_denied(topic) or not self._accepts(message):
            return
        self.messages += 1
        if retain:
            if body:
                if topic not in self.retained:
                    self._topics.setdefault(topic, (next(self._numbers), topic))
                self.retained[topic] = RetainedMessage(body, qos)
            elif self.retained.pop(topic, None) is not None:
                self._topics.remove(topic)
        for session, most in self.subscribers(topic).items():
            self._send(session, topic, body, qos=min(qos, most), retain=False)
        self._routed(message)

    def subscribers(self, topic: str) -> dict[BrokerSession, int]:
        """Return each subscriber of a topic once, with the highest QoS of its subscriptions."""
        found: dict[BrokerSession, int] = {}
        for subscribers in self._subscriptions.covering(topic):
            for session, qos in subscribers.items():
                found[session] = max(qos, found.get(session, 0))
        return found

    def snapshot(self) -> Mapping[str, RetainedMessage]:
        """Return the current retained messages, for a later `start`."""
        return dict(self.retained)

    def kill(self) -> None:
        """End at once: every connection breaks, and no will is published."""
        self.up = False
        for session in list(self.sessions.values()):
            self._end(session)

    def terminate(self) -> None:
        """End like mosquitto on SIGTERM: it publishes every client's will, and a persistent store
        retains them.
        """
        for session in list(self.sessions.values()):
            if session.alive:
                self._publish_will(session)
        self.kill()

    def start(self, store: Store = "empty") -> None:
        """Start again with no retained messages ("empty"), those at the end ("current"), or those
        of a snapshot.
        """
        if isinstance(store, Mapping):
            self.retained = dict(store)
        elif store == "empty":
            self.retained = {}
        self._topics = TopicTree()
        for topic in self.retained:
            self._topics.setdefault(topic, (next(self._numbers), topic))
        self.up = True

    def _end(self, session: BrokerSession) -> None:
        if not session.alive:
            return
        session.alive = False
        self.unsubscribe(session, list(session.filters))
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
        session.subscriber.closed_by_broker()

    def _publish_will(self, session: BrokerSession) -> None:
        if session.will is not None:
            will = session.will
            self.route(will.topic, will.body, qos=will.qos, retain=will.retain)

    def _send(
        self, session: BrokerSession, topic: str, body: bytes, *, qos: int, retain: bool
    ) -> None:
        if not session.alive or self._is_denied(topic):
            return
        if session.subscriber.pending() >= self.queue_most:
            self.dropped += 1
            return
        session.subscriber.deliver(topic, body, qos=qos, retain=retain)

    def _is_denied(self, topic: str) -> bool:
        return bool(self.denied) and any(
            topic_matches_sub(pattern, topic) for pattern in self.denied
        )
