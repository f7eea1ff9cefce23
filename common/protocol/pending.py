"""Pending questions of peers, limited per peer: a flood of questions costs one reply."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf
from typing import Final

from common.protocol.messages import Ask, WhoIsThere

ASKS_KEPT: Final = 16  # per peer, each for another blob
ANSWER_S: Final = 0.2  # between two replies to one node's `WhoIsThere`
SEEKERS_KEPT: Final = 256  # nodes that are not peers
ANSWERS_MOST: Final = 16  # to one peer in a burst; then one per ANSWER_S


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
    """Pending `WhoIsThere` questions: the last one of each node, answered at most once per ANSWER_S."""

    def __init__(self, peers: Collection[str]) -> None:
        self._peers = peers
        self._questions: dict[str, tuple[float, WhoIsThere]] = {}
        self._answered: dict[str, float] = {}

    def receive(self, asker: str, question: WhoIsThere, *, now: float) -> bool:
        """Store a question; return whether it will be answered."""
        if asker not in self._peers and asker not in self._questions and len(self._questions) >= SEEKERS_KEPT:
            return False
        due = max(now, self._answered.get(asker, -inf) + ANSWER_S)
        self._questions[asker] = due, question
        return True

    def due(self, now: float) -> list[tuple[str, WhoIsThere]]:
        """Return the questions to answer now, each with its asker."""
        if not self._questions:
            return []
        ready = [asker for asker, (due, _) in self._questions.items() if now >= due]
        self._answered = {asker: at for asker, at in self._answered.items() if now < at + ANSWER_S}
        self._answered |= dict.fromkeys(ready, now)
        return [(asker, self._questions.pop(asker)[1]) for asker in ready]

    def sent(self, asker: str, due: float) -> None:
        """Note when a reply leaves: on a slow link the next one waits until then."""
        self._answered[asker] = due

    def next_deadline(self) -> float:
        """Return when `due` has something."""
        return min((due for due, _ in self._questions.values()), default=inf)


class AnswerBudget:
    """Limit of the small replies to each peer. The peer asks again for a reply that is not sent."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}

    def take(self, peer: str, now: float) -> bool:
        """Return whether a peer may get one more reply."""
        full_at = max(self._full_at.get(peer, now), now) + ANSWER_S
        if full_at > now + ANSWERS_MOST * ANSWER_S:
            return False
        self._full_at[peer] = full_at
        return True
