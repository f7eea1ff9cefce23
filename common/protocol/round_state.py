"""The state of an open round: each child's, with its transitions; when the round closes; its events
and its times.

    ASSIGNED --message of this round--> WORKING --Result--> ANNOUNCED --accept--> ACCEPTED
       ^                                   |                    |                    | unused
       |                                   |                    +-----refuse-----> REFUSED
       +------- a new session, or its model is gone ------------+

`unused`: its task ends before a round used its result. `TRANSITIONS` defines this diagram;
`common.protocol.coordinator` uses it. A child without a task is IDLE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final, TypeAlias

from fedstrata.common.protocol.events import UploadAnnounced
from fedstrata.common.protocol.messages import (
    LIVING,
    Acknowledgement,
    Failure,
    Key,
    Manifest,
    NodeState,
    Phase,
    Progress,
    Result,
    RoundTurn,
)
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.devices import OnlineTimes
from fedstrata.common.text import by_cause

# before a task is repeated; twice the time until its child's last answer, if that is longer
REPEAT_S: Final = 1.0
REPEAT_MOST_S: Final = 5.0
HEARTBEAT_S: Final = 2.0  # between two reports of a child at work
# of one that waits for its turn: a thousand devices of one host wait for minutes
WAITING_MOST_S: Final = 15.0
# between two acknowledgements of one child's results, repeated once a second at most
ACKNOWLEDGE_S: Final = 0.2
CHUNKS_CARRIED: Final = 2
# of a partial chunk; acknowledgements and pings need an hour for as many bytes
CARRIED_BYTES: Final = 16_384
TAKEN_BACK: Final = "its task ended before a round used it"  # the result, which had been accepted
MOVED: Final = "moved"  # the state of a child that takes part below another parent
PHASES: Final = ("dispatch", "train", "wait", "collect")
# in order; they add up to a global round
GLOBAL_PHASES: Final = ("record", *PHASES, "aggregate", "evaluate")


def first_repeat_s(answer_s: float) -> float:
    """Return the time until a message is repeated if the last one was answered after `answer_s`.

    A busy machine with many nodes needs longer than others.
    """
    return min(max(REPEAT_S, 2 * answer_s), REPEAT_MOST_S)


def waiting_most_s(idle_s: float) -> float:
    """Return the longest time between two reports of a child that waits; after `idle_s` without any
    it has failed.
    """
    return max(HEARTBEAT_S, min(WAITING_MOST_S, idle_s / 8))


class ChildState(Enum):
    """The state of a child in the open round."""

    IDLE = "idle"
    ASSIGNED = "assigned"
    WORKING = "working"
    ANNOUNCED = "announced"
    ACCEPTED = "accepted"
    REFUSED = "refused"


class ChildCause(Enum):
    """The causes of a child's transitions."""

    MESSAGE = "message of this round"
    RESULT = "result"
    ACCEPT = "accept"
    REFUSE = "refuse"
    TAKE_BACK = "its task ends unused"
    RESTART = "new session"
    RETRY = "its model is gone"


TRANSITIONS: Final[Mapping[ChildCause, Mapping[ChildState, ChildState]]] = {
    ChildCause.MESSAGE: {ChildState.ASSIGNED: ChildState.WORKING},
    ChildCause.RESULT: {ChildState.WORKING: ChildState.ANNOUNCED},
    ChildCause.ACCEPT: {ChildState.ANNOUNCED: ChildState.ACCEPTED},
    ChildCause.REFUSE: {ChildState.ANNOUNCED: ChildState.REFUSED},
    ChildCause.TAKE_BACK: {ChildState.ACCEPTED: ChildState.REFUSED},
    ChildCause.RESTART: dict.fromkeys(
        (ChildState.ASSIGNED, ChildState.WORKING, ChildState.ANNOUNCED), ChildState.ASSIGNED
    ),
    ChildCause.RETRY: {ChildState.ANNOUNCED: ChildState.ASSIGNED},
}
UNFINISHED: Final = (ChildState.ASSIGNED, ChildState.WORKING, ChildState.ANNOUNCED)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The task of one child; `inline` is a small model to send with it, `follows` the message's."""

    model: Manifest
    epochs: int
    inline: bytes | None = None
    follows: int = 0


