"""One node's part in one broker connection, without I/O: presence, admission, transfers and counts.

    broker --receive, place, landed--> PeerLink --to_send--> broker
                                          |
                     messages of peers' present sessions --> the session

A `ParentSession` and a `ChildSession` hold one, and their side of the rounds. A link knows no side:
it passes on what has come from a peer, and sends what it is given. It sends only state, which is
repeated until it is answered. So nothing is sent or queued while the broker is away. Invalid
messages are refused, counted and reported, and change nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.traffic import TcpStats
from fedstrata.common.errors import Flooded, Misfit, OtherRelease, WireError
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import (
    Admission,
    Budget,
    PendingAnswers,
    PendingAsks,
    Refusal,
    Refusals,
    refusal_of,
)
from fedstrata.common.protocol.arrivals import (
    Arrival,
    Elsewhere,
    Joined,
    Living,
    Proven,
    Received,
    Sought,
    Unproven,
)
from fedstrata.common.protocol.events import BrokerAway, BrokerDrops, NameTaken
from fedstrata.common.protocol.limits import SKIPPED, SMALL_BYTES, Skipped
from fedstrata.common.protocol.messages import (
    LIVING,
    About,
    Alive,
    Announcement,
    Ask,
    Gone,
    Manifest,
    Message,
    Question,
)
from fedstrata.common.protocol.offers import Offers
from fedstrata.common.protocol.outbox import (
    OTHERS,
    Aside,
    Outbox,
    Output,
    Publish,
    Subscribe,
    Unsubscribe,
)
from fedstrata.common.protocol.presence import Identity, OwnPresence, PeerProofs
from fedstrata.common.protocol.receiver import Landing, Receiver
from fedstrata.common.protocol.sender import Sender
from fedstrata.common.protocol.status import Publishing
from fedstrata.common.settings.links import LinkSet

SILENT_MOST_S: Final = 30.0
SEEKERS_READ_MOST: Final = 64  # nodes that may join, whose states are read
SEEKER_READ_S: Final = 10.0  # after its last question one is forgotten if others ask
# between two subscriptions to one's state, each of which brings what the broker retains
READ_AGAIN_S: Final = 1.0
LIVED_S: Final = 5.0  # a connection that lasts this long is none that the broker drops at once


class ByteMeter(Protocol):
    """Byte counts of the connection, by the kernel."""

    def sample(self) -> TcpStats:
        """Return the counts of all its sockets so far."""

    def received(self) -> int:
        """Return the bytes received on the present socket, -1 if unknown."""


class PeerLink:
    """One node's connection to its peers. `events`: what the endpoint has to know, in order."""

    def __init__(
        self,
        identity: Identity,
        *,
        peers: Sequence[str],
        transfer: TransferSettings,
        ways: LinkSet,
        meter: ByteMeter,
        # of the chunks' publications, from a clock, so that numbers grow over restarts
        first_number: int,
        # It asks for its peers' proof of life where nodes look for a run, forever.
        seeks: bool,
        # Handles what has come from a peer, at a time; raises WireError for a message that does not
        # fit, which is refused.
        take: Callable[[Arrival, float], None],
        # A chunk of a model was transferred to or from this peer, at a time.
        progressed: Callable[[str, float], None],
    ) -> None:
        self.identity = identity
        self.peers = tuple(peers)
        self._known = set(peers)
        self.transfer = transfer
        self.ways = ways
        self.meter = meter
        self.counters = Account()
        self.refusals = Refusals(self._known)
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
        self.offers = Offers(identity.name, transfer, ways, sender=self.sender, outbox=self.outbox)
        self.own = OwnPresence(identity)
        silent_s = min(transfer.idle_s, SILENT_MOST_S)
        self.proofs = PeerProofs(peers, identity, silent_s=silent_s, persistent=seeks)
        self.admission = Admission()
        self.answers = Budget()
        self.publishing = Publishing()
        self.events: deque[object] = deque()
        self.up = False
        self.away_since: float | None = None
        self._seeks = seeks
        self._take = take
        self._progressed = progressed
        self._connected_at = -inf
        self._lossy = False
        self._first: list[Output] = []  # first outputs on a new connection
        self._new: list[Output] = []  # subscriptions to peers that came later, and their ends
        # nodes that may join, and when each asked last; in this order
        self._expected: dict[str, float] = {}
        self._streams: frozenset[tuple[str, str]] = frozenset()  # of chunks, subscribed to
        self._announcement: Announcement | None = None
        self._announce = False
        self._asks = PendingAsks()
        self._questions = PendingAnswers(self._known, namesake=identity.name)

    def add_peer(self, name: str) -> None:
        """Add an expected node as a peer, whose link is known; read its messages, too."""
        del self._expected[name]
        self.outbox.join(name)
        self.peers = (*self.peers, name)
        self._known.add(name)
        self.proofs.add(name)
        self.receiver.exclusive = False
        self._new.append(Subscribe((self.identity.inbox_from(name),)))

    def remove_peer(self, name: str, *, now: float) -> None:
        """Forget a peer that has been away for long; it is expected again once it asks."""
        self.peers = tuple(peer for peer in self.peers if peer != name)
        self._known.discard(name)
        self.proofs.remove(name)
        self.other_releases.pop(name, None)
        self.receiver.drop(name, now=now)
        self.sender.forget(name)
        self.outbox.forget(name)
        self.ways.remove(name)
        self.admission.forget(name)
        self.answers.forget(name)
        self._new.append(Unsubscribe((self._state_of(name), self.identity.inbox_from(name))))

    def expect(self, name: str, now: float) -> None:
        """Read the state of a node that may join, for as long as few others ask. Raises Flooded.

        It becomes a peer when it has joined: a question costs nobody a place.
        """
        asked = self._expected.pop(name, -inf)
        if asked == -inf and len(self._expected) >= SEEKERS_READ_MOST:
            first = next(iter(self._expected))
            if now < self._expected[first] + SEEKER_READ_S:
                raise Flooded("too many nodes want to enter at once")
            del self._expected[first]
            self.outbox.forget(first)
            self._new.append(Unsubscribe((self._state_of(first),)))
        self._expected[name] = now
        self.outbox.expect(name)
        if now >= asked + READ_AGAIN_S:
            self._new.append(Subscribe((self._state_of(name),)))

    def _state_of(self, name: str) -> str:
        return self.identity.topic(topics.state, name)

    # From the broker

    def connected(self, now: float, *, inboxes: Iterable[str], packet_most: float = inf) -> None:
        """Note a new connection to a broker that accepts packets of at most `packet_most` bytes.

        `inboxes`: the topics of messages to this node.
        """
        own = self.identity
        self.up = True
        self._connected_at = now
        self.offers.set_packet_most(packet_most)
        self.outbox.packet_most = packet_most
        self._streams = frozenset()
        mine = topics.state(own.lab, "+", own.name)
        theirs = map(self._state_of, (*self.peers, *self._expected))
        self._first = [Subscribe((mine, *theirs, *inboxes), first=True)]
        self._new = []
        self.own.connected()
        self._announce = self._announcement is not None
        self.receiver.reconnected(now)
        self.proofs.reconnected(now)

    def disconnected(self, now: float) -> None:
        """Note the loss of the connection."""
        if self.away_since is None:
            self.away_since = now
        self.up = False
        self.outbox.clear()
        self._asks.take()  # they are void

    def place(self, topic_text: str, size: int) -> Landing | Skipped | None:
        """Return the destination of an arriving chunk, None if it is not wanted; SKIPPED for what
        is too large.
        """
        if size <= SMALL_BYTES and not self.receiver.wanted():
            return None
        sender = ""
        try:
            topic = topics.parse(topic_text)
            sender = topics.sender_of(topic)
            self.admission.check_size(topic, size)
        except WireError as error:
            if not sender and size <= SMALL_BYTES:
                return None
            self._refuse_message(sender, topic_text, size, error)
            return SKIPPED
        if not isinstance(topic, topics.ChunkTopic) or topic.run != self.identity.run:
            return None
        return self.receiver.place(topic, size)

    def landed(self, topic_text: str, landing: Landing, now: float) -> bool:
        """Handle a chunk that was written to its destination; return whether something follows from
        it at once.
        """
        if landing.view is not None:
            self._chunk(landing.topic, topic_text, landing.view, now)
        return self.receiver.is_due() or bool(self.events)

    def receive(self, topic_text: str, body: bytes, *, retained: bool, now: float) -> None:
        """Handle a message with any content; an invalid one is refused."""
        # reset here: a broker that accepts a connection and drops it is still away
        self.away_since = None
        sender = ""
        try:
            topic = topics.parse(topic_text)
            sender = topics.sender_of(topic)
            self.admission.check_size(topic, len(body))
            if isinstance(topic, topics.ChunkTopic):
                self._chunk(topic, topic_text, body, now)
            elif isinstance(topic, topics.InboxTopic):
                self._inbox(topic, topic_text, body, now)
            elif isinstance(topic, topics.StateTopic):
                self._state(topic, body, now, retained=retained)
            elif isinstance(topic, topics.AskTopic):
                self._asked(topic, topic_text, body, now, retained=retained)
        except WireError as error:
            if isinstance(error, OtherRelease) and sender in self._known:
                self.other_releases[sender] = str(error)
            if isinstance(error, Flooded) and sender in self._known:
                self.proofs.want(sender, now)  # its presence may be among what is not read
            self._refuse_message(sender, topic_text, len(body), error)

    # To the broker

    def to_send(self, now: float, messages: Iterable[tuple[str, Message]]) -> list[Output]:
        """Return what is due, in order, with the session's messages, each with its peer; not while
        the broker is away.

        The messages are made after the replies to questions have been counted.
        """
        if not self.up:
            return []
        out = [*self._first, *self._new]
        self._first = []
        self._new = []
        own = self.identity
        for presence in self.own.to_send():
            out.append(self._retained(topics.state, self.own.timed(presence, now)))
        for old in self.own.remains():
            for form in (topics.state, topics.spec):
                out.append(Publish(form(own.lab, old, own.name), b"", retain=True))
        if self._announce and self._announcement is not None:
            self._announce = False
            out.append(self._retained(topics.spec, self._announcement))
        for peer, question in self.proofs.questions(now):
            if self._seeks:
                body = serialization.encode(question, own.session)
                out.append(Publish(topics.ask(own.lab, peer, own.name), body))
            else:
                self.outbox.send(peer, question, now)
        self._answer_questions(now)
        for peer, message in messages:
            self.outbox.send(peer, message, now)
        out += self._subscriptions()  # before the asks, so that their chunks are not missed
        for owner, ask in self.receiver.to_send():
            self.outbox.send(owner, ask, now)
        self._take_asks(now)
        out += self.outbox.to_send(now)
        return out

    def _retained(
        self, form: Callable[[str, str, str], str], message: Message | None = None
    ) -> Publish:
        """Return a retained message on a topic of this node; None clears the topic."""
        body = b"" if message is None else serialization.encode(message, self.identity.session)
        return Publish(self.identity.topic(form), body, retain=True)

    # Time

    def tick(self, now: float) -> list[str]:
        """Evaluate the transfers, and how long the broker has been away.

        Return the peers that were alive before the reconnection and do not prove themselves.
        """
        silent: list[str] = []
        if self.up:
            carried = -1
            if (
                self.receiver.next_deadline() < inf
            ):  # else nothing asks for the bytes, a system call
                carried = self.meter.received()
            self.receiver.tick(now, carried=carried)
            silent = list(self.proofs.silent(now))
        if now >= self._away_at():
            self.away_since = None
            # else nobody has sent anything since
            if not self.up or now < self._connected_at + LIVED_S:
                self.events.append(BrokerAway())
        return silent

    def next_event(self) -> object | None:
        """Return the next event for the endpoint."""
        if self.events:
            return self.events.popleft()
        return None

    def next_deadline(self, now: float) -> float:
        """Return when `tick` or `to_send` next has something to do, inf for never."""
        if not self.up:
            return self._away_at()
        return min(
            self.receiver.next_deadline(),
            self.outbox.next_deadline(now),
            self.proofs.next_deadline(),
            self._questions.next_deadline(),
            self._away_at(),
        )

    def _away_at(self) -> float:
        """Return when the broker will have been away for too long."""
        if self.away_since is None:
            return inf
        return self.away_since + self.transfer.idle_s

    # Blobs that are no models

    def fetch_aside(
        self,
        kind: Aside,
        peer: str,
        manifest: Manifest,
        buffer: memoryview,
        now: float,
        *,
        lacking: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Fetch a peer's blob into `buffer`, as `Receiver.fetch`; `BlobFetched` follows."""
        self.outbox.add_aside(kind, peer, manifest.blob)
        self.receiver.fetch(peer, manifest, buffer, lacking=lacking, now=now)

    # This node

    def begin(self, begun: float) -> None:
        """Note when the run's first global round began, in monotonic seconds: the time zero of all
        traces.
        """
        self.own.begin(begun)
        self.outbox.begin(begun)

    def announce(self, announcement: Announcement) -> None:
        """Publish the experiment, retained, and send it to nodes that look for a run."""
        self._announcement = announcement
        self._announce = True

    def leave(self, *, keep_state: bool) -> list[Output]:
        """Return the messages that clear this node's topics; `keep_state` keeps its state for nodes
        that were away.
        """
        out: list[Output] = []
        if not keep_state:
            out.append(self._retained(topics.state))
        if self._announcement is not None:
            out.append(self._retained(topics.spec))
            self._announcement = None
        return out

    # Handling of received messages

    def _chunk(
        self, topic: topics.ChunkTopic, text: str, body: bytes | memoryview, now: float
    ) -> None:
        if topic.node not in self._known or topic.run != self.identity.run:
            self._refuse(Refusal.STRANGER, topic.node, f"a chunk on {text[:80]}")
            return
        extras = min(len(body), self.receiver.extras_in(topic))
        self.outbox.count_chunk(topic, text, len(body), extras=extras)
        if self.receiver.receive_chunk(topic, body, now=now):
            self._progressed(topic.node, now)
        if self.receiver.loses and not self._lossy:
            self._lossy = True
            self.events.append(BrokerDrops(self.receiver.chunks_lost, self.receiver.chunks_arrived))

    def _inbox(self, topic: topics.InboxTopic, text: str, body: bytes, now: float) -> None:
        sender = topic.sender
        if sender not in self._known:
            self._refuse(Refusal.STRANGER, sender, f"a message of {len(body)} bytes")
            return
        session, message = self.admission.read(sender, self.proofs.session(sender), body, now)
        if topic.run != self.identity.run:
            self._take(Elsewhere(topic.run, sender, session, message), now)
            return
        about_presence = isinstance(message, Question) and message.about is About.PRESENCE
        if isinstance(message, Question) and about_presence:
            self._ask_for_proof(sender, message, now)
        elif isinstance(message, Alive):
            if message.announcement is not None:
                return  # late reply to the search for this run, which has been found
            if not self.proofs.answered(sender, session, message):
                raise Misfit("a reply without a question")
            self._take(Proven(sender, session, message.presence, published=False), now)
        elif not self.proofs.speaks(sender, session, now):
            self._refuse(
                Refusal.SESSION, sender, f"a {type(message).__name__} of session {session[:16]!r}"
            )
            return
        else:
            self._take(Living(sender, session), now)
        self.outbox.count_received(sender, text, body, message)
        self.receiver.note_arrival(now)
        if isinstance(message, Ask):
            if not self._asks.receive(sender, message):
                raise Flooded("asks for too many blobs at once")
        elif isinstance(message, Gone):
            self.receiver.gone(sender, message.blob, now=now)
        elif not (about_presence or isinstance(message, Alive)):
            self._take(Received(sender, session, message), now)

    def _state(self, topic: topics.StateTopic, body: bytes, now: float, *, retained: bool) -> None:
        own = topic.node == self.identity.name
        here = topic.run == self.identity.run
        if (
            here
            and topic.node in self._expected
            and not self._joins(topic.node, body, now, retained=retained)
        ):
            return
        if not own and (topic.node not in self._known or not here):
            self._refuse(Refusal.STRANGER, topic.node, "a presence")
            return
        mine = self.identity.session if own else self.proofs.session(topic.node)
        session, message = self.admission.read_presence(
            topic.node, mine, body, now, retained=retained
        )
        if own:
            self.own.receive(topic.run, session, message, retained=retained)
            if self.own.taken:
                self.events.append(NameTaken(self.own.taken))
        elif message is None:
            self._take(Proven(topic.node, session, None), now)
        elif self.proofs.receive(topic.node, session, message, retained=retained, now=now):
            self._take(Proven(topic.node, session, message), now)
        elif retained:
            self._take(Unproven(topic.node, message), now)

    def _joins(self, name: str, body: bytes, now: float, *, retained: bool) -> bool:
        """Take in an expected node that takes part as a child of this node, by its presence."""
        _, presence = self.admission.read_presence(name, "", body, now, retained=retained)
        if (
            presence is None
            or presence.state not in LIVING
            or presence.parent != self.identity.name
        ):
            return False
        self._take(Joined(name), now)
        return True

    def _asked(
        self, topic: topics.AskTopic, text: str, body: bytes, now: float, *, retained: bool
    ) -> None:
        """Handle a question to this node: somebody watches it, or a child, or who may become one,
        looks for it.
        """
        asker = topic.asker
        known = asker if asker in self._known else ""
        mine = self.proofs.session(known) if known else ""
        session, question = self.admission.read(known, mine, body, now)
        answered = (About.PRESENCE, About.STATUS)
        if not isinstance(question, Question) or question.about not in answered:
            raise WireError(f"nobody asks a node for this: {str(question)[:80]}")
        if topic.node != self.identity.name or retained:
            return
        if question.about is About.STATUS:
            self.outbox.count_received(OTHERS, text, body, question)
            if question.run == self.identity.run:
                self.publishing.asked(now)
            return
        if not known:
            self._take(Sought(asker), now)
        elif question.run == self.identity.run and self.proofs.speaks(asker, session, now):
            self._take(Living(asker, session), now)
        self._ask_for_proof(asker, question, now)

    def _ask_for_proof(self, asker: str, question: Question, now: float) -> None:
        if not self._questions.receive(asker, question, now=now):
            raise Flooded("too many unknown nodes ask for proof of life")

    def _answer_questions(self, now: float) -> None:
        for asker, question in self._questions.due(now):
            peer, _ = asker
            if self.identity.claim.lost:
                continue  # the name belongs to another process, which answers for it
            inside = question.run == self.identity.run
            namesake = peer == self.identity.name  # another cloud asks whether the lab is free
            # else there is nothing to join; it asks again
            if inside or namesake or self._announcement is not None:
                announcement = None if inside or namesake else self._announcement
                answer = Alive(question.nonce, self.own.timed(self.own.presence, now), announcement)
                self._questions.sent(asker, self.outbox.send(peer, answer, now))

    def _take_asks(self, now: float) -> None:
        for peer, ask in self._asks.take():
            before = self.sender.chunks_delivered
            answer = self.sender.receive(peer, ask, now=now)
            if self.sender.chunks_delivered > before:
                self._progressed(peer, now)
            if answer is not None and self.answers.take(peer, now):
                self.outbox.send(peer, answer, now)

    def _subscriptions(self) -> list[Output]:
        """Return the outputs that change the subscriptions to streams of chunks to those of the
        active fetches.
        """
        wanted = self.receiver.wanted()
        if wanted == self._streams:
            return []
        ended = self._streams - wanted
        begun = wanted - self._streams
        self._streams = frozenset(wanted)
        out: list[Output] = []
        if ended:
            out.append(Unsubscribe(self._filters(ended)))
        if begun:
            out.append(Subscribe(self._filters(begun)))
        return out

    def _filters(self, fetches: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        own = self.identity
        return tuple(
            each
            for owner, blob in sorted(fetches)
            for each in topics.streams(own.lab, own.run, owner, own.name, blob)
        )

    def _refuse_message(self, sender: str, topic_text: str, size: int, error: WireError) -> None:
        refusal = refusal_of(error)
        where = f"{size} bytes on {topic_text[:80]}: " if refusal is Refusal.MALFORMED else ""
        self._refuse(refusal, sender, f"{where}{error}")

    def _refuse(self, refusal: Refusal, sender: str, reason: str) -> None:
        event = self.refusals.add(refusal, sender, reason)
        if event is not None:
            self.events.append(event)
