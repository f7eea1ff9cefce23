"""The faults of a random lab as data: kind, time, duration, node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final


class FaultKind(StrEnum):
    """The kinds of faults."""

    KILL = "kill"
    TERMINATE = "terminate"
    STOP = "stop"
    BROKER = "broker restart"
    PARTITION = "partition"
    LOSS = "loss"
    DUPLICATION = "duplication"
    REORDERING = "reordering"
    SLOW = "slow link"
    RATES = "changing rates"
    ONE_WAY = "cut in one direction"
    BLACK_HOLE = "black hole"
    MUTE = "message loss"
    STRANGER = "stranger"
    FLIP = "flipped bits"
    FLOOD = "flood of asks"
    SEEKERS = "flood of seekers"
    HANG = "hang in preparation"
    WRONG = "wrong configuration"
    REMAINS = "remains of a dead run"
    SECOND = "second node"
    LIES = "lies of a member"
    UNREAD = "refused subscriptions"
    PACKETS = "packet limit"
    CLOCK = "clock jump"
    SLEEP = "host sleeps"
    DISK = "full disk"
    EVALUATOR = "dead evaluator"
    WORKER = "dead worker"
    ENTRY = "new device"
    VISIT = "visit"


RESTARTS: Final = (
    FaultKind.KILL,
    FaultKind.TERMINATE,
    FaultKind.HANG,
    FaultKind.WRONG,
    FaultKind.SECOND,
)
CUTS: Final = (
    FaultKind.STOP,
    FaultKind.SLEEP,
    FaultKind.PARTITION,
    FaultKind.ONE_WAY,
    FaultKind.BLACK_HOLE,
    FaultKind.SLOW,
    FaultKind.RATES,
    FaultKind.UNREAD,
)


# the detail of a member that lies in nothing else: no model needs them
SIDE: Final = "side numbers"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `node`: a node's or a broker's name, or "" for all nodes.

    at_s: since the start; with a permanent fault other than a hang, since a device of its
    institution has trained for_s: infinite if it is permanent amount: a share, bytes, bytes per
    second, messages that were seen before, a clock offset in
        seconds, or the evaluators, or the workers of a training, that die one after another, by
        kind
    detail: the kind of message that is lost, the store of a restarted broker, the direction of a
    cut, or a new
        device's parent
    keep: whether a restarted node keeps its files    clean: SIGTERM instead of SIGKILL
    """

    kind: FaultKind
    at_s: float
    for_s: float
    node: str = ""
    amount: float = 0.0
    detail: str = ""
    keep: bool = True
    clean: bool = False

    @property
    def end_s(self) -> float:
        """The time at which it ends, seconds."""
        return self.at_s + self.for_s

    @property
    def permanent(self) -> bool:
        """Whether it lasts until the lab is over."""
        return self.for_s == inf

    @property
    def restarts(self) -> bool:
        """Whether a process of `node` restarts."""
        return self.kind in RESTARTS

    def __str__(self) -> str:
        when = (
            f"{self.at_s:.2f}s for ever" if self.permanent else f"{self.at_s:.2f}+{self.for_s:.2f}s"
        )
        parts = [when, self.kind.value, self.node, self.detail]
        parts += [f"{self.amount:g}"] if self.amount else []
        parts += [] if self.keep else ["without files"]
        parts += ["clean"] if self.clean else []
        return " ".join(part for part in parts if part)


def longest_s(faults: tuple[Fault, ...], *, keepalive_s: float) -> float:
    """Return the longest time without an undisturbed moment, including each fault's recovery,
    seconds.

    Permanent faults aside, which `tests.simulation.losses` judges.
    """
    longest = end = begin = 0.0
    lasting = (fault for fault in faults if not fault.permanent and fault.detail != SIDE)
    for fault in sorted(lasting, key=lambda fault: fault.at_s):
        over = fault.end_s + recovery_s(fault, keepalive_s=keepalive_s)
        if fault.at_s > end:
            begin, end = fault.at_s, over
        end = max(end, over)
        longest = max(longest, end - begin)
    return longest


def recovery_s(fault: Fault, *, keepalive_s: float) -> float:
    """Return the time within which progress resumes after a fault (reconnects, repeats, asks),
    seconds.
    """
    return RECOVERY_S + (2 * keepalive_s if fault.kind in CUTS else 0.0)


RECOVERY_S: Final = 10.0
