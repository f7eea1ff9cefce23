"""One node's end of one broker connection: moves messages between the link and the sans-IO cores.

    Link --bytes--> Endpoint --records--> face (parent or child) --> Coordinator / Participant
                       |----chunks--> Incoming
                       |----asks----> Outgoing

One pump sends what the cores have due and sleeps until their next deadline. It sends nothing while the broker is
away: all that the cores say is state, and they are told of the new connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from common.errors import DuplicateName, NoProgress, WireError
from common.layout import ModelLayout, Row
from common.net.accounting import Account, packet_bytes
from common.net.link import BrokerAddress, Link
from common.net.shaping import Shaper
from common.node.identity import Identity
from common.node.offload import offload
from common.spec import Transfer
from common.transfer.incoming import Incoming, IncomingEvent
from common.transfer.manifest import check, chunk_bytes_for, describe
from common.transfer.outgoing import Outgoing, Publication
from common.wire import packing, topics
from common.wire.codecs import CODECS
from common.wire.messages import Announcement, Ask, Gone, Manifest, Message, NodeState, Presence, Result, Task

PUBLISHING_MOST: Final = 4
SHAPED_CONTROL_BYTES: Final = 4096
CODEC: Final = "fp32"
OFFLINE_TICK_S: Final = 0.2

log = logging.getLogger("fedstrata.endpoint")


class Face(Protocol):
    """What an endpoint asks of the side it serves; all calls come from the event loop."""

    @property
    def peers(self) -> Sequence[str]:
        """Return who this side talks to."""

    def received(self, sender: str, session: str, message: Message, now: float) -> None:
        """Take a control message from a peer."""

    def presence(self, node: str, session: str, presence: Presence | None, now: float) -> None:
        """Take a peer's retained state; None = cleared."""

    def moved(self, peer: str, now: float) -> None:
        """Note that model bytes moved to or from a peer."""

    def transferred(self, event: IncomingEvent, now: float) -> None:
        """Take a finished or failed fetch."""

    def reconnected(self, now: float) -> None:
        """Note that the connection is new: say again what it may have swallowed."""

    def tick(self, now: float) -> None:
        """Let the core judge by the time, and act on its events."""

    def to_send(self, now: float) -> Sequence[tuple[str, Message]]:
        """Return what is due, each with its peer; called only while the broker is there."""

    def next_deadline(self) -> float | None:
        """Return when `tick` or `to_send` next has something to do."""


