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
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from common.errors import ConnectionFailed, NoProgress, WireError
from common.links import Ways
from common.net.accounting import Account, packet_bytes
from common.net.limits import packet_limit
from common.net.link import BrokerAddress, Link
from common.net.packets import Place
from common.node.arriving import Arriving
from common.node.courier import Courier, inline_bytes, qos_of
from common.node.face import Face
from common.node.figures import Figures
from common.node.herald import Herald
from common.node.identity import Identity
from common.spec import Transfer
from common.transfer.incoming import Incoming, Landing
from common.transfer.manifest import MIN_RATED_CHUNK, chunk_bytes_for, renamed
from common.wire import packing, topics
from common.wire.messages import Announcement, Ask, Gone, Manifest, Message, NodeState, Presence, Target

PACKET_ROOM: Final = 1024  # for what goes with a chunk, or with a model inside its announcement
OFFLINE_TICK_S: Final = 0.2

log = logging.getLogger("fedstrata.endpoint")


class Endpoint:
    """A named node on one broker. `run` keeps it going until cancelled.

    What goes to a peer is shaped; what the broker keeps for whoever comes (presence, announcement) is not. `figures`
    takes the broker's word on itself; without it that is not asked for.
    """

    def __init__(
        self,
        address: BrokerAddress,
        identity: Identity,
        *,
        face: Face,
        transfer: Transfer,
        ways: Ways,
        figures: Figures | None = None,
    ) -> None:
        self.identity = identity
        self._figures = figures
        self.account = Account()
        self.ignored = 0
        self.incoming = Incoming(
            window=transfer.window,
            slots=transfer.upload_slots,
            ways=ways.from_,
            keepalive_s=transfer.keepalive_s,
            exclusive=len(face.peers) == 1,
        )
        self._ways = ways
        self._transfer = transfer
        self.chunk_most, self._inline_most = transfer.chunk_bytes, transfer.inline_bytes
        self._face = face
        self._wake = asyncio.Event()
        self._connected_once = asyncio.Event()
        self._away_since: float | None = None
        self._subscribed: set[tuple[str, str]] = set()
        self._herald = Herald(identity, self._publish_presence, broker=str(address))
        self._announcement: bytes | None = None
        self._loop = asyncio.get_running_loop()
        will = packing.encode(Presence(NodeState.LOST, identity.role, reason="connection lost"), identity.session)
        self.link = Link(
            address,
            client_id=f"{identity.name}-{identity.session[:8]}-{secrets.token_hex(2)}",
            keepalive_s=transfer.keepalive_s,
            received=self._received,
            find_place=self._find_place,
            landed=self._landed,
            connected=self._connected,
            lost=self._lost,
            will=(topics.state(identity.lab, identity.run, identity.name), will),
        )
        self.courier = Courier(identity, self.link, self.account, ways, wake=self.wake)
        self.outgoing = self.courier.outgoing

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._loop.time()

    def wake(self) -> None:
        """Let the pump look at the cores again; call it after any change, from the event loop."""
        self._wake.set()

    def set_state(self, state: NodeState, *, reason: str = "", samples: int = 0, invalid: bool = False) -> None:
        """Say how this node is, retained."""
        self._herald.set_state(state, reason=reason, samples=samples, invalid=invalid)

    def set_targets(self, targets: tuple[Target, ...]) -> None:
        """Say where the /metrics of this node's children are, retained."""
        self._herald.set_targets(targets)

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
        self._herald.leaving = True

    async def introduced(self, *, timeout_s: float) -> None:
        """Wait until the broker has been told that this node is there, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected_once.wait()
        except TimeoutError:
            pass

    async def leave(self, *, timeout_s: float) -> None:
        """Clear what this node keeps on the broker, as far as the broker is there within `timeout_s`."""
        lab, run, name = self.identity.lab, self.identity.run, self.identity.name
        self.link.publish(topics.state(lab, run, name), b"", qos=1, retain=True)
        if self._announcement is not None:
            self.link.publish(topics.spec(lab, run, name), b"", qos=1, retain=True)
        await self.flush(timeout_s=timeout_s)

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until what was said has left for the broker."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.courier.empty()
                await self.link.flush()
        except TimeoutError:
            pass  # the broker is away; its will speaks for us

    def cut(self, receivers: Sequence[str]) -> tuple[int, str]:
        """Return the chunk bytes and the salt of a blob for receivers whose links are alike."""
        way = self._ways.to[receivers[0]]
        return chunk_bytes_for(way.rate, self.chunk_most), str(way)

    def offer(self, manifest: Manifest, blob: memoryview, receivers: Sequence[str]) -> bytes | None:
        """Hold a model, which must stay unchanged until it is retired, for receivers whose links are alike.

        Return its bytes where they are few enough to travel inside the announcement.
        """
        self.outgoing.offer(manifest, blob, receivers)
        inline_most = min(self._inline_most, chunk_bytes_for(self._ways.to[receivers[0]].rate, self._inline_most))
        return bytes(blob) if manifest.size <= inline_most else None

    def forwards(self, model: Arriving, receivers: Sequence[str]) -> bool:
        """Return whether to pass a model on before it is here: it is large, and cut finely enough for their links."""
        way, manifest = self._ways.to[receivers[0]], model.manifest
        fine = manifest.chunk_bytes <= chunk_bytes_for(way.rate, self.chunk_most)
        return fine and not model.complete and manifest.size > self._inline_most

    def forward(self, model: Arriving, receivers: Sequence[str]) -> Manifest:
        """Pass a model on, as it comes, to receivers whose links are alike, until it is retired."""
        manifest = renamed(model.manifest, salt=str(self._ways.to[receivers[0]]))
        self.outgoing.offer(manifest, model.buffer, receivers, to_come=model.lacking)
        model.watch = self.wake
        return manifest

    def retire(self, blob: str) -> None:
        """Stop serving a blob; from now on its memory may be written."""
        self.courier.retire(blob)

    def send(self, peer: str, message: Message) -> None:
        """Send a control message to a peer's inbox."""
        self.courier.send(peer, message, self.now())

    # Towards the cores

    def _find_place(self, topic_text: str, size: int) -> Landing | None:
        try:
            topic = topics.parse(topic_text)
        except WireError:
            return None
        if not isinstance(topic, topics.ChunkTopic):
            return None
        return self.incoming.place(topic.node, topic.blob, index=topic.index, size=size)

    def _landed(self, topic_text: str, place: Place) -> None:
        topic = topics.parse(topic_text)
        if isinstance(topic, topics.ChunkTopic) and place.view is not None:
            self._chunk(topic, topic_text, place.view)
        self._wake.set()

    def _received(self, topic_text: str, body: bytes, retained: bool) -> None:
        if self._figures is not None and self._figures.take(topic_text, body):
            return
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

    def _chunk(self, topic: topics.ChunkTopic, text: str, body: bytes | memoryview) -> None:
        now = self.now()
        kind = "probe" if topic.blob in self.courier.noise else "model"
        self.account.add(topic.node, "received", message=packet_bytes(text, len(body), qos=0), **{kind: len(body)})
        fresh = self.incoming.receive_chunk(
            topic.node, topic.blob, lane=topic.lane, index=topic.index, number=topic.number, data=body, now=now
        )
        if fresh:
            self._face.moved(topic.node, now)

    def _control(self, topic: topics.InboxTopic, text: str, body: bytes) -> None:
        now = self.now()
        if topic.sender not in self._face.peers:
            raise WireError(f"a stranger: {topic.sender}")
        try:
            session, message = packing.decode(body)
        except WireError:
            size = packet_bytes(text, len(body), qos=1)
            self.account.add(topic.sender, "received", message=size, control=len(body))
            raise
        size = packet_bytes(text, len(body), qos=qos_of(message))
        model = inline_bytes(message)
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
            self._herald.hear(topic.run, session, message, retained=retained)
        elif topic.node in self._face.peers and topic.run == self.identity.run:
            self._face.presence(topic.node, session, message, self.now())

    # Towards the broker

    async def _pump(self) -> None:
        while True:
            self._wake.clear()
            now = self.now()
            while (event := self.incoming.next_event()) is not None:
                self._face.transferred(event, now)
            if self._away_since is not None and now - self._away_since > self._transfer.idle_s:
                raise NoProgress(f"broker {self.link.address} was away for {self._transfer.idle_s:g} s")
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
        return self.courier.publish_chunks(now)

    async def _connected(self) -> None:
        identity = self.identity
        if not self._connected_once.is_set():
            self._mind_limit(await packet_limit(self.link.address))
        self._subscribed.clear()
        self._away_since = None
        lab, run, name = identity.lab, identity.run, identity.name
        self.link.subscribe([topics.state(lab, "+", name)], qos=1)
        self.link.subscribe([topics.state(lab, run, peer) for peer in self._face.peers], qos=1)
        self.link.subscribe([topics.inbox(lab, run, name, peer) for peer in self._face.peers], qos=1)
        self._herald.connected()
        self._publish_announcement()
        if self._figures is not None:
            self.link.subscribe(list(self._figures.topics), qos=0)
        now = self.now()
        self.incoming.reconnected(now)
        self._face.reconnected(now)
        self._connected_once.set()
        self._wake.set()

    def _mind_limit(self, limit: int | None) -> None:
        """Cut what is offered from now on to packets that the broker takes."""
        most = inf if limit is None else limit - PACKET_ROOM
        if most < MIN_RATED_CHUNK:
            raise ConnectionFailed(
                f"broker {self.link.address} takes packets of at most {limit} bytes, models need "
                f"{MIN_RATED_CHUNK + PACKET_ROOM}. Raise its max_packet_size."
            )
        self.chunk_most = int(min(self._transfer.chunk_bytes, most))
        self._inline_most = int(min(self._transfer.inline_bytes, most))

    def _lost(self) -> None:
        self._away_since = self.now()
        self._wake.set()

    def _subscribe_lanes(self) -> None:
        wanted = self.incoming.wanted()
        self.link.unsubscribe(self._lanes(self._subscribed - wanted))
        self.link.subscribe(self._lanes(wanted - self._subscribed), qos=0)
        self._subscribed = wanted

    def _lanes(self, fetches: Iterable[tuple[str, str]]) -> list[str]:
        lab, run, me = self.identity.lab, self.identity.run, self.identity.name
        return [lane for owner, blob in sorted(fetches) for lane in topics.lanes(lab, run, owner, me, blob)]

    def _publish_presence(self, presence: Presence) -> None:
        topic = topics.state(self.identity.lab, self.identity.run, self.identity.name)
        self.link.publish(topic, packing.encode(presence, self.identity.session), qos=1, retain=True)

    def _publish_announcement(self) -> None:
        if self._announcement is not None:
            topic = topics.spec(self.identity.lab, self.identity.run, self.identity.name)
            self.link.publish(topic, self._announcement, qos=1, retain=True)
