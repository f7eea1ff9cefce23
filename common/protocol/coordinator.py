"""The parent's side of a round: says its wish until it is answered, and closes by progress, not by time-outs.

    a child in an open round:

        ASSIGNED --word of this round--> WORKING --Result--> OFFERED --accept--> ACCEPTED
           ^                                |                   |----refuse--> REFUSED
           +-------- a new session ---------+-------------------+

The wish (`Task`) is repeated while a child is ASSIGNED and present, and whenever a child falls silent, so a
lost message costs a repeat and nothing else. A child is given up only after `idle_s` without progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final, TypeAlias

from common.protocol.closing import Standing, Verdict, judge
from common.protocol.messages import Key, Manifest, NodeState, Phase, Presence, Progress, Receipt, Result, Task
from common.protocol.timeline import Timeline
from common.spec import Closing

REPEAT_S: Final = 1.0
REPEAT_MOST_S: Final = 5.0
CARRIED_BYTES: Final = 16_384  # of a chunk on its way; acknowledgements and pings need an hour for as much


class ChildState(Enum):
    """Where a child stands in the open round."""

    ASSIGNED = "assigned"
    WORKING = "working"
    OFFERED = "offered"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one child is to train; `inline` carries a small model with the wish."""

    model: Manifest
    epochs: int
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """A child announces its result: fetch and check it, then `accept` or `refuse`."""

    child: str
    result: Result


