"""What is known of one node of a watched lab, and of its part in its parent's round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from common.accounting.child_report import ChildReport
from common.accounting.traffic import Traffic
from common.protocol.messages import (
    Acknowledgement,
    Ask,
    Declined,
    Key,
    Manifest,
    NodeState,
    Phase,
    Preparing,
    Presence,
    Progress,
    Result,
    Task,
)
from common.protocol.round_state import LIVING
from deploy.watching.meter import RateMeter

SESSIONS_KEPT: Final = 8


class NodeStep(IntEnum):
    """How far a child is in its round; within one it only goes on, whatever order its messages come in."""

    IDLE = 0
    TOLD = 1
    FETCHING = 2
    WAITING = 3
    TRAINING = 4
    OFFERING = 5
    DONE = 6
    REFUSED = 7


STEP_OF: Final = {
    Phase.FETCHING: NodeStep.FETCHING,
    Phase.WAITING: NodeStep.WAITING,
    Phase.TRAINING: NodeStep.TRAINING,
    Phase.ANNOUNCING: NodeStep.OFFERING,
}


@dataclass(slots=True)
class WatchedTransfer:
    """A model on its way: how much of it is here, 0 to 1, and its size in bytes, 0 where its manifest was not heard."""

    blob: str = ""
    size: int = 0
    chunks: int = 0
    share: float = 0.0

    def begin(self, manifest: Manifest, *, here: bool) -> None:
        """Take what is offered; `here` where it travels inside its announcement."""
        if self.blob != manifest.blob:
            self.share = 0.0
        self.blob, self.size, self.chunks = manifest.blob, manifest.size, manifest.chunks
        self.share = 1.0 if here else self.share

    def hear(self, ask: Ask) -> None:
        """Take its receiver's word on what it lacks.

        Where the manifest was said before we listened, the bitmap's length tells the chunks, to the next eighth.
        """
        if self.size and ask.blob != self.blob:
            return  # of an earlier model, or noise
        chunks = self.chunks or 8 * len(ask.lacking)
        lacking = int.from_bytes(ask.lacking, "big").bit_count()
        self.share = max(0.0, 1.0 - lacking / chunks) if chunks else 1.0


@dataclass(slots=True)
class Node:
    """One node. `says`: its state at each broker that has one, or `left` where it has cleared it.

    `key` is the round of its parent in which it takes part, and `wished_by` the parent's session whose wish said so, if
    that was heard; `result` its last answer, in whatever round. `below_*`: the bytes of its children's links, as it
    tells them. `proven`: its present session has published or sent something since the watch began, it is not only
    retained by a broker. `preparing`: it has reported so; `waits_for`: who is absent below it, and why.
    """

    name: str
    role: str
    parent: Node | None = None
    children: dict[str, Node] = field(default_factory=dict)
    says: dict[int, str] = field(default_factory=dict)
    told: str = ""
    reason: str = ""
    session: str = ""
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=SESSIONS_KEPT))
    proven: bool = False
    preparing: bool = False
    waits_for: str = ""
    declined: tuple[Key, str] | None = None
    samples: int = 0
    key: Key | None = None
    wished_by: str = ""
    step: NodeStep = NodeStep.IDLE
    share: float = 0.0
    epochs: int = 0
    result: Result | None = None
    report: ChildReport | None = None
    measuring: bool = False
    fetch: WatchedTransfer = field(default_factory=WatchedTransfer)
    upload: WatchedTransfer = field(default_factory=WatchedTransfer)
    up: RateMeter = field(default_factory=RateMeter)
    down: RateMeter = field(default_factory=RateMeter)
    below_up: RateMeter = field(default_factory=RateMeter)
    below_down: RateMeter = field(default_factory=RateMeter)

    @property
    def state(self) -> str:
        """Return its presence at the first broker that has one, `left` where it went, `absent` where none was seen."""
        return self.says[min(self.says)] if self.says else "absent"

    @property
    def alive(self) -> bool:
        """Return whether it is there."""
        return self.state in LIVING

    @property
    def round_key(self) -> Key | None:
        """Return the round that its children play, as far as one of them was heard."""
        return max((child.key for child in self.children.values() if child.key is not None), default=None)

    def playing(self) -> list[Node]:
        """Return the children that take part in the present round, as far as they were heard."""
        key = self.round_key
        return [child for child in self.children.values() if child.key is not None and child.key == key]

    @property
    def done(self) -> float:
        """Return how far it is within its step, 0 to 1."""
        if self.step is NodeStep.OFFERING:
            return self.upload.share
        return self.fetch.share if self.step is NodeStep.FETCHING else self.share

    # What it, or its parent, said of its part in a round

    def speaks(self, session: str) -> bool:
        """Return whether a message of this session is its own: sessions change by presences alone.

        Where no presence was seen, the first message counts.
        """
        self.session = self.session or session
        if session == self.session:
            self.proven = True
        return session == self.session

    def presence(self, broker: int, session: str, presence: Presence | None, *, retained: bool = False) -> bool:
        """Take its presence; None = cleared. Return False for the last one of a process that has a successor."""
        if presence is None:
            self.says[broker] = "left"
            return True
        if presence.state not in LIVING and self.session not in ("", session):
            return False
        if presence.state in LIVING:
            if session in self.retired:  # the broker's order decides who holds the name
                self.retired.remove(session)
            self._meet(session)
            self.proven = self.proven or not retained
        if presence.state is not NodeState.INIT:
            self.preparing, self.waits_for = False, ""
        self.says[broker] = str(presence.state)
        self.reason = presence.reason
        self.samples = presence.samples or self.samples
        return True

    def wished(self, task: Task, session: str) -> bool:
        """Take its parent's wish; return whether a round begins for it."""
        if self.wished_by != session:
            self.wished_by = session
            self.key = self.key if self.key == task.key else None
        begins = self._enter(task.key)
        if self.key == task.key:
            self.epochs = task.epochs
            self.fetch.begin(task.model, here=task.inline is not None)
        return begins

    def progressed(self, progress: Progress, now: float) -> bool:
        """Take its sign of life; return whether a round begins for it, as its wish was not heard."""
        begins = self._heard_of(progress.key)
        self._count(progress.traffic, progress.below, now)
        if self.key == progress.key and self._go(STEP_OF[progress.phase]) and progress.total:
            share = min(1.0, progress.done / progress.total)
            if self.step is NodeStep.FETCHING:
                self.fetch.share = max(share, self.fetch.share)
            else:
                self.share = share
        return begins

    def offered(self, result: Result, now: float) -> tuple[bool, bool]:
        """Take its answer; return whether a round begins for it, and whether it is said the first time."""
        begins = self._heard_of(result.key)
        self._count(result.traffic, result.below, now)
        first = self.result is None or self.result.key != result.key
        if self.key == result.key and self._go(NodeStep.OFFERING):
            self.upload.begin(result.model, here=result.inline is not None)
        self.result = result
        for report in result.children:
            if report.name in self.children:
                self.children[report.name].report = report
        return begins, first

    def answered(self, receipt: Acknowledgement) -> bool:
        """Take its parent's word on its answer; return whether it was refused just now."""
        if receipt.key != self.key or self.step in (NodeStep.DONE, NodeStep.REFUSED):
            return False
        self._go(NodeStep.REFUSED if receipt.reason else NodeStep.DONE)
        return bool(receipt.reason)

    def prepares(self, message: Preparing) -> bool:
        """Take its progress before it can take part; return whether it waits for somebody else than before."""
        changed = message.waits_for != self.waits_for
        self.preparing, self.waits_for = True, message.waits_for
        return changed and bool(message.waits_for)

    def declines(self, message: Declined) -> bool:
        """Take its refusal of a task; return whether it is the first of its kind."""
        first = self.declined != (message.key, message.reason)
        self.declined = message.key, message.reason
        return first

    def asked(self, ask: Ask) -> None:
        """Take its ask for its parent's model."""
        if self.step in (NodeStep.TOLD, NodeStep.FETCHING):
            self._go(NodeStep.FETCHING)
            self.fetch.hear(ask)

    def fetched(self, ask: Ask) -> None:
        """Take its parent's ask for its answer."""
        if self.step is NodeStep.OFFERING:
            self.upload.hear(ask)

    def counted(self, traffic: Traffic, below: Traffic, now: float) -> None:
        """Take the bytes that it counts at the end."""
        self._count(traffic, below, now)

    def parent_restarted(self, session: str) -> None:
        """Forget its round: its parent begins a new session, whose keys may be smaller."""
        self.key, self.step, self.wished_by = None, NodeStep.IDLE, session

    def _heard_of(self, key: Key) -> bool:
        """Take the round from its own word, unless its parent's is known: it may still speak of an older one."""
        return not self.wished_by and self._enter(key)

    def _enter(self, key: Key) -> bool:
        if self.key is not None and key <= self.key:
            return False
        self.key, self.step, self.share, self.measuring = key, NodeStep.TOLD, 0.0, False
        self.fetch, self.upload = WatchedTransfer(), WatchedTransfer()
        return True

    def _go(self, step: NodeStep) -> bool:
        """Go on to a step; return whether that is where it is now."""
        if step > self.step:
            self.step, self.share = step, 0.0
        return step is self.step

    def _meet(self, session: str) -> None:
        if session == self.session:
            return
        if self.session:
            self.retired.append(self.session)
            self._begin_life()
        self.session, self.proven, self.preparing, self.waits_for = session, False, False, ""

    def _count(self, traffic: Traffic, below: Traffic, now: float) -> None:
        self.up.take(traffic.sent, now)
        self.down.take(traffic.received, now)
        self.below_up.take(below.received, now)  # counted by the parent: what it received went up
        self.below_down.take(below.sent, now)

    def _begin_life(self) -> None:
        if self.step not in (NodeStep.DONE, NodeStep.REFUSED, NodeStep.IDLE):
            self.step, self.share = NodeStep.TOLD, 0.0
        for meter in (self.up, self.down, self.below_up, self.below_down):
            meter.turn()
