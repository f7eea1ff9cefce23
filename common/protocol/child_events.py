"""Events of a child's session."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.model.layout import Row
from common.protocol.messages import Announcement, NodeState, Task


@dataclass(frozen=True, slots=True)
class TaskReceived:
    """A new task whose model is valid: call `fetch`. Any earlier task is void. `row`: the model inside it, shared."""

    task: Task
    row: Row | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The parent reports when the run's first global round began, in monotonic seconds of this node."""

    begun: float


@dataclass(frozen=True, slots=True)
class ModelArrived:
    """The task's model is complete in its buffer, with every chunk checked."""

    blob: str


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """The task's model is not available."""

    blob: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResultRefused:
    """The parent refused a result, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The parent has finished, or failed with a reason."""

    state: NodeState
    reason: str


@dataclass(frozen=True, slots=True)
class ParentMoved:
    """The parent is alive in another run, but not in this one."""

    run: str
    session: str
    announcement: Announcement


@dataclass(frozen=True, slots=True)
class ParentGone:
    """The parent has been absent for `idle_s`."""
