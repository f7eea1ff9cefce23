"""The asyncio part of one session on one broker connection: one pump, one timer.

The connection's callbacks pass received messages to the session. The pump lets the session evaluate
its state, handles its events, publishes its outputs, and sleeps until its next deadline. Work that
takes long (encoding, checking, files) runs beside it, in the subclasses.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from functools import partial
from math import inf
from typing import Final, Unpack

from fedstrata.common.accounting.counters import packet_bytes
from fedstrata.common.errors import ConnectionFailed, DuplicateName, OutOfReach
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.bulk import Body, Place
from fedstrata.common.net.connection import Handlers
from fedstrata.common.net.packet_limit import PacketLimit
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import MessageRefused
from fedstrata.common.protocol.child_session import ChildSession
from fedstrata.common.protocol.events import BrokerAway, BrokerDrops, CostsUnknown, NameTaken
from fedstrata.common.protocol.limits import Skipped
from fedstrata.common.protocol.manifest import MIN_RATED_CHUNK
from fedstrata.common.protocol.messages import NodeState, Presence
from fedstrata.common.protocol.outbox import Output, Publish, PublishChunk, Subscribe
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.protocol.peer_link import PeerLink
from fedstrata.common.protocol.presence import Identity, StateFacts
from fedstrata.common.protocol.receiver import Landing
from fedstrata.common.protocol.sender import Publication
from fedstrata.common.runtime.lab_client import RefusedTopics
from fedstrata.common.runtime.world import World, nothing, within

LATER_S: Final = 0.01  # until the pump runs after a chunk from which only later deadlines follow
HEAP: Final = "$SYS/broker/heap/current"  # mosquitto's topics
DROPPED: Final = "$SYS/broker/publish/messages/dropped"
CLOSES_WITHIN_S: Final = 2.0
# for the rest of a packet with a chunk, or with a model inside its announcement
PACKET_ROOM: Final = 1024

log = logging.getLogger("fedstrata.endpoint")


class Endpoint(ABC):
    """A named node on one broker. `run` serves it until cancelled.

    `statistics` receives what the broker publishes about itself, None: no subscription to it.
    """

    session: ParentSession | ChildSession

    def __init__(
        self,
        address: BrokerAddress,
        identity: Identity,
        *,
        transfer: TransferSettings,
        world: World,
        statistics: BrokerStatistics | None = None,
    ) -> None:
        self.identity = identity
        self._world = world
        self._statistics = statistics
        self._idle_s = transfer.idle_s
        self._limits: dict[BrokerAddress, PacketLimit] = {}  # by single address
        self._unreadable = RefusedTopics(identity.name, address)
        self._bodies: dict[Body, str] = {}
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._sent_all = asyncio.Event()
        self._connected_once = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        will = serialization.encode(
            Presence(NodeState.LOST, identity.role, reason="connection lost"), identity.session
        )
        self.connection = world.connection(
            address,
            Handlers(self._received, self._connected, self._lost, self._find_place, self._landed),
            # a node may have two
            client_id=f"{identity.name}-{identity.session[:8]}-{world.token(4)}",
            keepalive_s=transfer.keepalive_s,
            will=(identity.topic(topics.state), will),
        )

    @property
    def link(self) -> PeerLink:
        """The session's part in the connection: what it offers, sends and counts."""
        return self.session.link

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._loop.time()

    def wake(self) -> None:
        """Let the pump evaluate the session again; call it from the event loop after any change."""
        self._wake.set()

    def set_state(self, state: NodeState, **facts: Unpack[StateFacts]) -> None:
        """Publish this node's state, retained."""
        self.session.set_state(state, **facts)
        self.wake()

    async def run(self, *, connect_timeout_s: float) -> None:
        """Serve until cancelled.

        Raises ConnectionFailed, DuplicateName, and OutOfReach if the broker, or a child's parent,
        stays away.
        """
        async with asyncio.TaskGroup() as group:
            connecting = self.connection.run(connect_timeout_s=connect_timeout_s)
            group.create_task(connecting, name=f"connection {self.identity.name}")
            group.create_task(self._pump(), name=f"pump {self.identity.name}")

    async def introduced(self, *, timeout_s: float) -> None:
        """Wait until the broker has this node's presence, at most `timeout_s`."""
        await within(self._connected_once, timeout_s)

    def release_name(self) -> None:
        """Stop defending this name: later messages on its state topic are this node's own
        clearing.
        """
        self.link.own.leaving = True

    async def leave(self, *, keep_state: bool, timeout_s: float) -> None:
        """Clear this node's retained messages, if the broker can be reached within `timeout_s`.

        `keep_state`: keep its last state for nodes that are away.
        """
        for output in self.link.leave(keep_state=keep_state):
            self._perform(output)
        await self.flush(timeout_s=timeout_s)

    def patience_s(self) -> float:
        """Return how long to wait for a broker that is away: peers behind it do not know that the
        run has ended.
        """
        if self.someone_is_away() and not self.connection.up:
            return self._idle_s
        return 0.0

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until all messages have left for the broker."""
        self._sent_all.clear()
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                await self._sent_all.wait()
                await self.connection.flush()
        except TimeoutError:
            pass  # the broker is away; the will replaces the message

    def retire(self, blob: str) -> None:
        """Stop serving a blob; its memory may be overwritten afterwards."""
        self.link.offers.retire(blob)
        self._detach()

    def _detach(self) -> None:
        """Copy chunks of blobs that are no longer served and that the client still holds."""
        for body, blob in self._bodies.items():
            if not self.link.sender.holds(blob):
                body.detach()

    def someone_is_away(self) -> bool:
        """Return whether a peer may return to read this node's last state."""
        return False

    def _after_pass(self) -> None:  # noqa: B027 - optional for subclasses
        """Handle what has changed since the last pass of the pump."""

    @abstractmethod
    def _take(self, event: object) -> None:
        """Handle an event of the session."""

    # From the connection

    def _find_place(self, topic: str, size: int) -> Landing | Skipped | None:
        return self.link.place(topic, size)

    def _landed(self, topic: str, place: Place) -> None:
        if isinstance(place, Landing) and self.link.landed(topic, place, self.now()):
            self.wake()
        elif self._later is None:
            self._later = self._loop.call_later(LATER_S, self._wake_later)

    def _wake_later(self) -> None:
        self._later = None
        self.wake()

    def _received(self, topic: str, body: bytes, retained: bool) -> None:
        if self._statistics is not None and self._statistics.take(topic, body):
            return
        self.link.receive(topic, body, retained=retained, now=self.now())
        self.wake()

    async def _connected(self) -> None:
        attempts = self.connection.attempts
        # a limit may have been lowered
        if attempts.address not in self._limits or attempts.thrown_out:
            await self._find_limit(attempts.address)
        passes = min(limit.passes for limit in self._limits.values())
        self.session.connected(self.now(), packet_most=passes - PACKET_ROOM)
        self._connected_once.set()
        self.wake()

    async def _find_limit(self, address: BrokerAddress) -> None:
        own = self.identity
        largest = self.link.offers.largest() + PACKET_ROOM
        topic = topics.chunk(own.lab, own.run, own.name, own.name, own.session, 0, 0)
        limit = await self._world.packet_limit(address, topic=topic, most=largest)
        if limit.passes < MIN_RATED_CHUNK + PACKET_ROOM:
            raise ConnectionFailed(
                f"broker {address} takes packets of at most {limit.passes} bytes, models need "
                f"{MIN_RATED_CHUNK + PACKET_ROOM}. Raise its max_packet_size."
            )
        self._limits[address] = limit

    def _lost(self) -> None:
        if self._statistics is not None:
            self._statistics.disconnected(self.now())
        self.link.disconnected(self.now())
        self.wake()

    def _subscribe_statistics(self) -> None:
        if self._statistics is not None:
            self.connection.subscribe(
                self._statistics.to_subscribe(self.now()), qos=0, optional=True
            )

    # The pump

    async def _pump(self) -> None:
        session = self.session
        while True:
            now = self.now()
            session.tick(now)
            while (event := session.next_event()) is not None:
                self._take_common(event)
            self._wake.clear()  # what the handling of events has changed is sent in this pass
            self._perform_all(session.to_send(now))
            if self.link.outbox.empty and self.connection.up:
                self._sent_all.set()
            self._after_pass()
            await self._sleep(session.next_deadline(now))

    async def _sleep(self, due: float) -> None:
        if self._wake.is_set():
            await asyncio.sleep(0)
            return
        timer = self._loop.call_at(due, self._wake.set) if due < inf else None
        await self._wake.wait()
        if timer is not None:
            timer.cancel()

    def _take_common(self, event: object) -> None:
        if isinstance(event, NameTaken):
            raise DuplicateName(
                f"{self.identity.name} is already alive on broker {self.connection.address} (run "
                f"{event.run}). "
                "Give this one another --name, or end the other."
            )
        if isinstance(event, BrokerAway):
            reasons = self.connection.attempts.reasons()
            raise OutOfReach(
                f"broker {self.connection.address} was away for {self._idle_s:g} s ({reasons})"
            )
        if isinstance(event, BrokerDrops):
            log.warning(
                "%s: broker %s drops messages: %d of %d chunks were lost and are asked for again. "
                "Raise its limits "
                "for a client's queue (docs/brokers.md).",
                self.identity.name,
                self.connection.address,
                event.lost,
                event.lost + event.arrived,
            )
        elif isinstance(event, CostsUnknown):
            log.warning(
                "%s: %s reports costs that cannot be: they are not known, its models count",
                self.identity.name, event.node,
            )  # fmt: skip
        elif isinstance(event, MessageRefused):
            log.warning(
                "%s: refused a message (%s) from %s: %.300s [%d so far]",
                self.identity.name,
                event.refusal.value,
                event.sender or "?",
                event.reason,
                event.count,
            )
        else:
            self._take(event)

    def _perform_all(self, outputs: list[Output]) -> None:
        """Perform outputs; the pump, which sleeps, must not keep the last one: a model may be
        inside.
        """
        for output in outputs:
            self._perform(output)

    def _perform(self, output: Output) -> None:
        connection = self.connection
        if isinstance(output, Publish):
            size = packet_bytes(output.topic, len(output.body), qos=int(output.retain))
            if size >= min((limit.dropped for limit in self._limits.values()), default=inf):
                raise ConnectionFailed(
                    f"broker {connection.address} does not take {len(output.body)} bytes on "
                    f"{output.topic}, which "
                    "cannot be cut. Raise its limit of packets."
                )
            connection.publish(
                output.topic, output.body, qos=int(output.retain), retain=output.retain
            )
        elif isinstance(output, PublishChunk):
            body = Body(output.chunk.data)
            self._bodies[body] = output.chunk.blob
            connection.publish_body(
                output.topic, body, done=partial(self._left, body, output.chunk)
            )
        elif isinstance(output, Subscribe):
            first = self._subscribe_statistics if output.first else nothing
            connection.subscribe(
                list(output.topics), qos=0, acknowledged=first, refused=self._unreadable.add
            )
        else:
            connection.unsubscribe(list(output.topics))

    def _left(self, body: Body, chunk: Publication) -> None:
        del self._bodies[body]
        self.link.outbox.sent(chunk)
        self.wake()


