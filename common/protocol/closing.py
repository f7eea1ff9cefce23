"""When a round closes: a pure decision on counts and times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.spec import Closing


class Verdict(Enum):
    """What to do with an open round."""

    WAIT = "wait"
    CLOSE = "close"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a round stands. `refused` children count as answered: the round goes on with the others."""

    accepted: int
    refused: int
    idle: int
    waiting: int


def judge(closing: Closing, standing: Standing, *, elapsed_s: float) -> Verdict:
    """Return whether the round closes, waits, or can never close.

    `all`: every child has answered; one idle child makes it impossible. `quorum`: everybody answered, or
    `deadline_s` has passed and the quorum is there; impossible when those left cannot fill it.
    """
    s = standing
    if closing.rule == "all":
        if s.idle:
            return Verdict.IMPOSSIBLE
        need = 1
    else:
        need = closing.quorum or 1
    if s.accepted + s.waiting < need:
        return Verdict.IMPOSSIBLE
    if s.waiting == 0:
        return Verdict.CLOSE
    if closing.deadline_s is not None and elapsed_s >= closing.deadline_s and s.accepted >= need:
        return Verdict.CLOSE if closing.rule == "quorum" else Verdict.WAIT
    return Verdict.WAIT
