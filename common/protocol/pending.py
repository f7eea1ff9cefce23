"""Pending questions of peers, limited per peer: a flood of questions costs one reply."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import replace
from itertools import count
from math import inf
from typing import Final, TypeAlias

from common.protocol.messages import Ask, WhoIsThere

ASKS_KEPT: Final = 16  # per peer, each for another blob
ANSWER_S: Final = 0.2  # between two replies to one node's `WhoIsThere`
SEEKERS_MOST: Final = 256  # answers in a burst to nodes that are not peers, then one per SEEKER_S: each is large
SEEKER_S: Final = 0.05
ANSWERS_MOST: Final = 16  # to one peer in a burst; then one per ANSWER_S
MESSAGES_MOST: Final = (
    2048  # of one session in a burst, then one per MESSAGE_S: a hundred short rounds a second have fewer
)
MESSAGE_S: Final = 0.002
ASKS_MOST: Final = 8192  # of one session in a burst, then one per ASK_S: more than a fast transfer of small chunks has
ASK_S: Final = 0.0005
PRESENCES_MOST: Final = 32  # of one name in a burst, then one per PRESENCE_S
PRESENCE_S: Final = 0.2
ROUNDING_S: Final = 1e-6  # of sums

Asker: TypeAlias = tuple[str, str]  # a node's name, and the nonce of a namesake


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

    def clear(self) -> None:
        """Drop all asks: the connection is lost."""
        self._of = {}


class PendingAnswers:
    """Pending `WhoIsThere` questions: the last one of each node, answered at most once per ANSWER_S.

    `namesake`: a node's own name. Several processes may use it, such as clouds that want the lab: each of their nonces
    is answered.
    """

    def __init__(self, peers: Collection[str], *, namesake: str = "") -> None:
        self._peers = peers
        self._namesake = namesake
        self._questions: dict[Asker, WhoIsThere] = {}
        self._due: list[tuple[float, int, Asker]] = []  # a heap: when each is answered, in order, and its asker
        self._numbers = count()
        self._answered: dict[Asker, float] = {}  # the last one last
        self._strangers = Budget(SEEKERS_MOST, SEEKER_S)

    def receive(self, name: str, question: WhoIsThere, *, now: float) -> bool:
        """Store a question; return whether it will be answered.

        All nodes that are not peers share one budget, all namesakes another one.
        """
        same = name == self._namesake
        asker = name, question.nonce if same else ""
        if asker not in self._questions:
            if name not in self._peers and not self._strangers.take(name if same else "", now):
                return False
            due = max(now, self._answered.get(asker, -inf) + ANSWER_S)
            heapq.heappush(self._due, (due, next(self._numbers), asker))
        self._questions[asker] = question
        return True

    def due(self, now: float) -> list[tuple[Asker, WhoIsThere]]:
        """Return the questions to answer now, each with its asker."""
        ready = []
        while self._due and now >= self._due[0][0]:
            asker = heapq.heappop(self._due)[2]
            ready.append((asker, self._questions.pop(asker)))
            self.sent(asker, now)
        while self._answered and now >= self._answered[first := next(iter(self._answered))] + ANSWER_S:
            del self._answered[first]
        return ready

    def sent(self, asker: Asker, due: float) -> None:
        """Note when a reply leaves: on a slow link the next one waits until then."""
        self._answered.pop(asker, None)
        self._answered[asker] = due

    def next_deadline(self) -> float:
        """Return when `due` has something."""
        return self._due[0][0] if self._due else inf


class Budget:
    """Limit of what each peer may cause: `most` in a burst, then one per `each_s`."""

    def __init__(self, most: int = ANSWERS_MOST, each_s: float = ANSWER_S) -> None:
        self._most_s, self._each_s = most * each_s, each_s
        self._full_at: dict[str, float] = {}

    def take(self, peer: str, now: float, units: int = 1) -> bool:
        """Return whether a peer may cause one more, which counts as so many."""
        full_at = max(self._full_at.get(peer, now), now) + units * self._each_s
        if full_at > now + self._most_s + ROUNDING_S:
            return False
        self._full_at[peer] = full_at
        return True

    def owe(self, peer: str, units: int) -> None:
        """Count what a peer has caused beyond the last one that it might."""
        self._full_at[peer] += units * self._each_s
