"""What a child's session reports."""

from __future__ import annotations

from dataclasses import dataclass

from common.protocol.messages import Announcement, NodeState, Task


@dataclass(frozen=True, slots=True)
class TaskReceived:
    """A new task whose model fits: `fetch` it. Whatever was under way before is void."""

    task: Task


@dataclass(frozen=True, slots=True)
class ModelArrived:
    """The task's model lies complete in its buffer, every chunk checked."""

    blob: str


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """The task's model cannot be had."""

    blob: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResultRefused:
    """The parent did not use a result, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The parent has finished, or failed with a reason."""

    state: NodeState
    reason: str


@dataclass(frozen=True, slots=True)
class ParentMoved:
    """The parent is alive in another run, while it is not in this one."""

    run: str
    session: str
    announcement: Announcement


@dataclass(frozen=True, slots=True)
class ParentGone:
    """The parent has not been there for `idle_s`."""
