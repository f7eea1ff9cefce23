"""When a round closes: a pure function of counts and times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.experiment.rounds import Closing


class Verdict(Enum):
    """The decision about an open round."""

    WAIT = "wait"
    CLOSE = "close"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a round as numbers of children. `refused` ones count as answered: the round continues without them.

    `absent`: not ready since before the round opened. The other expected children are `waiting`.
    """

    accepted: int
    refused: int
    idle: int
    waiting: int
    absent: int = 0


def judge(closing: Closing, standing: Standing, *, overdue: bool) -> Verdict:
    """Return whether the round closes, waits, or can never close; `overdue`: its `deadline_s` has passed.

    Rule `all`: it closes when every child has answered; one idle child makes it impossible. Rule `quorum`: it closes
    when the quorum is reached and either all present children have answered or the deadline has passed; it is
    impossible if the remaining children cannot reach the quorum.
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
