"""State of one node of a watched lab, and its progress in its parent's round."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from common.accounting.child_report import ChildReport
from common.accounting.traffic import Traffic
from common.protocol.messages import (
    LIVING,
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
from deploy.watching.meter import RateMeter

SESSIONS_KEPT: Final = 8


class NodeStep(IntEnum):
    """Step of a child in its round. Within a round it only advances, in whatever order messages arrive."""

    IDLE = 0
    ASSIGNED = 1
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
    """A model transfer. `share`: received part, 0 to 1; `size`: bytes, 0 if its manifest was not received."""

    blob: str = ""
    size: int = 0
    chunks: int = 0
    share: float = 0.0

    def begin(self, manifest: Manifest, *, here: bool) -> None:
        """Begin a transfer; `here`: the model was inside the announcement."""
        if self.blob != manifest.blob:
            self.share = 0.0
        self.blob, self.size, self.chunks = manifest.blob, manifest.size, manifest.chunks
        self.share = 1.0 if here else self.share

    def update(self, ask: Ask) -> None:
        """Update the received part from the receiver's ask for missing chunks.

        If the manifest is unknown, the bitmap's length gives the number of chunks, rounded up to a multiple of 8.
        """
        if self.size and ask.blob != self.blob:
            return  # of an earlier model, or of a link calibration
        chunks = self.chunks or 8 * len(ask.lacking)
        lacking = int.from_bytes(ask.lacking, "big").bit_count()
        self.share = max(0.0, 1.0 - lacking / chunks) if chunks else 1.0


@dataclass(slots=True)
class TierMeters:
    """Bytes of a tier's links below one node."""

    up: RateMeter = field(default_factory=RateMeter)
    down: RateMeter = field(default_factory=RateMeter)