class Endpoint:
    """A named node on one broker. `run` keeps it going until cancelled."""

    def __init__(
        self, address: BrokerAddress, identity: Identity, *, face: Face, transfer: Transfer, rate: float | None
    ) -> None:
        self.identity = identity
        self.account = Account()
        self.ignored = 0
        self.incoming = Incoming(window=transfer.window, slots=transfer.upload_slots, exclusive=len(face.peers) == 1)
        self.outgoing = Outgoing(first_number=time.time_ns() // 1_000_000)
        self.shaper = Shaper(rate)
        self._chunk_bytes = chunk_bytes_for(rate, transfer.chunk_bytes)
        self._inline_most = transfer.inline_bytes
        self._face = face
        self._wake = asyncio.Event()
        self._connected_once = asyncio.Event()
        self._idle_s = transfer.idle_s
        self._away_since: float | None = None
        self._publishing = 0
        self._subscribed: set[tuple[str, str]] = set()
        self._presence = Presence(
            NodeState.INIT, identity.role, identity.metrics, books=identity.books or identity.session
        )
        self._established = self._leaving = False
        self._announcement: bytes | None = None
        self._loop = asyncio.get_running_loop()
        will = packing.encode(Presence(NodeState.LOST, identity.role, reason="connection lost"), identity.session)
        self.link = Link(
            address,
            client_id=f"{identity.name}-{identity.session[:8]}-{secrets.token_hex(2)}",
            received=self._received,
            connected=self._connected,
            lost=self._lost,
            will=(topics.state(identity.run, identity.name), will),
        )

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._loop.time()

    def wake(self) -> None:
        """Let the pump look at the cores again; call it after any change, from the event loop."""
        self._wake.set()

    def set_state(self, state: NodeState, *, reason: str = "", samples: int = 0) -> None:
        """Say how this node is, retained."""
        self._presence = replace(self._presence, state=state, reason=reason, samples=samples)
        self._publish_presence()

    def announce(self, announcement: Announcement) -> None:
        """Keep the experiment on the broker for this node's children."""
        self._announcement = packing.encode(announcement, self.identity.session)
        self._publish_announcement()

    async def run(self, *, connect_timeout_s: float) -> None:
        """Serve until cancelled.

        Raises ConnectionFailed, DuplicateName, NoProgress when the broker stays away, and what the face raises.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.link.run(connect_timeout_s=connect_timeout_s), name=f"link {self.identity.name}")
            group.create_task(self._pump(), name=f"pump {self.identity.name}")

    def release_name(self) -> None:
        """Stop answering others under this name: what follows on its state topic is our own clearing."""
        self._leaving = True

    async def introduced(self, *, timeout_s: float) -> None:
        """Wait until the broker has been told that this node is there, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected_once.wait()
        except TimeoutError:
            pass

    async def leave(self, *, timeout_s: float) -> None:
        """Clear what this node keeps on the broker, as far as the broker is there within `timeout_s`."""
        run, name = self.identity.run, self.identity.name
        self.link.publish(topics.state(run, name), b"", qos=1, retain=True)
        if self._announcement is not None:
            self.link.publish(topics.spec(run, name), b"", qos=1, retain=True)
        await self.flush(timeout_s=timeout_s)

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until what was said has left for the broker."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.link.flush()
        except TimeoutError:
            pass  # the broker is away; its will speaks for us

    async def offer(self, layout: ModelLayout, row: Row, receivers: Iterable[str]) -> tuple[Manifest, bytes | None]:
        """Hold a model for its receivers, which must stay unchanged until it is retired.

        Return its manifest, and its bytes where they are few enough to travel inside the announcement.
        """
        blob = CODECS[CODEC].encode(layout, row)
        manifest = await offload(
            partial(describe, blob, chunk_bytes=self._chunk_bytes, codec=CODEC, layout=layout.digest)
        )
        self.outgoing.offer(manifest, blob, receivers)
        return manifest, bytes(blob) if manifest.size <= self._inline_most else None

    @staticmethod
    def check(manifest: Manifest, layout: ModelLayout) -> None:
        """Refuse a manifest that is no model of this layout. Raises RefusedModel."""
        check(manifest, size=CODECS[CODEC].size(layout), layout=layout.digest, codecs=frozenset({CODEC}))

    def send(self, peer: str, message: Message) -> None:
        """Send a control message to a peer's inbox."""
        topic = topics.inbox(self.identity.run, peer, self.identity.name)
        body = packing.encode(message, self.identity.session)
        model = _inline_bytes(message)
        size = packet_bytes(topic, len(body), qos=1)
        self.account.add(peer, "sent", message=size, model=model, control=len(body) - model)
        due = self.shaper.reserve((peer,), size, self.now())
        if len(body) > SHAPED_CONTROL_BYTES and due > self.now():
            self._loop.call_at(due, lambda: self.link.publish(topic, body, qos=1))
        else:
            self.link.publish(topic, body, qos=1)

    # Towards the cores

    def _received(self, topic_text: str, body: bytes, retained: bool) -> None:
        try:
            topic = topics.parse(topic_text)
            if isinstance(topic, topics.ChunkTopic):
                self._chunk(topic, topic_text, body)
            elif isinstance(topic, topics.InboxTopic):
                self._control(topic, topic_text, body)
            elif isinstance(topic, topics.StateTopic):
                self._state(topic, body, retained)
        except WireError as error:
            self.ignored += 1
            log.debug("%s: ignored %d bytes on %.80s: %s", self.identity.name, len(body), topic_text, error)
        self._wake.set()

    def _chunk(self, topic: topics.ChunkTopic, text: str, body: bytes) -> None:
        now = self.now()
        self.account.add(topic.node, "received", message=packet_bytes(text, len(body), qos=0), model=len(body))
        fresh = self.incoming.receive_chunk(
            topic.node, topic.blob, lane=topic.lane, index=topic.index, number=topic.number, data=body, now=now
        )
        if fresh:
            self._face.moved(topic.node, now)

    def _control(self, topic: topics.InboxTopic, text: str, body: bytes) -> None:
        now = self.now()
        if topic.sender not in self._face.peers:
            raise WireError(f"a stranger: {topic.sender}")
        size = packet_bytes(text, len(body), qos=1)
        try:
            session, message = packing.decode(body)
        except WireError:
            self.account.add(topic.sender, "received", message=size, control=len(body))
            raise
        model = _inline_bytes(message)
        self.account.add(topic.sender, "received", message=size, model=model, control=len(body) - model)
        self.incoming.heard(now)
        if isinstance(message, Ask):
            before = self.outgoing.chunks_delivered
            answer = self.outgoing.receive(topic.sender, message, now=now)
            if self.outgoing.chunks_delivered > before:
                self._face.moved(topic.sender, now)
            if answer is not None:
                self.send(topic.sender, answer)
        elif isinstance(message, Gone):
            self.incoming.gone(topic.sender, message.blob, now=now)
        else:
            self._face.received(topic.sender, session, message, now)

    def _state(self, topic: topics.StateTopic, body: bytes, retained: bool) -> None:
        session, message = packing.decode(body) if body else ("", None)
        if not (message is None or isinstance(message, Presence)):
            raise WireError("no presence on a state topic")
        if topic.node == self.identity.name:
            self._own_name(topic, session, message, retained)
        elif topic.node in self._face.peers and topic.run == self.identity.run:
            self._face.presence(topic.node, session, message, self.now())

    def _own_name(self, topic: topics.StateTopic, session: str, presence: Presence | None, retained: bool) -> None:
        claim = self.identity.claim
        if session == self.identity.session:
            if presence is not None and presence.state is NodeState.LOST is not self._presence.state:
                self._publish_presence()  # the will of our own broken connection
            else:
                self._established = True
        elif retained or self._leaving or claim.lost or (presence is None and topic.run != self.identity.run):
            return
        elif presence is not None and presence.answers == self.identity.session:
            if session in claim.told and session > self.identity.session:
                return  # both came at once and told each other: one stays
            claim.lost = True
            raise DuplicateName(
                f"{topic.node} is already alive on broker {self.link.address} (run {topic.run}). "
                "Give this one another --name, or end the other."
            )
        elif self._established and (presence is None or not presence.answers):
            claim.told.add(session)
            self._publish_presence(answers=session)  # a second node of our name reads it and ends

    # Towards the broker

    async def _pump(self) -> None:
        while True:
            self._wake.clear()
            now = self.now()
            while (event := self.incoming.next_event()) is not None:
                self._face.transferred(event, now)
            if self._away_since is not None and now - self._away_since > self._idle_s:
                raise NoProgress(f"broker {self.link.address} was away for {self._idle_s:g} s")
            self._face.tick(now)
            if self.link.up:
                self.incoming.tick(now, carried=self.link.meter.received())
                due = [self._send_due(now), self.incoming.next_deadline(), self._face.next_deadline()]
            else:
                due = [now + OFFLINE_TICK_S]
            await self._sleep(min((at for at in due if at is not None), default=None))

    async def _sleep(self, due: float | None) -> None:
        timer = self._loop.call_at(due, self._wake.set) if due is not None else None
        await self._wake.wait()
        if timer is not None:
            timer.cancel()

    def _send_due(self, now: float) -> float | None:
        for peer, message in self._face.to_send(now):
            self.send(peer, message)
        self._subscribe_lanes()  # before the asks: what they bring must find us subscribed
        for owner, ask in self.incoming.to_send():
            self.send(owner, ask)
        return self._publish_chunks(now)

    def _publish_chunks(self, now: float) -> float | None:
        while self._publishing < PUBLISHING_MOST:
            publication = self.outgoing.next_publication(now, lambda peers: self.shaper.ready(peers, now))
            if publication is None:
                break
            self._publishing += 1
            self._publish_chunk(publication, now)
        else:
            return None
        waits = [self.outgoing.next_deadline(now)]
        if self.shaper.rate is not None:
            waits += [at for at in (self.shaper.ready_at((peer,)) for peer in self._face.peers) if at > now]
        return min((at for at in waits if at is not None), default=None)

    def _publish_chunk(self, chunk: Publication, now: float) -> None:
        identity = self.identity
        topic = topics.chunk(identity.run, identity.name, chunk.lane, chunk.blob, chunk.index, chunk.number)
        body = bytes(chunk.data)  # paho takes bytes
        size = packet_bytes(topic, len(body), qos=0)
        peer = chunk.receivers[0] if len(chunk.receivers) == 1 else topics.ALL
        self.account.add(peer, "sent", message=size, model=len(body))
        due = self.shaper.reserve(chunk.receivers, size, now)
        if due > now:
            self._loop.call_at(due, lambda: self.link.publish(topic, body, done=self._published))
        else:
            self.link.publish(topic, body, done=self._published)

    def _published(self) -> None:
        self._publishing -= 1
        self._wake.set()

    async def _connected(self) -> None:
        identity = self.identity
        self._subscribed.clear()
        self._established, self._away_since = False, None
        self.link.subscribe([topics.state("+", identity.name)], qos=1)
        self.link.subscribe([topics.state(identity.run, peer) for peer in self._face.peers], qos=1)
        self.link.subscribe([topics.inbox(identity.run, identity.name, peer) for peer in self._face.peers], qos=1)
        self._publish_presence()
        self._publish_announcement()
        now = self.now()
        self.incoming.reconnected(now)
        self._face.reconnected(now)
        self._connected_once.set()
        self._wake.set()

    def _lost(self) -> None:
        self._away_since = self.now()
        self._wake.set()

    def _subscribe_lanes(self) -> None:
        wanted = self.incoming.wanted()
        run, me = self.identity.run, self.identity.name
        self.link.unsubscribe(self._lanes(self._subscribed - wanted, run, me))
        self.link.subscribe(self._lanes(wanted - self._subscribed, run, me), qos=0)
        self._subscribed = wanted

    @staticmethod
    def _lanes(fetches: Iterable[tuple[str, str]], run: str, me: str) -> list[str]:
        return [lane for owner, blob in sorted(fetches) for lane in topics.lanes(run, owner, me, blob)]

    def _publish_presence(self, answers: str = "") -> None:
        presence = replace(self._presence, answers=answers)
        topic = topics.state(self.identity.run, self.identity.name)
        self.link.publish(topic, packing.encode(presence, self.identity.session), qos=1, retain=True)

    def _publish_announcement(self) -> None:
        if self._announcement is not None:
            topic = topics.spec(self.identity.run, self.identity.name)
            self.link.publish(topic, self._announcement, qos=1, retain=True)


def _inline_bytes(message: Message) -> int:
    """Return how many bytes of a message are a model that travels inside it."""
    return len(message.inline or b"") if isinstance(message, (Task, Result)) else 0