class BrokerStatistics:
    """What a broker published last about itself (mosquitto: every ten seconds), by topic.

    Other brokers publish other topics or none. The statistics are optional: a broker may refuse the
    subscription, leave it unanswered, or close the connection because of it.
    """

    topics = (HEAP, DROPPED)

    def __init__(self, broker: str) -> None:
        self.values: dict[str, int] = {}
        self._broker = broker
        self._closes = False  # the broker closed a connection at the subscription
        self._subscribed_at: float | None = None

    def to_subscribe(self, now: float) -> list[str]:
        """Return the topics to subscribe to on a new connection, after the node's own
        subscriptions.
        """
        if self._closes:
            return []
        self._subscribed_at = now
        return list(self.topics)

    def disconnected(self, now: float) -> None:
        """Note the loss of a connection: if it directly followed the subscription, do not subscribe
        again.
        """
        if self._subscribed_at is not None and now - self._subscribed_at <= CLOSES_WITHIN_S:
            self._closes = True
            log.info(
                "broker %s closed the connection at a subscription to $SYS: no broker statistics",
                self._broker,
            )
        self._subscribed_at = None

    def take(self, topic: str, body: bytes) -> bool:
        """Return whether this is one of the broker's statistics, not a message of a node."""
        if topic not in self.topics:
            return False
        if len(body) <= 19 and body.isdigit():
            self.values[topic] = int(body)
        return True
