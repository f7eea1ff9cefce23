"""The parent's side of a round: resends each task until it is answered; drops a child for lack of
progress.

A `Task` is repeated while a child is ASSIGNED and present, and whenever a child falls silent, so a
lost message costs only a repeat. A child is dropped only after `idle_s` without progress, also
while it prepares. The states of a child and their transitions are in `common.protocol.round_state`.
Which session represents a child is decided by its presence (`common.protocol.presence`), not here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from fedstrata.common.protocol.events import UploadAnnounced
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Failure,
    Key,
    NodeState,
    Phase,
    Presence,
    Progress,
    Result,
    RoundTurn,
    Task,
)
from fedstrata.common.protocol.round_state import (
    ACKNOWLEDGE_S,
    REPEAT_MOST_S,
    REPEAT_S,
    TAKEN_BACK,
    UNFINISHED,
    Assignment,
    ChildCause,
    ChildInRound,
    ChildState,
    CoordinatorEvent,
    Restarted,
    Stalled,
    Timeline,
    Verdict,
    blame,
    closed_of,
    judge,
    returning,
    standing_of,
    taking_part,
    waiting_most_s,
)
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.devices import Online, OnlineTimes

CLOSED: Final = "the round has closed"
NOTHING_USED: Final[Mapping[str, tuple[int, int]]] = MappingProxyType({})

_C = TypeVar("_C")


class Coordinator:
    """One parent's rounds with its children, one round at a time; `online`: when each is present by
    its trace.
    """

    def __init__(
        self, children: Iterable[str], *, idle_s: float, online: Online | None = None
    ) -> None:
        times = online or {}
        # the state of each in the last round, `key`, which may be open
        self.children = {name: ChildInRound(online=times.get(name)) for name in children}
        self._begun: float | None = None
        self._idle_s = idle_s
        self._waiting_most_s = waiting_most_s(idle_s)
        self.key: Key | None = None
        self._closing = Closing()
        self.is_open = self._buffered = False
        self._judged = self._collected = -inf
        self._quiet_until = -inf  # no deadline before; most calls find nothing to do
        self._received_at = -inf  # time of the last message of a child
        self._at_work = self._without_model = self._without_result = Lacking[ChildInRound]()
        self._events: deque[CoordinatorEvent] = deque()
        self._acknowledgements: deque[tuple[str, Acknowledgement]] = deque()
        self.timeline = Timeline(0.0)
        self.accepted = self.used = self.taken_back = self.late = self.refused = 0

    def add(self, name: str, *, online: OnlineTimes | None = None) -> None:
        """Add a child that came later; it takes part from the next round on."""
        self.children[name] = ChildInRound(online=online, entered=True)

    def remove(self, name: str) -> None:
        """Forget a child, between two rounds."""
        del self.children[name]

    def begin(self, begun: float) -> None:
        """Note when the run, and so the children's traces, began."""
        self._begun = begun
        self._judged = -inf
        self._quiet_until = -inf

    def open(
        self,
        *,
        global_round: int,
        local_round: int,
        assignments: Mapping[str, Assignment],
        closing: Closing,
        now: float,
        used: Mapping[str, tuple[int, int]] = NOTHING_USED,
        carried: Collection[str] | None = None,
        turn: RoundTurn = RoundTurn.MODEL,
    ) -> Key:
        """Open a round for the assigned children, or a turn of it; one that is not later than the
        last one begins a new attempt.

        `used`: the global and the local round of each child's last result that was used, perhaps by
        an earlier process. `carried`: the children whose tasks of earlier rounds go on, and count
        in this one; its own unfinished tasks will go on too. None: a task ends with its round.
        """
        going_on = carried or ()
        self.end(but=going_on)
        attempt = 0
        if self.key is not None:
            back = (global_round, local_round, turn) <= self.key[1:]
            attempt = self.key.attempt + back
        self.key = Key(attempt, global_round, local_round, int(turn))
        self._closing = closing
        self.is_open = True
        self._buffered = carried is not None
        self._judged = self._collected = self._quiet_until = -inf
        self.timeline = Timeline(now)
        for name, child in self.children.items():
            if child.carried and name in going_on:
                continue
            child.begin(self.key, assignments.get(name), now)
            child.used = used.get(name)
            if child.presence is NodeState.FAILED:
                child.progressed = now - self._idle_s
            self._send_task(child, now)
        self._at_work = Lacking()
        self._without_model = Lacking(self._taking_part())
        self._without_result = Lacking(self._taking_part())
        return self.key

    def receive(self, name: str, message: Progress | Result, *, now: float) -> str:
        """Handle a message of a child's present session; one for another round is acknowledged or
        ignored.

        Return why it is refused, empty if it is not.
        """
        self._received_at = now
        child = self.children[name]
        if not self._serves(child, message.key):
            if isinstance(message, Result):
                self._acknowledge_old(name, child, message, now)
            if self.key is not None and message.key > self.key:
                return "of a round that was never open"
            return ""
        if reason := child.contradiction(message):
            return reason
        waits = isinstance(message, Progress) and message.phase is Phase.WAITING
        # repeated only after silence
        child.repeat_at = now + REPEAT_MOST_S + waits * self._waiting_most_s
        if child.go(ChildCause.MESSAGE):
            child.progressed = now
            child.declined = ""
            child.answer_s = now - child.assigned
        child.note_progress(message, now)
        if isinstance(message, Progress):
            if message.phase is not Phase.FETCHING:
                self._received_model(child, now)
        elif child.go(ChildCause.RESULT):
            self._received_model(child, now)
            # the event has the model
            child.result = replace(message, inline=None)
            child.progressed = now
            child.seconds = now - child.assigned
            child.note_work(message)
            if self.timeline.first_result is None:
                self.timeline.first_result = now
            if not self._without_result.any(lambda c: c.result is None):
                self.timeline.last_result = now
            self._events.append(UploadAnnounced(name, message))
        elif child.state is ChildState.ACCEPTED:
            self._acknowledge_again(name, Acknowledgement(message.key, ""), now)
        elif child.state is ChildState.REFUSED:
            self._acknowledge_again(name, Acknowledgement(message.key, child.refusal), now)
        return ""

    def end(self, *, but: Collection[str] = ()) -> None:
        """End the open round, if any, in whatever state, and all tasks `but` those that go on with
        these children.

        Later messages for them are late. A result that was accepted, and is in no closed round, is
        taken back.
        """
        for name in self.unsettled():
            child = self.children[name]
            answer = child.acknowledged
            if name not in but and answer is not None and child.go(ChildCause.TAKE_BACK):
                self.taken_back += answer.key.turn == RoundTurn.MODEL
                child.acknowledged = replace(answer, reason=TAKEN_BACK)
                self._acknowledgements.append((name, child.acknowledged))
        self.is_open = False
        for name, child in self.children.items():
            child.carried = child.carried and name in but

    def unsettled(self) -> list[str]:
        """Return the children whose results are accepted, and not yet in a closed round."""
        return [
            name
            for name, child in self.children.items()
            if child.state is ChildState.ACCEPTED and (self.is_open or child.carried)
        ]

    def in_flight(self) -> list[str]:
        """Return the children whose tasks go on after their round has closed."""
        return [name for name, child in self.children.items() if child.carried]

    def declined(self, name: str, key: Key, reason: str) -> None:
        """Note why a child declined its task; the task is repeated, and the reason reported if the
        child stalls.
        """
        child = self.children[name]
        if child.state is ChildState.ASSIGNED and self._serves(child, key):
            child.declined = reason

    def preparing(self, name: str, done: int, *, waits: bool, now: float) -> bool:
        """Note a report of a child that is not ready; return whether it has made progress since the
        last one.

        Before a round is open, a child that waits for its own children is not idle: a person may be
        starting them.
        """
        self._received_at = now
        child = self.children[name]
        progress = done != child.prepared
        if (waits and not self.is_open) or progress:
            child.prepared = done
            child.progressed = now
        return progress

    def hanging(self, now: float) -> list[str]:
        """Return the children that have prepared for `idle_s` without progress."""
        return [
            name
            for name, child in self.children.items()
            if child.presence is NodeState.INIT and now >= child.progressed + self._idle_s
        ]

    def presence(self, name: str, session: str, presence: Presence | None, *, now: float) -> None:
        """Handle a child's proven presence; None = it left."""
        self._received_at = now
        child = self.children[name]
        if presence is None:
            child.presence = None
            if child.entered:
                child.absent = True
                self._judged = -inf
                self._quiet_until = -inf
            return
        moved = presence.failure is Failure.MOVED
        returns = not child.present
        child.presence = presence.state
        child.reason = presence.reason
        child.failure = presence.failure
        self._judged = self._quiet_until = -inf
        if presence.state is NodeState.FAILED:
            child.progressed = now - self._idle_s  # it has reported that it will not return
        gone = moved or (child.entered and not child.present)
        # it may return, and is not waited for if there are enough others
        child.absent = child.absent or gone
        if child.present:
            child.absent = child.absent and presence.state is not NodeState.READY
            if returns:
                child.carried_from = None
            self._meet(name, child, session, now)
            if presence.state is NodeState.READY and child.state is ChildState.ASSIGNED:
                child.repeat_at = min(child.repeat_at, self._again_at(child, now))

    def progressed(self, name: str, *, now: float) -> None:
        """Note that chunks of a model were transferred between this node and a child: that is
        progress.
        """
        child = self.children[name]
        child.progressed = now
        if child.state is ChildState.ANNOUNCED:
            self._collected = now
            child.carried_from = None
            child.carried_best = 0

    def reconnected(self, now: float) -> None:
        """Note that this node's own connection is new: without it no child could make progress.

        A child that has made none since the connection before is excused for the time since the
        last message alone: a link that swallows chunks breaks one connection after the other for
        ever.
        """
        for child in self.children.values():
            if child.presence is not NodeState.FAILED:
                idle = child.progressed == child.excused
                excused = min(now, child.progressed + now - self._received_at) if idle else now
                child.excused = child.progressed = excused
        self._received_at = now

    def accept(self, name: str, key: Key, *, now: float) -> None:
        """Accept the result that a child announced under `key`, whose model has arrived and is
        valid.
        """
        child = self.children[name]
        if self._serves(child, key) and child.go(ChildCause.ACCEPT):
            child.progressed = now
            self.accepted += key.turn == RoundTurn.MODEL
            self._acknowledge(name, key, "", now)

    def refuse(self, name: str, key: Key, *, reason: str, now: float) -> None:
        """Refuse that result permanently; the round continues with the other children."""
        child = self.children[name]
        if self._serves(child, key) and child.go(ChildCause.REFUSE):
            child.refusal = reason
            self.refused += 1
            self._acknowledge(name, key, reason, now)

    def retry(self, name: str, key: Key, *, now: float) -> None:
        """Wait for that result again: the child no longer holds the model that it announced."""
        child = self.children[name]
        if self._serves(child, key) and child.go(ChildCause.RETRY):
            self._send_task_again(child, now)

    def tick(self, now: float) -> None:
        """Evaluate the round at this time."""
        if self.is_open and now >= self._quiet_until:
            self._judge(now)

    def to_send(self, now: float) -> list[tuple[str, Task | Acknowledgement]]:
        """Return the messages that are due, each with its child."""
        due: list[tuple[str, Task | Acknowledgement]] = list(self._acknowledgements)
        self._acknowledgements.clear()
        if not self.is_open or now < self._quiet_until:
            return due
        for name, child in self.children.items():
            given = child.assignment
            if given is None or child.key is None or not child.needs_task or now < child.repeat_at:
                continue
            # Repeats omit an inline model: a child that did not get it fetches it.
            inline = None if child.sent else given.inline
            due.append((name, Task(child.key, given.epochs, given.model, inline, given.follows)))
            child.sent = True
            child.sent_at = now
            child.repeat_s = min(2 * child.repeat_s, REPEAT_MOST_S)
            child.repeat_at = now + child.repeat_s
        self._quiet_until = self._earliest()
        return due

    def next_deadline(self) -> float:
        """Return when `to_send` or `tick` has to be called next, inf for never."""
        if not self.is_open:
            return inf
        if self._quiet_until > -inf:
            return self._quiet_until
        return self._earliest()

    def next_event(self) -> CoordinatorEvent | None:
        """Return the next event."""
        if self._events:
            return self._events.popleft()
        return None

    def states(self) -> dict[str, str]:
        """Return each child's state, for the metrics."""
        return {name: child.stands for name, child in self.children.items()}

    def expected(self) -> dict[str, str]:
        """Return the states of the children but those that had entered and are gone."""
        return {
            name: child.stands
            for name, child in self.children.items()
            if child.present or not child.entered
        }

    def idle(self, now: float) -> dict[str, float]:
        """Return the seconds without progress of each child; 0 for children that the round does not
        wait for.
        """
        found = dict.fromkeys(self.children, 0.0)
        if self.is_open:
            for name, child in self.children.items():
                if child.state in UNFINISHED:
                    found[name] = max(0.0, now - (self._idle_at(child) - self._idle_s))
        return found

    def away(self, now: float) -> tuple[dict[str, float], bool]:
        """Return the seconds until each child returns for which the round, or the first one, waits;
        are all away?
        """
        begun = self._begun if self.is_open or self.key is None else None
        idle = {name for name, seconds in self.idle(now).items() if seconds >= self._idle_s}
        if begun is None:
            return ({}, False)
        return returning(self.children, now - begun, in_round=self.is_open, idle=idle)

    def returning(self, now: float) -> Collection[str]:
        """Return the children that are not present, as their traces took them away, and that come
        back.
        """
        if self._begun is None:
            return ()
        found, _ = returning(self.children, now - self._begun, in_round=False, idle=())
        return found

    def is_announced(self, name: str, key: Key) -> bool:
        """Return whether a child's result under this key is to be accepted or refused."""
        child = self.children[name]
        return child.state is ChildState.ANNOUNCED and self._serves(child, key)

    def _earliest(self) -> float:
        """Return when a message or a decision becomes due in the present state; later events only
        delay it.
        """
        repeats = []
        decisions = [self._deadline_at()]
        for child in self._taking_part():
            if child.needs_task:
                repeats.append(child.repeat_at)
            if child.state in UNFINISHED:
                decisions.append(self._idle_at(child))
        # Deadlines that were evaluated do not count: a dropped child must not keep the event loop
        # spinning.
        return min(*repeats, inf, *(at for at in decisions if at > self._judged))

    def _deadline_at(self) -> float:
        deadline_s = self._closing.deadline_s
        if deadline_s is None:
            return inf
        return self.timeline.opened + deadline_s

    def _idle_at(self, child: ChildInRound) -> float:
        return child.idle_at(self._idle_s, collected=self._collected, begun=self._begun)

    def _serves(self, child: ChildInRound, key: Key) -> bool:
        """Return whether a child has a task under this key that its round, or a later one, waits
        for.
        """
        return child.assignment is not None and key == child.key and (self.is_open or child.carried)

    def _taking_part(self) -> Collection[ChildInRound]:
        return taking_part(self.children).values()

    def _send_task(self, child: ChildInRound, now: float) -> None:
        child.repeat_at = now
        child.repeat_s = child.first_repeat_s / 2
        child.sent = False
        self._quiet_until = -inf

    def _send_task_again(self, child: ChildInRound, now: float) -> None:
        child.result = None
        self._without_result.add(child)
        self._send_task(child, self._again_at(child, now))

    @staticmethod
    def _again_at(child: ChildInRound, now: float) -> float:
        """Return when a task may be sent again: once per REPEAT_S, as it is far larger than what
        asks for it.
        """
        return max(now, child.sent_at + REPEAT_S)

    def _meet(self, name: str, child: ChildInRound, session: str, now: float) -> None:
        if session == child.session:
            return
        if child.session:
            self._events.append(Restarted(name))
        child.session = session
        child.progressed = now
        child.mark = None
        child.prepared = -1
        if (self.is_open or child.carried) and child.go(ChildCause.RESTART):
            self._send_task_again(child, now)

    def _acknowledge(self, name: str, key: Key, reason: str, now: float) -> None:
        answer = self.children[name].acknowledged = Acknowledgement(key, reason)
        self._acknowledgements.append((name, answer))
        if not self.is_open:
            return
        # Before its deadline a round stays open after one more accepted result if another child is
        # at work.
        at_work = self._at_work.any(lambda c: self._is_at_work(c, now))
        if reason or not at_work or now >= self._deadline_at():
            self._judge(now)

    def _is_at_work(self, child: ChildInRound, now: float) -> bool:
        return child.state in UNFINISHED and not child.absent and now < self._idle_at(child)

    def _acknowledge_again(self, name: str, acknowledgement: Acknowledgement, now: float) -> None:
        child = self.children[name]
        # limits the replies to a flood of results; a lost reply is requested again
        if now >= child.acknowledge_at:
            child.acknowledge_at = now + ACKNOWLEDGE_S
            self._acknowledgements.append((name, acknowledgement))

    def _acknowledge_old(self, name: str, child: ChildInRound, result: Result, now: float) -> None:
        if self.key is None or (self.is_open and result.key >= self.key):
            return
        answer = child.acknowledged
        if answer is None or answer.key < result.key:
            asked = result.key.turn != RoundTurn.MODEL  # about a sum, which others have opened
            reason = "" if asked or result.key.round == child.used else CLOSED
            self.late += bool(reason)
            answer = child.acknowledged = Acknowledgement(result.key, reason)
        # A repeat of an earlier result must not replace the answer to the last one, which may be
        # asked for again.
        if answer.key != result.key:
            answer = Acknowledgement(result.key, CLOSED)
        self._acknowledge_again(name, answer, now)

    def _received_model(self, child: ChildInRound, now: float) -> None:
        # it is working, regardless of its presence
        child.has_model = True
        child.absent = False
        if self.timeline.dispatched is not None:
            return
        if not self._without_model.any(lambda c: not c.has_model):
            self.timeline.dispatched = now

    def _judge(self, now: float) -> None:
        self._judged = now
        part = taking_part(self.children)
        idle = [n for n, c in part.items() if c.state in UNFINISHED and now >= self._idle_at(c)]
        verdict = judge(self._closing, standing_of(part, idle), overdue=now >= self._deadline_at())
        self._at_work = Lacking(c for c in part.values() if self._is_at_work(c, now))
        if verdict is Verdict.CLOSE and self.key is not None:
            self._close(self.key, now)
        elif verdict is Verdict.IMPOSSIBLE:
            silent = any(self.children[name].presence is not NodeState.FAILED for name in idle)
            failures = frozenset(self.children[name].failure for name in idle)
            reason = blame(self.children, idle, idle_s=self._idle_s)
            self._events.append(Stalled(reason, silent, failures, frozenset(idle)))
            self.end()

    def _close(self, key: Key, now: float) -> None:
        self.is_open = False
        self.timeline.closed = now
        closed = closed_of(key, self.children)
        if key.turn == RoundTurn.MODEL:
            self.used += len(closed.results)
        self.timeline.seconds = {name: self.children[name].seconds for name in closed.results}
        if self._buffered:
            carried = set(closed.missing)
            closed = replace(closed, missing=())
            for name, child in self.children.items():
                child.carried = name in carried
                if not child.carried:
                    child.assignment = None
                    child.refusal = ""
                    child.state = ChildState.IDLE
        self._events.append(closed)


class Lacking(Generic[_C]):
    """The children that lack something. Asking costs little, as the next one to look at stays the
    same meanwhile.
    """

    def __init__(self, children: Iterable[_C] = ()) -> None:
        self._children = list(children)

    def add(self, child: _C) -> None:
        """Add a child that lacks it again."""
        self._children = [*(other for other in self._children if other is not child), child]

    def any(self, lacks: Callable[[_C], bool]) -> bool:
        """Return whether a child lacks it; those that do not are removed."""
        while self._children and not lacks(self._children[-1]):
            self._children.pop()
        return bool(self._children)
