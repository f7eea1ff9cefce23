"""When a round closes: a pure decision on counts and times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.experiment.rounds import Closing


class Verdict(Enum):
    """What to do with an open round."""

    WAIT = "wait"
    CLOSE = "close"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a round stands, in children. `refused` ones count as answered: the round goes on with the others.

    `absent`: not ready when the round opened, and not since; the others that are expected are `waiting`.
    """

    accepted: int
    refused: int
    idle: int
    waiting: int
    absent: int = 0


def judge(closing: Closing, standing: Standing, *, overdue: bool) -> Verdict:
    """Return whether the round closes, waits, or can never close; `overdue`: its `deadline_s` has passed.

    `all`: every child has answered; one idle child makes it impossible. `quorum`: everybody who was there has
    answered and the quorum is there, or the deadline has passed and the quorum is there; impossible when those left
    cannot fill it.
    """
    s = standing
    by_quorum = closing.rule == "quorum"
    if not by_quorum and s.idle:
        return Verdict.IMPOSSIBLE
    need = (closing.quorum or 1) if by_quorum else 1
    if s.accepted + s.waiting + s.absent < need:
        return Verdict.IMPOSSIBLE
    if s.waiting + s.absent == 0:
        return Verdict.CLOSE
    if by_quorum and s.accepted >= need and (overdue or s.waiting == 0):
        return Verdict.CLOSE
    return Verdict.WAIT