@dataclass(frozen=True, slots=True)
class Restarted:
    """A child came back as a new process: whatever was under way with the old one is void."""

    child: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The round is over. `missing` did not answer, `refused` answered with what cannot be used."""

    key: Key
    results: Mapping[str, Result]
    missing: tuple[str, ...]
    refused: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stalled:
    """The round can never close; `reason` says who did what, `idle` whether somebody just fell silent."""

    reason: str
    idle: bool


CoordinatorEvent: TypeAlias = Offered | Restarted | Closed | Stalled


@dataclass(slots=True)
class _Child:
    session: str = ""
    retired: set[str] = field(default_factory=set)
    presence: NodeState | None = None
    assignment: Assignment | None = None
    state: ChildState = ChildState.ACCEPTED
    result: Result | None = None
    refusal: str = ""
    reason: str = ""
    moved: float = 0.0
    repeat_at: float = 0.0
    repeat_s: float = REPEAT_S
    told: bool = False
    mark: tuple[Phase, int] | None = None
    carried: int = 0
    answered: tuple[Key, str] | None = None
    has_model: bool = False

    @property
    def present(self) -> bool:
        return self.presence in (NodeState.INIT, NodeState.READY)


class Coordinator:
    """One parent's rounds over its children, one round open at a time."""

    def __init__(self, children: Iterable[str], *, idle_s: float) -> None:
        self._children = {name: _Child() for name in children}
        self._idle_s = idle_s
        self._key: Key | None = None
        self._closing = Closing()
        self._open = False
        self._judged = -inf
        self._quiet_until = -inf  # nothing becomes due earlier: most looks at a round find nothing to do
        self._collected = -inf
        self._events: deque[CoordinatorEvent] = deque()
        self._receipts: deque[tuple[str, Receipt]] = deque()
        self.timeline = Timeline(0.0)
        self.late = 0

    def open(
        self, *, iteration: int, round_: int, assignments: Mapping[str, Assignment], closing: Closing, now: float
    ) -> Key:
        """Open a round for the children named; an earlier round than the last begins a new attempt."""
        attempt = 0
        if self._key is not None:
            back = (iteration, round_) <= (self._key.iteration, self._key.round)
            attempt = self._key.attempt + back
        self._key = Key(attempt, iteration, round_)
        self._closing = closing
        self._open = True
        self._judged = self._collected = -inf
        self.timeline = Timeline(now)
        for name, child in self._children.items():
            child.assignment = assignments.get(name)
            child.result, child.refusal, child.mark, child.has_model = None, "", None, False
            child.moved = now - self._idle_s if child.presence is NodeState.FAILED else now
            self._assign(child, now)
        return self._key

    def receive(self, name: str, session: str, message: Progress | Result, *, now: float) -> None:
        """Take a child's word; whatever does not fit the open round is answered or ignored."""
        child = self._children.get(name)
        if child is None or session in child.retired:
            return
        if message.key == self._key:
            child.repeat_at = now + REPEAT_MOST_S  # it has the wish: say it again only after silence
        self._meet(name, child, session, now)
        if message.key != self._key or not self._open or child.assignment is None:
            if isinstance(message, Result):
                self._answer_old(name, child, message)
            return
        if child.state is ChildState.ASSIGNED:
            child.state = ChildState.WORKING
            child.moved = now
        mark = (message.phase, message.done) if isinstance(message, Progress) else (Phase.OFFERING, 0)
        carried = message.traffic.carried_models
        if child.mark != mark or carried >= child.carried + CARRIED_BYTES:
            child.mark, child.carried, child.moved = mark, carried, now
        if isinstance(message, Progress):
            if message.phase is not Phase.FETCHING:
                self._received_model(child, now)
        elif child.state is ChildState.WORKING:
            self._received_model(child, now)
            child.state, child.result, child.moved = ChildState.OFFERED, message, now
            first = self.timeline.first_result
            self.timeline.first_result = now if first is None else first
            if all(c.result for c in self._taking_part()):
                self.timeline.last_result = now
            self._events.append(Offered(name, message))
        elif child.state is ChildState.ACCEPTED:
            self._receipts.append((name, Receipt(message.key, "")))
        elif child.state is ChildState.REFUSED:
            self._receipts.append((name, Receipt(message.key, child.refusal)))

    def presence(self, name: str, session: str, presence: Presence | None, *, now: float) -> bool:
        """Take a child's retained state; None = it left.

        Return False for what says nothing of the child: the last word of a process that has a successor (a will may
        come a minute late), or of a second one of its name.
        """
        child = self._children.get(name)
        if child is None:
            return False
        if presence is None:
            child.presence = None
            return True
        if presence.state not in (NodeState.INIT, NodeState.READY) and child.session not in ("", session):
            return False
        child.presence, child.reason = presence.state, presence.reason
        self._judged = self._quiet_until = -inf
        if presence.state is NodeState.FAILED:
            child.moved = now - self._idle_s  # it said itself that it will not come back
        if child.present:
            child.retired.discard(session)  # the broker's order decides who holds the name
            self._meet(name, child, session, now)
            if presence.state is NodeState.READY and child.state is ChildState.ASSIGNED:
                child.repeat_at = now
        return True

    def moved(self, name: str, *, now: float) -> None:
        """Note that bytes of a model moved between us and a child: that is progress."""
        child = self._children.get(name)
        if child is None:
            return
        child.moved = now
        if child.state is ChildState.OFFERED:
            self._collected = now

    def reconnected(self, now: float) -> None:
        """Note that our own connection is new: while it was away, no child could move."""
        for child in self._children.values():
            if child.presence is not NodeState.FAILED:
                child.moved = now

    def accept(self, name: str, key: Key, *, now: float) -> None:
        """Take the result that a child offered under `key`: its model is here, whole and sound."""
        if self._is_offered(name, key):
            self._children[name].state, self._children[name].moved = ChildState.ACCEPTED, now
            self._children[name].answered = key, ""
            self._receipts.append((name, Receipt(key, "")))
            self._judge(now)

    def refuse(self, name: str, key: Key, *, reason: str, now: float) -> None:
        """Refuse that result for good; the round goes on with the others."""
        if self._is_offered(name, key):
            self._children[name].state, self._children[name].refusal = ChildState.REFUSED, reason
            self._children[name].answered = key, reason
            self._receipts.append((name, Receipt(key, reason)))
            self._judge(now)

    def ask_again(self, name: str, key: Key, *, now: float) -> None:
        """Wait for that result again: the child no longer holds the model that it offered."""
        if self._is_offered(name, key):
            self._children[name].result = None
            self._assign(self._children[name], now)

    def tick(self, now: float) -> None:
        """Judge the round by the time."""
        if self._open and now >= self._quiet_until:
            self._judge(now)

    def to_send(self, now: float) -> list[tuple[str, Task | Receipt]]:
        """Return the messages that are due, each with its child."""
        due: list[tuple[str, Task | Receipt]] = list(self._receipts)
        self._receipts.clear()
        if not self._open or self._key is None or now < self._quiet_until:
            return due
        for name, child in self._children.items():
            wish = child.assignment
            if wish is None or not self._to_be_told(child) or now < child.repeat_at:
                continue
            # Repeats leave an inline model out: one that did not get it pulls it.
            due.append((name, Task(self._key, wish.epochs, wish.model, None if child.told else wish.inline)))
            child.told = True
            child.repeat_s = min(2 * child.repeat_s, REPEAT_MOST_S)
            child.repeat_at = now + child.repeat_s
        self._quiet_until = self._earliest()
        return due

    def next_deadline(self) -> float | None:
        """Return when `to_send` or `tick` next has something to do."""
        if not self._open:
            return None
        at = self._quiet_until if self._quiet_until > -inf else self._earliest()
        return at if at < inf else None

    def next_event(self) -> CoordinatorEvent | None:
        """Return the next event."""
        return self._events.popleft() if self._events else None

    def states(self) -> dict[str, str]:
        """Return each child's presence, for the metrics; `absent` where none was seen."""
        return {name: str(child.presence or "absent") for name, child in self._children.items()}

    def idle(self, now: float) -> dict[str, float]:
        """Return how long each child has made no progress, in seconds; 0 for those that nobody waits for."""
        waiting = {name: self._open and self._may_idle(child) for name, child in self._children.items()}
        return {n: max(0.0, now - self._moved_at(c)) if waiting[n] else 0.0 for n, c in self._children.items()}

    def _is_offered(self, name: str, key: Key) -> bool:
        return self._open and key == self._key and self._children[name].state is ChildState.OFFERED

    def progress(self) -> dict[str, dict[str, object]]:
        """Return how each child does, for a person to read."""
        return {
            name: {
                "presence": str(child.presence or "absent"),
                "state": child.state.value,
                "phase": str(child.mark[0]) if child.mark else "",
                "epochs": child.assignment.epochs if child.assignment else 0,
            }
            for name, child in self._children.items()
        }

    def _earliest(self) -> float:
        """Return when a message or a judgement becomes due as things stand; later events only delay it."""
        times = [child.repeat_at for child in self._taking_part() if self._to_be_told(child)]
        # What has been judged is no reason to wake: one that is given up must not keep the event loop spinning.
        idle = (self._moved_at(c) + self._idle_s for c in self._taking_part() if self._may_idle(c))
        times += [at for at in idle if at > self._judged]
        deadline_s = self._closing.deadline_s
        if deadline_s is not None and self._judged - self.timeline.opened < deadline_s:
            times.append(self.timeline.opened + deadline_s)
        return min(times, default=inf)

    def _moved_at(self, child: _Child) -> float:
        """Return when a child last made progress; one whose upload waits for a slot moves with the others' uploads."""
        return max(child.moved, self._collected) if child.state is ChildState.OFFERED else child.moved

    def _taking_part(self) -> list[_Child]:
        return [child for child in self._children.values() if child.assignment is not None]

    def _assign(self, child: _Child, now: float) -> None:
        child.state = ChildState.ASSIGNED if child.assignment is not None else ChildState.ACCEPTED
        child.repeat_at, child.repeat_s, child.told = now, REPEAT_S / 2, False
        self._quiet_until = -inf

    def _meet(self, name: str, child: _Child, session: str, now: float) -> None:
        if session == child.session:
            return
        if child.session:
            child.retired.add(child.session)
            self._events.append(Restarted(name))
        child.session, child.moved, child.mark, child.carried = session, now, None, 0
        if self._open and child.state in (ChildState.ASSIGNED, ChildState.WORKING, ChildState.OFFERED):
            child.result = None
            self._assign(child, now)

    def _answer_old(self, name: str, child: _Child, result: Result) -> None:
        if self._key is None or (self._open and result.key >= self._key):
            return
        if child.answered is None or child.answered[0] != result.key:
            self.late += 1
            child.answered = result.key, "the round has closed"
        self._receipts.append((name, Receipt(*child.answered)))

    def _received_model(self, child: _Child, now: float) -> None:
        child.has_model = True
        if self.timeline.dispatched is None and all(c.has_model for c in self._taking_part()):
            self.timeline.dispatched = now

    def _to_be_told(self, child: _Child) -> bool:
        return child.present and child.state in (ChildState.ASSIGNED, ChildState.WORKING)

    def _may_idle(self, child: _Child) -> bool:
        waiting = child.state in (ChildState.ASSIGNED, ChildState.WORKING, ChildState.OFFERED)
        return waiting and child.presence is not NodeState.INIT

    def _accepted(self) -> int:
        return sum(child.state is ChildState.ACCEPTED for child in self._taking_part())

    def _judge(self, now: float) -> None:
        self._judged = now
        part = [(n, c) for n, c in self._children.items() if c.assignment is not None]
        idle = [n for n, c in part if self._may_idle(c) and now >= self._moved_at(c) + self._idle_s]
        accepted = self._accepted()
        refused = sum(c.state is ChildState.REFUSED for _, c in part)
        standing = Standing(accepted, refused, len(idle), len(part) - accepted - refused - len(idle))
        verdict = judge(self._closing, standing, elapsed_s=now - self.timeline.opened)
        if verdict is Verdict.CLOSE and self._key is not None:
            self._close(self._key, now)
        elif verdict is Verdict.IMPOSSIBLE:
            self._open = False
            silent = any(self._children[name].presence is not NodeState.FAILED for name in idle)
            self._events.append(Stalled(self._blame(idle), silent))

    def _close(self, key: Key, now: float) -> None:
        self._open = False
        self.timeline.closed = now
        results = {
            n: c.result for n, c in self._children.items()
            if c.assignment is not None and c.state is ChildState.ACCEPTED and c.result is not None
        }  # fmt: skip
        refused = {n: c.refusal for n, c in self._children.items() if c.assignment and c.refusal}
        missing = tuple(n for n, c in self._children.items() if c.assignment and n not in results and n not in refused)
        self._events.append(Closed(key, results, missing, refused))

    def _blame(self, idle: list[str]) -> str:
        words = []
        for name in idle:
            child = self._children[name]
            if child.presence is NodeState.FAILED:
                words.append(f"{name} gave up: {child.reason}")
            else:
                state = f"its state is {child.presence}" if child.session else "it never came"
                words.append(f"{name} made no progress for {self._idle_s:g} s ({state})")
        words += [f"{n}'s model was refused: {c.refusal}" for n, c in self._children.items() if c.refusal]
        return "; ".join(words) or "no child is left"