@dataclass(slots=True)
class Node:
    """One node. `states`: its state by broker, `left` if it has cleared its presence there.

    shown_state: the state of the last event    key: its parent's round in which it takes part
    assigned_by: the parent's session that sent the task, "" if the task was not received
    result: its last result, of any round    below: bytes of the tiers below it, as reported by it
    proven: its session has sent something since the watch began, so it is not only a retained presence
    preparing: it has reported that it prepares    waits_for: the absent nodes below it, with reasons
    measured: its progress within its step is known
    """

    name: str
    role: str
    parent: Node | None = None
    children: dict[str, Node] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    shown_state: str = ""
    reason: str = ""
    session: str = ""
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=SESSIONS_KEPT))
    proven: bool = False
    preparing: bool = False
    waits_for: str = ""
    declined: tuple[Key, str] | None = None
    samples: int = 0
    key: Key | None = None
    assigned_by: str = ""
    step: NodeStep = NodeStep.IDLE
    share: float = 0.0
    measured: bool = True
    epochs: int = 0
    result: Result | None = None
    report: ChildReport | None = None
    measuring: bool = False
    fetch: WatchedTransfer = field(default_factory=WatchedTransfer)
    upload: WatchedTransfer = field(default_factory=WatchedTransfer)
    up: RateMeter = field(default_factory=RateMeter)
    down: RateMeter = field(default_factory=RateMeter)
    below: tuple[TierMeters, ...] = ()

    @property
    def state(self) -> str:
        """Its presence at the first broker that has one: `left` if it has left, `absent` if none was seen."""
        return self.states[min(self.states)] if self.states else "absent"

    @property
    def alive(self) -> bool:
        """Whether it is initialising or ready."""
        return self.state in LIVING

    @property
    def round_key(self) -> Key | None:
        """Its children's current round, by the messages received so far, or None."""
        return max((child.key for child in self.children.values() if child.key is not None), default=None)

    def participants(self) -> list[Node]:
        """Return the children that take part in the current round, by the messages received so far."""
        key = self.round_key
        return [child for child in self.children.values() if child.key is not None and child.key == key]

    @property
    def done(self) -> float:
        """Its progress within its step, 0 to 1; 0 if it is not `measured`."""
        if self.step is NodeStep.OFFERING:
            return self.upload.share
        return self.fetch.share if self.step is NodeStep.FETCHING else self.share

    # Messages from the node or from its parent

    def is_from(self, session: str) -> bool:
        """Return whether a message of this session is the node's own. Only presences change the session.

        If no presence was seen, the first message sets the session.
        """
        self.session = self.session or session
        if session == self.session:
            self.proven = True
        return session == self.session

    def on_presence(self, broker: int, session: str, presence: Presence | None, *, retained: bool = False) -> bool:
        """Process its presence; None = cleared. Return False for the last presence of a process that was replaced."""
        if presence is None:
            self.states[broker] = "left"
            return True
        if presence.state not in LIVING and self.session not in ("", session):
            return False
        if presence.state in LIVING:
            if session in self.retired:  # the broker's order decides which session holds the name
                self.retired.remove(session)
            self._set_session(session)
            self.proven = self.proven or not retained
        if presence.state is not NodeState.INIT:
            self.preparing, self.waits_for = False, ""
        self.states[broker] = str(presence.state)
        self.reason = presence.reason
        self.samples = presence.samples or self.samples
        return True

    def on_task(self, task: Task, session: str) -> bool:
        """Process its parent's task; return whether a round begins for it."""
        if self.assigned_by != session:
            self.assigned_by = session
            self.key = self.key if self.key == task.key else None
        begins = self._enter(task.key)
        if self.key == task.key:
            self.epochs = task.epochs
            self.fetch.begin(task.model, here=task.inline is not None)
        return begins

    def on_progress(self, progress: Progress, now: float) -> bool:
        """Process its progress; return whether a round begins for it because its task was not received."""
        begins = self._enter_unassigned(progress.key)
        self._count(progress.traffic, progress.below, now)
        if self.key == progress.key and self._go(STEP_OF[progress.phase]) and progress.total:
            share = min(1.0, progress.done / progress.total)
            if self.step is NodeStep.FETCHING:
                self.fetch.share = max(share, self.fetch.share)
            else:
                self.share = share
        return begins

    def on_result(self, result: Result, now: float) -> tuple[bool, bool]:
        """Process its result; return whether a round begins for it, and whether the result is new."""
        begins = self._enter_unassigned(result.key)
        self._count(result.traffic, result.below, now)
        first = self.result is None or self.result.key != result.key
        if self.key == result.key and self._go(NodeStep.OFFERING):
            self.upload.begin(result.model, here=result.inline is not None)
        self.result = result
        self.take_reports(result.children)
        return begins, first

    def take_reports(self, reports: Iterable[ChildReport]) -> None:
        """Process its reports on its children."""
        for report in reports:
            if report.name in self.children:
                self.children[report.name].report = report

    def on_acknowledgement(self, message: Acknowledgement) -> bool:
        """Process its parent's acknowledgement of its result; return whether the result was refused just now."""
        over = (NodeStep.REFUSED,) if message.reason else (NodeStep.DONE, NodeStep.REFUSED)  # it may be taken back
        if message.key != self.key or self.step in over:
            return False
        self._go(NodeStep.REFUSED if message.reason else NodeStep.DONE)
        return bool(message.reason)

    def on_preparing(self, message: Preparing) -> bool:
        """Process its progress in preparation; return whether the nodes that it waits for have changed."""
        changed = message.waits_for != self.waits_for
        self.preparing, self.waits_for = True, message.waits_for
        return changed and bool(message.waits_for)

    def on_declined(self, message: Declined) -> bool:
        """Process its refusal of a task; return whether the refusal is new."""
        first = self.declined != (message.key, message.reason)
        self.declined = message.key, message.reason
        return first

    def on_ask(self, ask: Ask) -> None:
        """Process its ask for chunks of its parent's model."""
        if self.step in (NodeStep.ASSIGNED, NodeStep.FETCHING):
            self._go(NodeStep.FETCHING)
            self.fetch.update(ask)

    def on_parent_ask(self, ask: Ask) -> None:
        """Process its parent's ask for chunks of its result."""
        if self.step is NodeStep.OFFERING:
            self.upload.update(ask)

    def on_farewell(self, traffic: Traffic, below: tuple[Traffic, ...], now: float) -> None:
        """Process its final byte counts."""
        self._count(traffic, below, now)

    def on_parent_restart(self, session: str) -> None:
        """Reset its round: its parent begins a new session, whose keys may be smaller."""
        self.key, self.step, self.assigned_by = None, NodeStep.IDLE, session

    def _enter_unassigned(self, key: Key) -> bool:
        """Enter the round of its own message, unless its parent's task is known: the message may be older."""
        return not self.assigned_by and self._enter(key)

    def _enter(self, key: Key) -> bool:
        if self.key is not None and key <= self.key:
            return False
        self.key, self.step, self.share, self.measuring = key, NodeStep.ASSIGNED, 0.0, False
        self.fetch, self.upload = WatchedTransfer(), WatchedTransfer()
        return True

    def _go(self, step: NodeStep) -> bool:
        """Advance to a step; return whether that is the current step."""
        if step > self.step:
            self.step, self.share = step, 0.0
        return step is self.step

    def _set_session(self, session: str) -> None:
        if session == self.session:
            return
        if self.session:
            self.retired.append(self.session)
            self._restart()
        self.session, self.proven, self.preparing, self.waits_for = session, False, False, ""

    def _count(self, traffic: Traffic, below: tuple[Traffic, ...], now: float) -> None:
        self.up.take(traffic.sent, now)
        self.down.take(traffic.received, now)
        for meters, links in zip(self.below, below, strict=False):
            meters.up.take(links.received, now)  # counted by the parent: what it received went up
            meters.down.take(links.sent, now)

    def _restart(self) -> None:
        if self.step not in (NodeStep.DONE, NodeStep.REFUSED, NodeStep.IDLE):
            self.step, self.share = NodeStep.ASSIGNED, 0.0
        for meter in (self.up, self.down, *(meter for tier in self.below for meter in (tier.up, tier.down))):
            meter.restart()
