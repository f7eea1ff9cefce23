"""What a peer may send, and what happens to the rest.

Before a message is read, its bytes and its sender's budget are checked. Questions are kept, the
last one of each peer, until they are answered, so a flood of questions costs one reply. A refused
message is counted with its reason and changes nothing else.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from math import inf
from typing import Final, TypeAlias

from fedstrata.common.errors import Flooded, Misfit, TooLarge, WireError
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.limits import ANYBODY, STRANGER, SenderBounds, bytes_on
from fedstrata.common.protocol.messages import (
    DIGEST_BYTES,
    Alive,
    Ask,
    Message,
    Presence,
    Question,
    Reports,
    Result,
)

ASK: Final = bytes([serialization.KINDS.index(Ask)])  # as it follows the session
HEAD_BYTES: Final = 48  # of a message, which contain its sender's session
COUNTED_BYTES: Final = 32_768  # of a message that count as another one
# reports or addresses in a message that count as another one: to read them takes as long
COUNTED_ITEMS: Final = 10
ASKS_KEPT: Final = 16  # per peer, each for another blob
ANSWER_S: Final = 0.2  # between two replies to one node's questions
# answers in a burst to nodes that are not peers, then one per SEEKER_S: each is large
SEEKERS_MOST: Final = 256
SEEKER_S: Final = 0.05
ANSWERS_MOST: Final = 16  # to one peer in a burst; then one per ANSWER_S
# of one session in a burst, then one per MESSAGE_S: a hundred rounds a second have fewer
MESSAGES_MOST: Final = 2048
MESSAGE_S: Final = 0.002
# Of one session in a burst, then one per ASK_COSTS_S: more than a fast transfer of small chunks
# has.
ASKS_MOST: Final = 8192
ASK_COSTS_S: Final = 0.0005
PRESENCES_MOST: Final = 32  # of one name in a burst, then one per PRESENCE_S
PRESENCE_S: Final = 0.2
ROUNDING_S: Final = 1e-6  # of sums

Asker: TypeAlias = tuple[str, str]  # a node's name, and the nonce of a namesake


class Admission:
    """The limits of one session's peers. `bounds`: of each peer's messages, as far as the
    experiment decides them.
    """

    def __init__(self) -> None:
        self.bounds: dict[str, SenderBounds] = {}
        self._messages = Budget(MESSAGES_MOST, MESSAGE_S)
        self._asks = Budget(ASKS_MOST, ASK_COSTS_S)
        self._presences = Budget(PRESENCES_MOST, PRESENCE_S)

    def forget(self, peer: str) -> None:
        """Forget what a node has caused."""
        for budget in (self._messages, self._asks, self._presences):
            budget.forget(peer)
            budget.forget(_of_another(peer))

    def check_size(self, topic: topics.Topic, size: int) -> None:
        """Check the bytes of a message before they arrive. Raises TooLarge."""
        sender = topics.sender_of(topic)
        most = bytes_on(topic, self.bounds.get(sender, ANYBODY))
        if size > most:
            raise TooLarge(f"{size} bytes, at most {most} are possible")

    def read(self, peer: str, session: str, body: bytes, now: float) -> tuple[str, Message]:
        """Return the sender's session and a control message, counted under the name of a peer with
        this session.

        `peer`: "" for a node that is none. Asks have a budget of their own: only they grow with the
        chunks of a transfer. What a message cost beyond its bytes is counted once it is read: the
        next one waits for that. Raises WireError.
        """
        at = body.find(session.encode(), DIGEST_BYTES, HEAD_BYTES) if session else -1
        if at >= 0 and body.startswith(ASK, at + len(session)):
            budget = self._asks
        else:
            budget = self._messages
        source = _source(peer, session, body)
        if not budget.take(source, now, 1 + len(body) // COUNTED_BYTES):
            raise Flooded("too many messages at once")
        bounds = self.bounds.get(peer, ANYBODY) if peer else STRANGER
        found, message = serialization.decode(body, sender=bounds)
        if items := _items(message):
            budget.owe(source, items // COUNTED_ITEMS)
        return found, message

    def read_presence(
        self, node: str, session: str, body: bytes, now: float, *, retained: bool
    ) -> tuple[str, Presence | None]:
        """Return the sender's session and a presence of a node with this session, None if the node
        has cleared it.

        Retained ones are not counted: they come with a subscription. Raises WireError.
        """
        if not retained and not self._presences.take(_source(node, session, body), now):
            raise Flooded("too many presences at once")
        if not body:
            return "", None
        found, message = serialization.decode(body, sender=self.bounds.get(node, ANYBODY))
        if not isinstance(message, Presence):
            raise WireError("no presence on a state topic")
        return found, message


def _items(message: Message) -> int:
    """Return the reports and addresses in a message."""
    if isinstance(message, Result | Reports):
        return len(message.children)
    presence = message.presence if isinstance(message, Alive) else message
    if isinstance(presence, Presence):
        return len(presence.targets)
    return 0


def _source(name: str, session: str, body: bytes) -> str:
    """Return what a message is counted for: others that use a node's name must not spend what its
    session may send.
    """
    if session.encode() in body[:HEAD_BYTES]:
        return name
    return _of_another(name)


def _of_another(name: str) -> str:
    return f"{name} of another session"


class Budget:
    """Limit of what each peer may cause: `most` in a burst, then one per `each_s`."""

    def __init__(self, most: int = ANSWERS_MOST, each_s: float = ANSWER_S) -> None:
        self._most_s = most * each_s
        self._each_s = each_s
        self._full_at: dict[str, float] = {}

    def take(self, peer: str, now: float, units: int = 1) -> bool:
        """Return whether a peer may cause one more, which counts as so many."""
        full_at = max(self._full_at.get(peer, now), now) + units * self._each_s
        if full_at > now + self._most_s + ROUNDING_S:
            return False
        self._full_at[peer] = full_at
        return True

    def forget(self, peer: str) -> None:
        """Forget what a peer has caused."""
        self._full_at.pop(peer, None)

    def owe(self, peer: str, units: int) -> None:
        """Count what a peer has caused beyond the last one that it might."""
        self._full_at[peer] += units * self._each_s


class PendingAsks:
    """The last ask of each peer for each blob; an ask has the receiver's complete state."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Ask]] = {}

    def receive(self, peer: str, ask: Ask) -> bool:
        """Store an ask; return False if another one was dropped for it."""
        mine = self._of.setdefault(peer, {})
        before = mine.pop(ask.blob, None)
        restart = ask.restart or (before is not None and before.restart)
        mine[ask.blob] = ask if restart is ask.restart else replace(ask, restart=restart)
        if len(mine) > ASKS_KEPT:
            del mine[next(iter(mine))]
            return False
        return True

    def take(self) -> list[tuple[str, Ask]]:
        """Return the asks since the last call."""
        if not self._of:
            return []
        asks = [(peer, ask) for peer, mine in self._of.items() for ask in mine.values()]
        self._of = {}
        return asks


