"""One node's part in one broker connection, without I/O: the common half of both sides' sessions.

    broker --receive, place, landed--> Session --to_send--> broker
                                          |
                        next_event, next_deadline, tick --> the endpoint (`common.runtime`)

`ParentSession` and `ChildSession` add their side of the rounds. A session sends only state, which is repeated until it
is answered. So nothing is sent or queued while the broker is away. Invalid messages are refused, counted and reported,
and change nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Final

from common.accounting.counters import Account, packet_bytes
from common.errors import Flooded, Misfit, OtherRelease, WireError
from common.experiment.links import LinkSet
from common.experiment.schema import TransferSettings
from common.protocol import serialization, topics
from common.protocol.admission import Admission
from common.protocol.bounds import SMALL_BYTES
from common.protocol.fetches import SKIPPED, Landing, Skipped
from common.protocol.identity import Identity
from common.protocol.messages import (
    Alive,
    Announcement,
    Ask,
    Failure,
    Gone,
    NodeState,
    WhoIsThere,
)
from common.protocol.offers import Offers
from common.protocol.outbox import Outbox, Output, Publish, Subscribe
from common.protocol.pending import Budget, PendingAnswers, PendingAsks
from common.protocol.presence import OwnPresence, PeerProofs
from common.protocol.receiver import Receiver
from common.protocol.refusals import Refusal, Refusals, refusal_of
from common.protocol.sender import Publication, Sender
from common.protocol.session_events import BrokerAway, BrokerDrops, ByteMeter, NameTaken, NoiseFetched
from common.protocol.side import Side
from common.protocol.streams import Streams

SILENT_MOST_S: Final = 30.0
LIVED_S: Final = 5.0  # a connection that lasts this long is none that the broker drops at once


class Session(Side):
    """The common part of both sides. `persistent`: ask for a peer's proof of life without end.

    `first_number`: of the chunks' publications, from a clock, so that numbers grow over restarts.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        peers: Sequence[str],
        transfer: TransferSettings,
        ways: LinkSet,
        meter: ByteMeter,
        first_number: int,
        persistent: bool,
    ) -> None:
        self.identity = identity
        self.peers = tuple(peers)
        self.transfer = transfer
        self.ways = ways
        self.meter = meter
        self.counters = Account()
        self.refusals = Refusals(frozenset(peers))
        self.other_releases: dict[str, str] = {}  # peers, each with both versions of the protocol
        self.sender = Sender(first_number=first_number)
        self.receiver = Receiver(
            window=transfer.window,
            slots=transfer.upload_slots,
            ways=ways.from_,
            keepalive_s=transfer.keepalive_s,
            exclusive=len(self.peers) == 1,
            idle_s=transfer.idle_s,
        )
        self.outbox = Outbox(identity, sender=self.sender, counters=self.counters, ways=ways)
        self.offers = Offers(transfer, ways, sender=self.sender, outbox=self.outbox)
        self.own = OwnPresence(identity)
        silent_s = min(transfer.idle_s, SILENT_MOST_S)
        self.proofs = PeerProofs(peers, identity, silent_s=silent_s, persistent=persistent)
        self._known = frozenset(peers)
        self._connected, self._connected_at = False, -inf
        self._away_since: float | None = None
        self._lossy = False
        self._first: list[Output] = []  # first outputs on a new connection
        self._streams = Streams(identity)
        self._announcement: Announcement | None = None
        self._announce = False
        self._asks = PendingAsks()
        self._answers = PendingAnswers(self._known, namesake=identity.name)
        self._budget = Budget()
        self._admission = Admission()
        self._now = 0.0
        self._events: deque[object] = deque()

    # From the broker

    def connected(self, now: float, *, packet_most: float = inf) -> None:
        """Note a new connection to a broker that accepts packets of at most `packet_most` bytes."""
        lab, run, name = self.identity.lab, self.identity.run, self.identity.name
        self._connected, self._connected_at = True, now
        self.offers.limit(packet_most)
        self._streams.clear()
        states = [topics.state(lab, "+", name), *(topics.state(lab, run, peer) for peer in self.peers)]
        self._first = [Subscribe((*states, *self._inboxes()), first=True)]
        self.own.connected()
        self._announce = self._announcement is not None
        self.receiver.reconnected(now)
        self.proofs.reconnected(now)
        self._reconnected(now)

    def disconnected(self, now: float) -> None:
        """Note the loss of the connection."""
        if self._away_since is None:
            self._away_since = now
        self._connected = False
        self.outbox.clear()
        self._asks.clear()

    def place(self, topic_text: str, size: int) -> Landing | Skipped | None:
        """Return the destination of an arriving chunk, None if it is not wanted; SKIPPED for what is too large."""
        if size <= SMALL_BYTES and not self.receiver.wanted():
            return None
        try:
            topic = topics.parse(topic_text)
        except WireError as error:
            return self._skip("", topic_text, size, error) if size > SMALL_BYTES else None
        try:
            self._admission.check_size(topic, size)
        except WireError as error:
            return self._skip(topics.sender_of(topic), topic_text, size, error)
        if not isinstance(topic, topics.ChunkTopic) or topic.run != self.identity.run:
            return None
        return self.receiver.place(topic, size)

    def landed(self, topic_text: str, landing: Landing, now: float) -> bool:
        """Handle a chunk that was written to its destination; return whether something follows from it at once."""
        if landing.view is not None:
            self._chunk(landing.topic, topic_text, landing.view, now)
        return self.receiver.is_due() or bool(self._events)

    def receive(self, topic_text: str, body: bytes, *, retained: bool, now: float) -> None:
        """Handle a message with any content."""
        self._away_since = None  # reset here: a broker that accepts a connection and drops it is still away
        sender = ""
        try:
            topic = topics.parse(topic_text)
            sender = topics.sender_of(topic)
            self._admission.check_size(topic, len(body))
            if isinstance(topic, topics.ChunkTopic):
                self._chunk(topic, topic_text, body, now)
            elif isinstance(topic, topics.InboxTopic):
                self._inbox(topic, topic_text, body, now)
            elif isinstance(topic, topics.StateTopic):
                self._state(topic, body, now, retained=retained)
            elif isinstance(topic, topics.SeekTopic):
                self._sought(topic, body, now)
        except WireError as error:
            if isinstance(error, OtherRelease) and sender in self._known:
                self.other_releases[sender] = str(error)
            if isinstance(error, Flooded) and sender in self._known:
                self.proofs.want(sender, now)  # its presence may be among what is not read
            self._refuse_message(sender, topic_text, len(body), error)

    # To the broker

    def to_send(self, now: float) -> list[Output]:
        """Return what is due, in order; nothing while the broker is away."""
        if not self._connected:
            return []
        out, self._first = self._first, []
        lab, run, name = self.identity.lab, self.identity.run, self.identity.name
        for presence in self.own.to_send():
            body = serialization.encode(self.own.timed(presence, now), self.identity.session)
            out.append(Publish(topics.state(lab, run, name), body, retain=True))
        for old in self.own.remains():
            out += [Publish(topic(lab, old, name), b"", retain=True) for topic in (topics.state, topics.spec)]
        if self._announce and self._announcement is not None:
            self._announce = False
            body = serialization.encode(self._announcement, self.identity.session)
            out.append(Publish(topics.spec(lab, run, name), body, retain=True))
        for peer, question in self.proofs.questions(now):
            out += self._question(peer, question, now)
        self._answer_questions(now)
        for peer, message in self._due(now):
            self.outbox.send(peer, message, now)
        out += self._streams.to_send(self.receiver.wanted())  # before the asks, so that their chunks are not missed
        for owner, ask in self.receiver.to_send():
            self.outbox.send(owner, ask, now)
        self._take_asks(now)
        out += self.outbox.to_send(now)
        return out

    def sent(self, chunk: Publication) -> None:
        """Note that a chunk has left, or was lost with its connection."""
        self.outbox.sent(chunk)

    # Time

    def tick(self, now: float) -> None:
        """Evaluate the state machines at this time."""
        self._now = now
        if self._connected:
            fetches = self.receiver.next_deadline() is not None  # else nothing asks for the bytes, a system call
            self.receiver.tick(now, carried=self.meter.received() if fetches else -1)
            for peer in self.proofs.silent(now):
                self._silent(peer, now)
        if now >= self._away_at():
            self._away_since = None
            if not self._connected or now < self._connected_at + LIVED_S:  # else nobody has sent anything since
                self._events.append(BrokerAway())
        self._tick(now)
        self._collect(now)

    def next_event(self) -> object | None:
        """Return the next event; an event that follows from the handling of another one is returned too."""
        if not self._events:
            self._collect(self._now)
        return self._events.popleft() if self._events else None

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` or `to_send` next has something to do."""
        if not self._connected:
            at = min(self._away_at(), self._next_deadline_away())
            return at if at < inf else None
        times = (self.receiver.next_deadline(), self._next_deadline(), self.outbox.next_deadline(now))
        answers = (self.proofs.next_deadline(), self._answers.next_deadline(), self._away_at())
        at = min(*answers, *(time for time in times if time is not None))
        return at if at < inf else None

    def _away_at(self) -> float:
        """Return when the broker will have been away for too long."""
        return inf if self._away_since is None else self._away_since + self.transfer.idle_s

    # This node

    def set_state(
        self, state: NodeState, *, reason: str = "", samples: int = 0, failure: Failure = Failure.NONE
    ) -> None:
        """Publish this node's state, retained."""
        self.own.set_state(state, reason=reason, samples=samples, failure=failure)

    def begin(self, begun: float) -> None:
        """Note when the run's first global round began, in monotonic seconds: the time zero of all traces."""
        self.own.begin(begun)
        self.outbox.begin(begun)

    def announce(self, announcement: Announcement) -> None:
        """Publish the experiment, retained, and send it to nodes that look for a run."""
        self._announcement, self._announce = announcement, True

    def leave(self, *, keep_state: bool) -> list[Output]:
        """Return the messages that clear this node's topics; `keep_state` keeps its state for nodes that were away."""
        lab, run, name = self.identity.lab, self.identity.run, self.identity.name
        out: list[Output] = [] if keep_state else [Publish(topics.state(lab, run, name), b"", retain=True)]
        if self._announcement is not None:
            out.append(Publish(topics.spec(lab, run, name), b"", retain=True))
            self._announcement = None
        return out

    # Handling of received messages

    def _collect(self, now: float) -> None:
        while (event := self.receiver.next_event()) is not None:
            if (event.owner, event.blob) in self.outbox.noise:
                self._events.append(NoiseFetched(event))
            else:
                self._transferred(event, now)
        self._take_events(now)

    def _chunk(self, topic: topics.ChunkTopic, text: str, body: bytes | memoryview, now: float) -> None:
        if topic.node not in self._known or topic.run != self.identity.run:
            self._refuse(Refusal.STRANGER, topic.node, f"a chunk on {text[:80]}")
            return
        size = packet_bytes(text, len(body), qos=0)
        if (topic.node, topic.blob) in self.outbox.noise:
            self.counters.add(topic.node, "received", message=size, probe=len(body))
        else:
            extras = min(len(body), self.receiver.extras.in_chunk(topic.node, topic.blob, topic.index))
            self.counters.add(topic.node, "received", message=size, model=len(body) - extras, extras=extras)
        fresh = self.receiver.receive_chunk(
            topic.node, topic.blob, stream=topic.stream, index=topic.index, number=topic.number, data=body, now=now
        )
        if fresh:
            self._moved(topic.node, now)
        if self.receiver.loses and not self._lossy:
            self._lossy = True
            self._events.append(BrokerDrops(self.receiver.chunks_lost, self.receiver.chunks_arrived))

    def _inbox(self, topic: topics.InboxTopic, text: str, body: bytes, now: float) -> None:
        sender = topic.sender
        if sender not in self._known:
            self._refuse(Refusal.STRANGER, sender, f"a message of {len(body)} bytes")
            return
        session, message = self._admission.read(sender, self.proofs.session(sender), body, now)
        if topic.run != self.identity.run:
            self._elsewhere(topic.run, sender, session, message)
            return
        if isinstance(message, WhoIsThere):
            self._ask_for_proof(sender, message, now)
        elif isinstance(message, Alive):
            if not self._take_answer(sender, session, message, now):
                return
        elif not self.proofs.speaks(sender, session, now):
            self._refuse(Refusal.SESSION, sender, f"a {type(message).__name__} of session {session[:16]!r}")
            return
        else:
            self._lives(sender, session, now)
        self.outbox.count_received(sender, text, body, message)
        self.receiver.note_arrival(now)
        if isinstance(message, Ask):
            if not self._asks.receive(sender, message):
                raise Flooded("asks for too many blobs at once")
        elif isinstance(message, Gone):
            self.receiver.gone(sender, message.blob, now=now)
        elif not isinstance(message, WhoIsThere | Alive):
            self._message(sender, session, message, now)

    def _take_answer(self, sender: str, session: str, answer: Alive, now: float) -> bool:
        """Handle a proof of life; return whether it was asked for."""
        if answer.announcement is not None:
            return False  # late reply to the search for this run, which has been found
        if not self.proofs.answered(sender, session, answer):
            raise Misfit("a reply without a question")
        self._presence(sender, session, answer.presence, now, published=False)
        return True

    def _state(self, topic: topics.StateTopic, body: bytes, now: float, *, retained: bool) -> None:
        own = topic.node == self.identity.name
        if not own and (topic.node not in self._known or topic.run != self.identity.run):
            self._refuse(Refusal.STRANGER, topic.node, "a presence")
            return
        mine = self.identity.session if own else self.proofs.session(topic.node)
        session, message = self._admission.read_presence(topic.node, mine, body, now, retained=retained)
        if own:
            self.own.receive(topic.run, session, message, retained=retained)
            if self.own.taken:
                self._events.append(NameTaken(self.own.taken))
        elif message is None:
            self._presence(topic.node, session, None, now)
        elif self.proofs.receive(topic.node, session, message, retained=retained, now=now):
            self._presence(topic.node, session, message, now)
        elif retained:
            self._state_of_the_dead(topic.node, message)

    def _sought(self, topic: topics.SeekTopic, body: bytes, now: float) -> None:
        known = topic.child if topic.child in self._known else ""
        session, message = self._admission.read(known, self.proofs.session(known) if known else "", body, now)
        if not isinstance(message, WhoIsThere):
            raise WireError(f"a seeker does not send a {type(message).__name__}")
        if topic.parent != self.identity.name:
            return
        ours = topic.child in self._known and message.run == self.identity.run
        if ours and self.proofs.speaks(topic.child, session, now):
            self._lives(topic.child, session, now)
        self._ask_for_proof(topic.child, message, now)

    def _ask_for_proof(self, asker: str, question: WhoIsThere, now: float) -> None:
        if not self._answers.receive(asker, question, now=now):
            raise Flooded("too many unknown nodes ask for proof of life")

    def _answer_questions(self, now: float) -> None:
        for asker, question in self._answers.due(now):
            peer, _ = asker
            if self.identity.claim.lost:
                continue  # the name belongs to another process, which answers for it
            inside = question.run == self.identity.run
            namesake = peer == self.identity.name  # another cloud asks whether the lab is free
            if inside or namesake or self._announcement is not None:  # else there is nothing to join; it asks again
                announcement = None if inside or namesake else self._announcement
                answer = Alive(question.nonce, self.own.timed(self.own.presence, now), announcement)
                self._answers.sent(asker, self.outbox.send(peer, answer, now))

    def _take_asks(self, now: float) -> None:
        for peer, ask in self._asks.take():
            before = self.sender.chunks_delivered
            answer = self.sender.receive(peer, ask, now=now)
            if self.sender.chunks_delivered > before:
                self._moved(peer, now)
            if answer is not None and self._budget.take(peer, now):
                self.outbox.send(peer, answer, now)

    def _skip(self, sender: str, topic_text: str, size: int, error: WireError) -> Skipped:
        self._refuse_message(sender, topic_text, size, error)
        return SKIPPED

    def _refuse_message(self, sender: str, topic_text: str, size: int, error: WireError) -> None:
        refusal = refusal_of(error)
        where = f"{size} bytes on {topic_text[:80]}: " if refusal is Refusal.MALFORMED else ""
        self._refuse(refusal, sender, f"{where}{error}")

    def _refuse(self, refusal: Refusal, sender: str, reason: str) -> None:
        event = self.refusals.add(refusal, sender, reason)
        if event is not None:
            self._events.append(event)
