"""What peers want to know, kept until the next look, and bounded for each: a flood of questions costs one answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf
from typing import Final

from common.protocol.messages import Ask, WhoIsThere

ASKS_KEPT: Final = 16  # of one peer, each for another blob
ANSWER_S: Final = 0.2  # between two answers to one who asks who is there
SEEKERS_KEPT: Final = 256  # names that no peer has
ANSWERS_MOST: Final = 16  # to one peer at once; more come one each ANSWER_S


class PendingAsks:
    """The last ask of each peer for each blob: it carries the receiver's whole state."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Ask]] = {}

    def receive(self, peer: str, ask: Ask) -> bool:
        """Take an ask; return whether none had to be dropped for it."""
        mine = self._of.setdefault(peer, {})
        before = mine.pop(ask.blob, None)
        restart = ask.restart or (before is not None and before.restart)
        mine[ask.blob] = ask if restart is ask.restart else replace(ask, restart=restart)
        if len(mine) > ASKS_KEPT:
            del mine[next(iter(mine))]
            return False
        return True

    def take(self) -> list[tuple[str, Ask]]:
        """Return what came since the last look."""
        if not self._of:
            return []
        asks = [(peer, ask) for peer, mine in self._of.items() for ask in mine.values()]
        self._of = {}
        return asks

    def clear(self) -> None:
        """Drop all: the connection is gone."""
        self._of = {}


class PendingAnswers:
    """The questions who is there: the last one of each node, answered once in ANSWER_S."""

    def __init__(self, peers: Collection[str]) -> None:
        self._peers = peers
        self._questions: dict[str, tuple[float, WhoIsThere]] = {}
        self._answered: dict[str, float] = {}

    def receive(self, asker: str, question: WhoIsThere, *, now: float) -> bool:
        """Take a question; return whether it will be answered."""
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
        """Note when an answer leaves: on a slow link the next one waits until then."""
        self._answered[asker] = due

    def next_deadline(self) -> float:
        """Return when `due` has something."""
        return min((due for due, _ in self._questions.values()), default=inf)


class AnswerBudget:
    """How many small answers a peer may cost. One that is not sent is asked for again."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}

    def take(self, peer: str, now: float) -> bool:
        """Return whether a peer may have one more answer."""
        full_at = max(self._full_at.get(peer, now), now) + ANSWER_S
        if full_at > now + ANSWERS_MOST * ANSWER_S:
            return False
        self._full_at[peer] = full_at
        return True