@dataclass(frozen=True, slots=True)
class Restarted:
    """A child returned as a new process: everything under way with the old one is void."""

    child: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The round is closed. `missing` children have no result, `refused` ones an unusable one."""

    key: Key
    results: Mapping[str, Result]
    missing: tuple[str, ...]
    refused: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stalled:
    """The round can never close, as `children` made no progress; `idle`: one of them without having
    failed.

    `reason` names the causes. `failures`: those of the children that gave up.
    """

    reason: str
    idle: bool
    failures: frozenset[Failure] = frozenset()
    children: frozenset[str] = frozenset()


CoordinatorEvent: TypeAlias = UploadAnnounced | Restarted | Closed | Stalled


@dataclass(slots=True)
class ChildInRound:
    """The state of one child in its parent's open round, or in the task of an earlier one that goes
    on (`carried`).
    """

    session: str = ""
    presence: NodeState | None = None
    assignment: Assignment | None = None
    key: Key | None = None  # of the round that assigned it
    carried: bool = False
    assigned: float = 0.0  # time of the assignment
    answer_s: float = 0.0  # from an assignment to the first message that answers it
    seconds: float = 0.0  # from the assignment to the announcement of the result
    loss: float | None = None  # of its last training, and the seconds that this took
    worked_s: float = 0.0
    state: ChildState = ChildState.IDLE
    result: Result | None = None
    refusal: str = ""
    reason: str = ""
    failure: Failure = Failure.NONE
    declined: str = ""
    progressed: float = 0.0  # time of its last progress
    excused: float = -inf  # `progressed` when the parent's connection was new the last time
    repeat_at: float = 0.0
    repeat_s: float = REPEAT_S
    sent: bool = False
    sent_at: float = -inf  # time of the last task
    # not ready since before the round opened, moved to another parent, or had entered and is lost
    absent: bool = False
    entered: bool = False  # the experiment does not name it here
    mark: tuple[Phase, int] | None = None
    total: int = 0  # at which its phase is done, 0 if unknown
    # bytes carried when the present attempt at a transfer began; None = at its report
    carried_from: int | None = None
    carried_best: int = 0  # bytes of the longest attempt since the last progress
    prepared: int = -1
    acknowledged: Acknowledgement | None = None  # the last one
    used: tuple[int, int] | None = None  # the global and local round of its last used result
    acknowledge_at: float = -inf  # earliest time of the next acknowledgement
    has_model: bool = False
    online: OnlineTimes | None = None  # by its trace, from the run's begin on; None: always

    def begin(self, key: Key, assignment: Assignment | None, now: float) -> None:
        """Begin a round with its task, None: it takes no part."""
        self.key = key
        self.carried = False
        self.assigned = self.progressed = now
        self.assignment = assignment
        self.result = None
        self.refusal = ""
        self.declined = ""
        self.mark = None
        self.has_model = False
        self.absent = self.presence is not NodeState.READY
        self.state = ChildState.IDLE if assignment is None else ChildState.ASSIGNED

    @property
    def present(self) -> bool:
        """Whether the child is present."""
        return self.presence in LIVING

    @property
    def has_moved(self) -> bool:
        """Whether it takes part below another parent: it is neither lost nor waited for."""
        return self.failure is Failure.MOVED

    @property
    def stands(self) -> str:
        """Its state, for people: its presence, `absent` if none was seen, or `moved`."""
        if self.has_moved:
            return MOVED
        return str(self.presence or "absent")

    @property
    def needs_task(self) -> bool:
        """Whether its task may have to be sent again."""
        return self.present and self.state in (ChildState.ASSIGNED, ChildState.WORKING)

    @property
    def first_repeat_s(self) -> float:
        """The time until its task is sent again."""
        return first_repeat_s(self.answer_s)

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk of the model that it uploads, or else receives."""
        transferred = self.assignment if self.result is None else self.result
        if transferred is None:
            return 0
        return min(transferred.model.size, transferred.model.chunk_bytes)

    def idle_at(self, idle_s: float, *, collected: float, begun: float | None) -> float:
        """Return when it will have been idle for too long, in the present state.

        A child whose upload waits for a slot shares the progress of the others' uploads, at
        `collected`. The time in which a device is away by its trace does not count; traces have
        `begun`.
        """
        progressed = self.progressed
        if self.state is ChildState.ANNOUNCED:
            progressed = max(progressed, collected)
        if self.online is None or begun is None or self.presence is NodeState.FAILED:
            return progressed + idle_s
        return begun + self.online.after(progressed - begun, idle_s)

    def returns(self, t: float) -> float:
        """Return when a device that is away by its trace comes back, seconds from t on; 0 if it is
        not, or never.
        """
        if self.online is None:
            return 0.0
        back = self.online.returns(t)
        return back - t if back < inf else 0.0

    def contradiction(self, message: Progress | Result) -> str:
        """Return how a message of the open round contradicts this child's result, empty if it does
        not.

        A process sends one result, and no progress after it: another one uses its session.
        """
        if self.result is None:
            return ""
        if isinstance(message, Progress):
            return "progress after its result"
        if message.model.blob == self.result.model.blob:
            return ""
        return "a result after another one"

    def note_progress(self, message: Progress | Result, now: float) -> None:
        """Update the progress from a message.

        Bytes of models since the last change count up to two chunks: on a slow link a chunk takes
        minutes. More bytes without an arriving chunk are repeats, and so are those of a new
        connection up to what an earlier one carried.
        """
        mark = (Phase.ANNOUNCING, 0)
        self.total = 0
        if isinstance(message, Progress):
            mark = (message.phase, message.done)
            self.total = message.total
        carried = message.traffic.carried_models
        if self.mark != mark:
            self.mark = mark
            self.carried_from = carried
            self.carried_best = 0
            if self.state is not ChildState.ANNOUNCED:
                self.progressed = now
        elif self.carried_from is None:
            self.carried_from = carried
        elif carried - self.carried_from >= self.carried_best + CARRIED_BYTES:
            self.carried_best = carried - self.carried_from
            if self.carried_best <= CHUNKS_CARRIED * self.chunk_bytes:
                self.progressed = now

    def note_work(self, result: Result) -> None:
        """Note the loss and the seconds of a training."""
        if result.key.turn == RoundTurn.MODEL:
            work = result.work
            self.loss = work.loss
            self.worked_s = work.train_s + work.wait_s + work.pause_s

    def go(self, cause: ChildCause) -> bool:
        """Apply a transition of the table; return whether there is one."""
        after = TRANSITIONS[cause].get(self.state)
        if after is not None:
            self.state = after
        return after is not None


