"""The child's side of a round: receives a task, reports progress, announces its result until that
is acknowledged.

    IDLE --new task--> FETCHING --model here--> WORKING --finish--> ANNOUNCING --answer--> DONE
                          ^                                             ^                    |
                          +-- a new task, from any state                +-- the same task ---+

The answer is the parent's Acknowledgement. `TRANSITIONS` defines this diagram. A task that is
already being served is not started twice. A task with a result gets the same result again, without
training. A task of a newer round, or of a restarted parent, replaces the present one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Any, Final, TypeAlias

from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.model.layout import shared_row
from fedstrata.common.protocol.events import TaskReceived
from fedstrata.common.protocol.messages import Acknowledgement, Key, Phase, Progress, Result, Task
from fedstrata.common.protocol.round_state import HEARTBEAT_S, first_repeat_s, waiting_most_s

PROGRESS_S: Final = 0.5
# before a device reports a new phase: what a result follows at once needs no report
PHASE_S: Final = 0.02
# shorter than the repeat of the task; a small model that arrives sooner is reported too
FIRST_PROGRESS_S: Final = 0.2
# before a result is repeated; twice the last answer's time, if a busy parent needs longer
ANNOUNCE_S: Final = 1.0
ANNOUNCE_MOST_S: Final = 5.0


class ParticipantState(Enum):
    """The state of the child."""

    IDLE = "idle"
    FETCHING = "fetching"
    WORKING = "working"
    ANNOUNCING = "announcing"
    DONE = "done"


class ParticipantCause(Enum):
    """The causes of a child's transitions."""

    NEW_TASK = "new task"
    SAME_TASK = "the same task again"
    MODEL = "model here"
    FINISH = "finish"
    ACKNOWLEDGE = "acknowledgement"
    ABANDON = "abandon"


