"""A parent's status record: made from what it knows of its children, and published while somebody
asks for it.

Nothing is sent when nobody looks. A record is bounded whatever the number of children: those that
are missing, refused or slow are named, the others are counted by what they do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from heapq import nsmallest
from math import inf, isfinite
from typing import Any, Final

from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.protocol.messages import (
    LIVING,
    ChildCount,
    ChildStatus,
    Key,
    LinkBytes,
    NodeState,
    PhaseSeconds,
    RoundScore,
    RunStatus,
    Status,
    Step,
)
from fedstrata.common.protocol.round_state import GLOBAL_PHASES, ChildInRound, ChildState

PUBLISH_S: Final = 1.0  # between two records, or the seconds that BYTES_S takes for one
BYTES_S: Final = 4000
WATCHED_S: Final = 10.0  # after the last request
NAMED_MOST: Final = 48  # children
TEXT_MOST: Final = 400  # characters of each child's text
ROUNDS_KEPT: Final = 30
ROUNDS_TIMED: Final = 10  # for the mean seconds of a global round

STEPS: Final = tuple(Step)
_STEP_OF: Final[Mapping[str, Step]] = {
    "fetching": Step.FETCHING,
    "waiting": Step.WAITING,
    "training": Step.TRAINING,
    "announcing": Step.OFFERING,
}
_OF_STATE: Final[Mapping[ChildState, Step]] = {
    ChildState.IDLE: Step.IDLE,
    ChildState.ASSIGNED: Step.ASSIGNED,
    ChildState.ANNOUNCED: Step.OFFERING,
    ChildState.ACCEPTED: Step.DONE,
    ChildState.REFUSED: Step.REFUSED,
}


class Publishing:
    """When a parent publishes its status: at once when it is asked, then every `PUBLISH_S` until
    nobody asks.
    """

    def __init__(self) -> None:
        self._until = self._at = -inf

    def asked(self, now: float) -> None:
        """Note a request."""
        self._until = now + WATCHED_S

    def due(self, now: float) -> bool:
        """Return whether a record is due."""
        return self._at <= now < self._until

    def hasten(self) -> None:
        """Publish the next record at once, if somebody asks: it is the last one."""
        self._at = -inf

    def published(self, nbytes: int, now: float) -> None:
        """Note a record of so many bytes."""
        self._at = now + max(PUBLISH_S, nbytes / BYTES_S)

    def next_deadline(self) -> float:
        """Return when a record is due, inf if nobody asks."""
        if self._at < self._until:
            return self._at
        return inf


def status_of(
    children: Mapping[str, ChildInRound],
    ledger: Ledger,
    *,
    now: float,
    key: Key | None,
    is_open: bool,
    measuring: bool,
    waits_for: Mapping[str, str],
    uploads: Mapping[str, tuple[int, int]],
    run: RunStatus | None,
) -> Status:
    """Return a parent's status at `now`, monotonic seconds; a child that has moved is in the record
    of another one.

    `waits_for`: of children that prepare, the nodes that they lack. `uploads`: of each arriving
    result the chunks that have arrived, and all.
    """
    children = {name: child for name, child in children.items() if not child.has_moved}
    named = set(children)
    if len(children) > NAMED_MOST:
        ranks = {name: _rank(child, uploads.get(name)) for name, child in children.items()}
        named = set(nsmallest(NAMED_MOST, children, key=ranks.__getitem__))
    shown = []
    counts: Counter[tuple[NodeState | None, Step]] = Counter()
    for name, child in children.items():
        if name in named:
            lacks = waits_for.get(name, "")
            upload = uploads.get(name)
            shown.append(_child_status(name, child, ledger, waits_for=lacks, upload=upload))
        else:
            counts[child.presence, step_of(child)] += 1
    tiers = (LinkBytes(links.received, links.sent) for links in ledger.tiers())
    others = (ChildCount(state, step, count) for (state, step), count in counts.items())
    return Status(now, key, is_open, measuring, tuple(tiers), tuple(shown), tuple(others), run)


def step_of(child: ChildInRound) -> Step:
    """Return what a child does in its round."""
    if child.state is ChildState.WORKING:
        if child.mark is not None:
            return _STEP_OF[child.mark[0]]
        return Step.ASSIGNED
    return _OF_STATE[child.state]


def _progress(child: ChildInRound, upload: tuple[int, int] | None) -> tuple[int, int]:
    """Return how much of its step a child has done, and of how much, 0 of 0 if that is not
    known.
    """
    if child.state is ChildState.ANNOUNCED:
        return upload or (0, 0)
    if child.state is ChildState.WORKING and child.mark is not None and child.total:
        return min(child.mark[1], child.total), child.total
    return 0, 0


def _rank(child: ChildInRound, upload: tuple[int, int] | None) -> tuple[bool, bool, int, float]:
    """Return a sort key: missing children first, then those at work, the slowest first."""
    step = step_of(child)
    done, total = _progress(child, upload)
    works = Step.IDLE is not step is not Step.DONE
    share = done / total if total else 0.0
    return child.presence in LIVING, not works, STEPS.index(step), share


def _child_status(
    name: str,
    child: ChildInRound,
    ledger: Ledger,
    *,
    waits_for: str,
    upload: tuple[int, int] | None,
) -> ChildStatus:
    step = step_of(child)
    done, total = _progress(child, upload)
    size = epochs = 0
    if child.assignment is not None:
        epochs = child.assignment.epochs
        if step is Step.FETCHING:
            size = child.assignment.model.size
    if step is Step.OFFERING and child.result is not None:
        size = child.result.model.size
    links = ledger.link(name)
    text = child.refusal or child.declined or child.reason
    if child.presence is NodeState.INIT:
        text = text or waits_for
    return ChildStatus(
        name,
        child.presence,
        step,
        done,
        total,
        size,
        epochs,
        links.received,
        links.sent,
        _finite(child.loss),
        child.worked_s,
        text[:TEXT_MOST],
    )


class RunProgress:
    """A run's progress as its cloud reports it in its events."""

    def __init__(self) -> None:
        self.status = RunStatus()
        self._elapsed: deque[float] = deque(maxlen=ROUNDS_TIMED + 1)

    def take(self, event: str, facts: Mapping[str, Any]) -> None:
        """Take an event of the cloud."""
        before = self.status
        if event == "run":
            self.status = replace(before, closed=facts["done"])
        elif event == "begun":
            self.status = replace(before, elapsed_s=float(facts["elapsed_s"]))
            self._elapsed.append(self.status.elapsed_s)
        elif event == "global_round":
            closed = facts["global_round"]
            elapsed_s = float(facts["elapsed_s"])
            self._elapsed.append(elapsed_s)
            round_s = elapsed_s / closed
            if len(self._elapsed) > 1:
                round_s = (elapsed_s - self._elapsed[0]) / (len(self._elapsed) - 1)
            phases = ((phase, facts.get(f"{phase}_s")) for phase in GLOBAL_PHASES)
            seconds = (PhaseSeconds(phase, float(s)) for phase, s in phases if s is not None)
            score = RoundScore(closed, _finite(facts["train_loss"]), None, None)
            scores = (*before.scores, score)[-ROUNDS_KEPT:]
            self.status = RunStatus(closed, elapsed_s, round_s, tuple(seconds), scores)
        elif event == "evaluated":
            place = facts["global_round"]
            known = {each.global_round: each for each in before.scores}
            row = known.get(place, RoundScore(place, None, None, None))
            known[place] = replace(row, score=_finite(facts["score"]), loss=_finite(facts["loss"]))
            scores = tuple(known[each] for each in sorted(known))[-ROUNDS_KEPT:]
            self.status = replace(before, scores=scores)


def _finite(number: float | None) -> float | None:
    if number is not None and isfinite(number):
        return number
    return None