class Verdict(Enum):
    """The decision about an open round."""

    WAIT = "wait"
    CLOSE = "close"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a round as numbers of children."""

    accepted: int
    refused: int  # they have answered: the round continues without them
    idle: int
    waiting: int  # all others that are expected
    absent: int = 0  # not ready since before the round opened, or moved


def judge(closing: Closing, standing: Standing, *, overdue: bool) -> Verdict:
    """Return whether the round closes, waits, or can never close; `overdue`: its `deadline_s` has
    passed.

    Rule `all`: it closes when every child has answered; one idle child makes it impossible. Rule
    `quorum`: it closes when the quorum is reached and either all present children have answered or
    the deadline has passed; it is impossible if the remaining children cannot reach the quorum.
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


def taking_part(children: Mapping[str, ChildInRound]) -> dict[str, ChildInRound]:
    """Return the children that have a task of the round."""
    return {name: child for name, child in children.items() if child.assignment is not None}


def standing_of(part: Mapping[str, ChildInRound], idle: Collection[str]) -> Standing:
    """Return the counts of the children that take part; `idle`: those of them that have made no
    progress.
    """
    counts = Counter(child.state for child in part.values())
    accepted = counts[ChildState.ACCEPTED]
    refused = counts[ChildState.REFUSED]
    unfinished = len(part) - accepted - refused - len(idle)
    absent = sum(c.absent and c.state in UNFINISHED and n not in idle for n, c in part.items())
    return Standing(accepted, refused, len(idle), unfinished - absent, absent)


def returning(
    children: Mapping[str, ChildInRound], t: float, *, in_round: bool, idle: Collection[str]
) -> tuple[dict[str, float], bool]:
    """Return the seconds until each child returns that is still to answer and away by its trace;
    are all of them away?

    `idle` ones are given up. Without `in_round`: each that is not present.
    """
    found = {}
    all_away = True
    for name, child in children.items():
        lacks = child.state in UNFINISHED if in_round else not child.present
        if not lacks or name in idle:
            continue
        left_s = child.returns(t)
        if left_s:
            found[name] = left_s
        else:
            all_away = False
    return found, all_away


def closed_of(key: Key, children: Mapping[str, ChildInRound]) -> Closed:
    """Return the closed round of these children."""
    results = {}
    missing = []
    refused = {}
    for name, child in taking_part(children).items():
        if child.state is ChildState.ACCEPTED and child.result is not None:
            results[name] = child.result
        if child.refusal:
            refused[name] = child.refusal
        elif name not in results:
            missing.append(name)
    return Closed(key, results, tuple(missing), refused)


def blame(children: Mapping[str, ChildInRound], idle: Iterable[str], *, idle_s: float) -> str:
    """Return why a round can never close: the causes of its idle children, and whose models were
    refused.
    """
    reasons = []
    for name in idle:
        child = children[name]
        if child.presence is NodeState.FAILED:
            reasons.append((name, f"gave up: {child.reason}"))
        else:
            state = "it never came"
            if child.session:
                state = ": ".join(filter(None, (f"its state is {child.presence}", child.reason)))
            if child.declined:
                state += f"; it declined its task: {child.declined}"
            reasons.append((name, f"made no progress for {idle_s:g} s ({state})"))
    for name, child in children.items():
        if child.refusal:
            reasons.append((name, f"sent a model that was refused: {child.refusal}"))
    return by_cause(reasons) or "no child is left"


@dataclass(slots=True)
class Timeline:
    """Times of the events in a round, monotonic seconds at the parent; None = not yet."""

    opened: float
    dispatched: float | None = None
    first_result: float | None = None
    last_result: float | None = None
    closed: float | None = None
    # of each result, from its task to its announcement
    seconds: dict[str, float] = field(default_factory=dict)

    def phases(self) -> dict[str, float]:
        """Return the round's seconds by phase; they add up to closed - opened.

        dispatch: until every child has its model; train: until the first result is announced; wait:
        until the last result is announced; collect: until the last upload has arrived. A phase that
        is overtaken by others has no length.
        """
        found = {}
        begin = self.opened
        marks = (self.dispatched, self.first_result, self.last_result, self.closed)
        for phase, mark in zip(PHASES, marks, strict=True):
            end = begin
            # later events are of other rounds
            known = [at for at in (mark, self.closed) if at is not None]
            if known:
                end = max(begin, min(known))
            found[phase] = end - begin
            begin = end
        return found