_S: TypeAlias = ParticipantState
TRANSITIONS: Final[Mapping[ParticipantCause, Mapping[ParticipantState, ParticipantState]]] = {
    ParticipantCause.NEW_TASK: dict.fromkeys(ParticipantState, _S.FETCHING),
    ParticipantCause.SAME_TASK: {_S.ANNOUNCING: _S.ANNOUNCING, _S.DONE: _S.ANNOUNCING},
    ParticipantCause.MODEL: {_S.FETCHING: _S.WORKING},
    ParticipantCause.FINISH: {_S.FETCHING: _S.ANNOUNCING, _S.WORKING: _S.ANNOUNCING},
    ParticipantCause.ACKNOWLEDGE: {_S.ANNOUNCING: _S.DONE},
    ParticipantCause.ABANDON: dict.fromkeys(ParticipantState, _S.IDLE),
}


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The parent has replied to the result; `reason` is empty if it was accepted. It may take that
    back later.
    """

    key: Key
    reason: str


ParticipantEvent: TypeAlias = TaskReceived | Acknowledged


class Participant:
    """One child's side of the rounds with one parent.

    A child that waits for its turn reports less and less often: all devices of a host wait for one
    another, so reports at a fixed rate would take a share of a round that grows with the devices. A
    new phase is reported `phase_s` after its beginning.
    """

    def __init__(self, *, idle_s: float, phase_s: float = PHASE_S) -> None:
        self._waiting_most_s = waiting_most_s(idle_s)
        self._phase_s = phase_s
        self._heartbeat_s = HEARTBEAT_S
        self.state = ParticipantState.IDLE
        self._task: Task | None = None
        self._new_parent = False
        self._begun: Key | None = None
        self._result: Result | None = None
        self._accepted = False  # the last result, by the parent's acknowledgement
        self._phase = Phase.FETCHING
        self._done = self._total = 0
        self._send_at = 0.0
        self._announce_s = self._first_announce_s = ANNOUNCE_S
        self._announced_at = 0.0
        self._events: deque[ParticipantEvent] = deque()

    def receive(self, message: Task | Acknowledgement, *, now: float) -> None:
        """Handle a message of the parent's present session."""
        if isinstance(message, Acknowledgement):
            if self._task is not None and message.key == self._task.key:
                self._take_answer(message, now)
        elif self._task is None or self._new_parent or message.key >= self._task.key:
            self._new_parent = False
            self._take(message, now)

    def parent_restarted(self, now: float, *, again: bool = False) -> None:
        """Note the parent's new session, whose keys may be smaller; repeat what it has not
        received.

        `again`: it is the session of the present task, after another one in between; its keys only
        grow.
        """
        self._new_parent = not again
        self.reconnected(now)

    def begin_work(self, phase: Phase, *, now: float) -> None:
        """Note that the model has arrived and the work has begun."""
        self._go(ParticipantCause.MODEL)
        self.progress(phase, 0, self._total, now=now)

    def progress(self, phase: Phase, done: int, total: int, *, now: float) -> bool:
        """Note the progress of the work; return whether a message is due sooner than before.

        It is sent `phase_s` after a change of phase, at most twice a second, and at least every two
        seconds; while the child waits, every two to `waiting_most_s`.
        """
        if self.state not in (ParticipantState.FETCHING, ParticipantState.WORKING):
            return False  # of work that has ended
        before = self._send_at
        if phase is not self._phase:
            self._send_at = min(self._send_at, now + self._phase_s)
            self._heartbeat_s = HEARTBEAT_S
        elif done != self._done and phase is not Phase.WAITING:
            self._send_at = min(self._send_at, now + PROGRESS_S)
        self._phase = phase
        self._done = done
        self._total = total
        return self._send_at < before

    def finish(self, result: Result, *, now: float) -> None:
        """Announce the result of the task that began with its key, from now until it is
        acknowledged.

        Its model must have been offered. The key is replaced here, because a task that was sent
        again may have another one. The result of a replaced task is dropped.
        """
        if self._task is None or result.key != self._begun or not self._go(ParticipantCause.FINISH):
            return
        self._result = replace(result, key=self._task.key)
        self._announced_at = now
        self._announce(now)

    def abandon(self) -> None:
        """Give up the task, whose model is not available; the parent sends it again."""
        self._go(ParticipantCause.ABANDON)
        self._task = None

    def reconnected(self, now: float) -> None:
        """Repeat what may have been lost with the old connection."""
        self._send_at = now

    def to_send(
        self, now: float, traffic: Traffic, below: tuple[Traffic, ...]
    ) -> list[Progress | Result]:
        """Return what is due to the parent."""
        if self._task is None or now < self.next_deadline():
            return []
        if self.state is ParticipantState.ANNOUNCING and self._result is not None:
            self._send_at = now + self._announce_s
            self._announce_s = min(2 * self._announce_s, ANNOUNCE_MOST_S)
            # A repeat omits the model; a parent that did not get it fetches it.
            result = self._result
            self._result = replace(self._result, inline=None)
            return [replace(result, traffic=traffic, below=below)]
        self._send_at = now + self._heartbeat_s
        if self._phase is Phase.WAITING:
            self._heartbeat_s = min(2 * self._heartbeat_s, self._waiting_most_s)
        return [Progress(self._task.key, self._phase, self._done, self._total, traffic, below)]

    def next_deadline(self) -> float:
        """Return when `to_send` next has something to send, inf for never."""
        if self._task is None or self.state in (ParticipantState.IDLE, ParticipantState.DONE):
            return inf
        return self._send_at

    def next_event(self) -> ParticipantEvent | None:
        """Return the next event."""
        if self._events:
            return self._events.popleft()
        return None

    def _go(self, cause: ParticipantCause) -> bool:
        """Apply a transition of the table; return whether there is one."""
        after = TRANSITIONS[cause].get(self.state)
        if after is not None:
            self.state = after
        return after is not None

    def _take_answer(self, answer: Acknowledgement, now: float) -> None:
        if self._go(ParticipantCause.ACKNOWLEDGE):
            self._first_announce_s = first_repeat_s(now - self._announced_at)
        elif not (self.state is ParticipantState.DONE and self._accepted and answer.reason):
            return  # it is no news, nor is the acceptance taken back
        self._accepted = not answer.reason
        self._events.append(Acknowledged(answer.key, answer.reason))

    def _take(self, task: Task, now: float) -> None:
        mine = self._task
        same = mine is not None and _same_work(mine, task)
        self._task = replace(task, inline=None)  # only the event has the model
        announces = self.state is ParticipantState.ANNOUNCING and self._result is not None
        if same and announces and mine is not None and mine.key == task.key:
            return  # the result is repeated anyway
        if same and self._result is not None and self._go(ParticipantCause.SAME_TASK):
            self._result = replace(self._result, key=task.key)
            self._announce(now)
        elif same and self.state in (ParticipantState.FETCHING, ParticipantState.WORKING):
            self._send_at = now
        else:
            self._go(ParticipantCause.NEW_TASK)
            self._result = None
            self._phase = Phase.FETCHING
            self._done = 0
            self._total = 0
            self._heartbeat_s = HEARTBEAT_S
            self._send_at = now + FIRST_PROGRESS_S
            self._begun = task.key
            self._events.append(_with_shared(task))

    def _announce(self, now: float) -> None:
        self._send_at = now
        self._announce_s = self._first_announce_s


def _same_work(one: Task, other: Task) -> bool:
    """Return whether two tasks are of the same round, model and epochs; the attempts may
    differ.
    """
    mine, others = (
        (task.key[1:], task.model.blob, task.epochs, task.follows) for task in (one, other)
    )
    return mine == others


def _with_shared(task: Task) -> TaskReceived:
    """Return the event of a task, with the model that the nodes of this process share, and that as
    a row.

    At once, before the next message is read: all tasks of a round arrive together, each with a copy
    of the model.
    """
    if task.inline is None:
        return TaskReceived(task)
    row = shared_row(task.model.blob, task.inline)
    shared: Any = row.base
    return TaskReceived(replace(task, inline=shared), row)
