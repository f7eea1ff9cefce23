"""The child's side of a round: takes a wish, says how it goes, offers its answer until it has a receipt.

    IDLE --Task--> FETCHING --model here--> WORKING --finish--> OFFERING --Receipt--> DONE

A wish that is already being served is not begun twice; one that was answered gets the same answer again,
without training. A wish of a newer round, or of a parent that restarted, supersedes what is under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeAlias

from common.protocol.messages import Key, Phase, Progress, Receipt, Result, Task, Traffic

HEARTBEAT_S: Final = 2.0
PROGRESS_S: Final = 0.5
ACKNOWLEDGE_S: Final = 0.2  # before the wish is said again; a small model is here sooner, which says the same
OFFER_S: Final = 1.0
OFFER_MOST_S: Final = 5.0


class ParticipantState(Enum):
    """Where the child stands."""

    IDLE = "idle"
    FETCHING = "fetching"
    WORKING = "working"
    OFFERING = "offering"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Begin:
    """Get the task's model, then train it; whatever was under way before is void."""

    task: Task


@dataclass(frozen=True, slots=True)
class Answered:
    """The parent has said its word on the result; `reason` is empty where it was taken."""

    key: Key
    reason: str


ParticipantEvent: TypeAlias = Begin | Answered


class Participant:
    """One child's side, facing one parent."""

    def __init__(self) -> None:
        self.state = ParticipantState.IDLE
        self._session = ""
        self._retired: set[str] = set()
        self._task: Task | None = None
        self._task_session = ""
        self._begun: Key | None = None
        self._result: Result | None = None
        self._phase = Phase.FETCHING
        self._done = self._total = 0
        self._say_at = 0.0
        self._offer_s = OFFER_S
        self._events: deque[ParticipantEvent] = deque()

    def receive(self, session: str, message: Task | Receipt, *, now: float) -> None:
        """Take the parent's word."""
        if session in self._retired:
            return
        if session != self._session:
            if self._session:
                self._retired.add(self._session)
            self._session = session
        if isinstance(message, Receipt):
            self._receipt(message)
        elif self._task is None or session != self._task_session or message.key >= self._task.key:
            self._task_session = session
            self._wish(message, now)

    def begin_work(self, phase: Phase, *, now: float) -> None:
        """Note that the model is here and the work has begun."""
        if self.state is ParticipantState.FETCHING:
            self.state = ParticipantState.WORKING
        self.progress(phase, 0, self._total, now=now)

    def progress(self, phase: Phase, done: int, total: int, *, now: float) -> None:
        """Note how far the work is; it is said at most twice a second, and every two seconds anyhow."""
        if self.state not in (ParticipantState.FETCHING, ParticipantState.WORKING):
            return  # a word of work that is over
        if phase is not self._phase:
            self._say_at = now
        elif done != self._done:
            self._say_at = min(self._say_at, now + PROGRESS_S)
        self._phase, self._done, self._total = phase, done, total

    def finish(self, result: Result, *, now: float) -> None:
        """Offer the answer to the wish that was begun under its key, from now until the receipt.

        The key is set anew here, as a wish that is said again may have another. An answer to a wish that was
        superseded is dropped.
        """
        if self._task is None or self.state not in (ParticipantState.FETCHING, ParticipantState.WORKING):
            return
        if result.key != self._begun:
            return
        self._result = replace(result, key=self._task.key)
        self._offer(now)

    def abandon(self) -> None:
        """Give up the wish, its model could not be had; the parent, hearing nothing, says it again."""
        self.state, self._task = ParticipantState.IDLE, None

    def reconnected(self, now: float) -> None:
        """Say again what the lost connection may have swallowed."""
        self._say_at = now

    def to_send(self, now: float, traffic: Traffic, below: Traffic) -> list[Progress | Result]:
        """Return what is due to the parent."""
        if self._task is None or self.state in (ParticipantState.IDLE, ParticipantState.DONE) or now < self._say_at:
            return []
        if self.state is ParticipantState.OFFERING and self._result is not None:
            self._say_at = now + self._offer_s
            self._offer_s = min(2 * self._offer_s, OFFER_MOST_S)
            # A repeat leaves the model out; a parent that did not get it pulls it.
            offer, self._result = self._result, replace(self._result, inline=None)
            return [replace(offer, traffic=traffic, below=below)]
        self._say_at = now + HEARTBEAT_S
        return [Progress(self._task.key, self._phase, self._done, self._total, traffic, below)]

    def next_deadline(self) -> float | None:
        """Return when `to_send` next has something to say."""
        if self._task is None or self.state in (ParticipantState.IDLE, ParticipantState.DONE):
            return None
        return self._say_at

    def next_event(self) -> ParticipantEvent | None:
        """Return the next event."""
        return self._events.popleft() if self._events else None

    def _wish(self, task: Task, now: float) -> None:
        mine = self._task
        self._task = task
        same = mine is not None and (
            (mine.key.iteration, mine.key.round, mine.model.blob, mine.epochs)
            == (task.key.iteration, task.key.round, task.model.blob, task.epochs)
        )
        if same and self.state in (ParticipantState.OFFERING, ParticipantState.DONE) and self._result is not None:
            self._result = replace(self._result, key=task.key)
            self._offer(now)
        elif same and self.state in (ParticipantState.FETCHING, ParticipantState.WORKING):
            self._say_at = now
        else:
            self.state, self._result = ParticipantState.FETCHING, None
            self._phase, self._done, self._total = Phase.FETCHING, 0, 0
            self._say_at = now + ACKNOWLEDGE_S
            self._begun = task.key
            self._events.append(Begin(task))

    def _receipt(self, receipt: Receipt) -> None:
        if self._task is not None and receipt.key == self._task.key and self.state is ParticipantState.OFFERING:
            self.state = ParticipantState.DONE
            self._events.append(Answered(receipt.key, receipt.reason))

    def _offer(self, now: float) -> None:
        self.state = ParticipantState.OFFERING
        self._say_at, self._offer_s = now, OFFER_S