class PendingAnswers:
    """Pending questions for this node's presence: the last one of each node, answered at most once
    per ANSWER_S.

    `namesake`: a node's own name. Several processes may use it, such as clouds that want the lab:
    each of their nonces is answered.
    """

    def __init__(self, peers: Collection[str], *, namesake: str = "") -> None:
        self._peers = peers
        self._namesake = namesake
        self._questions: dict[Asker, Question] = {}
        # a heap: when each is answered, in order, and its asker
        self._due: list[tuple[float, int, Asker]] = []
        self._numbers = count()
        self._answered: dict[Asker, float] = {}  # the last one last
        self._strangers = Budget(SEEKERS_MOST, SEEKER_S)

    def receive(self, name: str, question: Question, *, now: float) -> bool:
        """Store a question; return whether it will be answered.

        All nodes that are not peers share one budget, all namesakes another one.
        """
        asker = (name, "")
        source = ""
        if name == self._namesake:
            asker = (name, question.nonce)
            source = name
        if asker not in self._questions:
            if name not in self._peers and not self._strangers.take(source, now):
                return False
            due = max(now, self._answered.get(asker, -inf) + ANSWER_S)
            heapq.heappush(self._due, (due, next(self._numbers), asker))
        self._questions[asker] = question
        return True

    def due(self, now: float) -> list[tuple[Asker, Question]]:
        """Return the questions to answer now, each with its asker."""
        ready = []
        while self._due and now >= self._due[0][0]:
            asker = heapq.heappop(self._due)[2]
            ready.append((asker, self._questions.pop(asker)))
            self.sent(asker, now)
        while self._answered:
            first, answered = next(iter(self._answered.items()))
            if now < answered + ANSWER_S:
                break
            del self._answered[first]
        return ready

    def sent(self, asker: Asker, due: float) -> None:
        """Note when a reply leaves: on a slow link the next one waits until then."""
        self._answered.pop(asker, None)
        self._answered[asker] = due

    def next_deadline(self) -> float:
        """Return when `due` has something."""
        if self._due:
            return self._due[0][0]
        return inf


class Refusal(Enum):
    """Why a message is refused."""

    MALFORMED = "malformed"
    STRANGER = "unknown sender"
    SESSION = "unknown session"
    MISFIT = "does not fit"
    FLOOD = "too many"
    LARGE = "too large"


def refusal_of(error: WireError) -> Refusal:
    """Return why a message with this error is refused."""
    found = {Misfit: Refusal.MISFIT, Flooded: Refusal.FLOOD, TooLarge: Refusal.LARGE}
    return found.get(type(error), Refusal.MALFORMED)


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """One of `count` messages of a sender that were refused for this reason so far; reported at 1,
    2, 4, 8 ...
    """

    refusal: Refusal
    sender: str
    reason: str
    count: int


class Refusals:
    """The refused messages of one session, by sender; all senders that are not peers are counted
    together.
    """

    def __init__(self, peers: Collection[str]) -> None:
        self._peers = peers
        self._counts: Counter[tuple[str, Refusal]] = Counter()

    def add(self, refusal: Refusal, sender: str, reason: str) -> MessageRefused | None:
        """Count one message; return the event if it is to be logged."""
        known = sender if sender in self._peers else ""
        self._counts[known, refusal] += 1
        count = self._counts[known, refusal]
        if count & (count - 1) == 0:
            return MessageRefused(refusal, sender, reason, count)
        return None

    @property
    def total(self) -> int:
        """The number of refused messages."""
        return self._counts.total()

    def of(self, refusal: Refusal) -> int:
        """Return the number of messages refused for this reason. May be called from another
        thread.
        """
        return sum(count for (_, kind), count in list(self._counts.items()) if kind is refusal)
