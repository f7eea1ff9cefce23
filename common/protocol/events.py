"""What a session reports to its endpoint: events of the link, of a parent's session, and of a
child's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedstrata.common.model.layout import Row
from fedstrata.common.protocol.messages import (
    Announcement,
    Key,
    Manifest,
    NodeState,
    Probe,
    Probed,
    Result,
    Target,
    Task,
)
from fedstrata.common.protocol.receiver import ReceiverEvent

# Of the link


@dataclass(frozen=True, slots=True)
class CostsUnknown:
    """A node reports costs that cannot be, which are therefore not known; reported once for each
    node.
    """

    node: str


@dataclass(frozen=True, slots=True)
class KeysLost:
    """A child's process cannot take part in the secure sum of the open round, whose keys it does
    not have.
    """

    child: str
    key: Key


@dataclass(frozen=True, slots=True)
class Entered:
    """A node that looked for a run here became a child; it takes part once it is ready."""

    child: str


@dataclass(frozen=True, slots=True)
class NameTaken:
    """Another living node has this node's name, in run `run`."""

    run: str


@dataclass(frozen=True, slots=True)
class BrokerAway:
    """The broker has been away for `idle_s`."""


@dataclass(frozen=True, slots=True)
class BrokerDrops:
    """The broker has dropped `lost` chunks for this node, while `arrived` others came; reported
    once.
    """

    lost: int
    arrived: int


@dataclass(frozen=True, slots=True)
class ProbeReceived:
    """A peer calibrates the link, or replies to a calibration."""

    peer: str
    message: Probe | Probed


@dataclass(frozen=True, slots=True)
class BlobFetched:
    """The fetch of a blob that is no model of a round has ended: of noise, or of frozen arrays."""

    result: ReceiverEvent


# Of a parent's session


@dataclass(frozen=True, slots=True)
class FrozenAsked:
    """A child lacks the run's frozen arrays."""

    child: str


@dataclass(frozen=True, slots=True)
class UploadAnnounced:
    """A child announces a result; the session has checked its description. Call `fetch`, or
    `refuse` it.
    """

    child: str
    result: Result


@dataclass(frozen=True, slots=True)
class UploadArrived:
    """The blob of that model is complete in its buffer, with every chunk checked: `accept` or
    `refuse` it.
    """

    child: str
    result: Result


@dataclass(frozen=True, slots=True)
class UploadRefused:
    """A child's result was refused, with the reason."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A child's presence changed: its state, or `left`; `reason` is the child's."""

    child: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class DevicesAway:
    """The round waits for devices all of which are away by their traces; `returns_s`: seconds until
    each returns.
    """

    returns_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GoodbyeReceived:
    """A child has sent its final counts."""

    child: str


@dataclass(frozen=True, slots=True)
class TargetsChanged:
    """The /metrics addresses of the nodes below changed."""

    targets: tuple[Target, ...]


# Of a child's session


@dataclass(frozen=True, slots=True)
class FrozenFound:
    """The parent offers the frozen arrays that this node lacks."""

    model: Manifest


@dataclass(frozen=True, slots=True)
class TaskReceived:
    """A new task whose model is valid: call `fetch`. Any earlier task is void. `row`: the model
    inside it, shared.
    """

    task: Task
    row: Row | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The parent reports when the run's first global round began, in monotonic seconds of this
    node.
    """

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
