"""The control messages of fedstrata, as typed records. Both tiers speak the same ones.

How they become bytes is `common.protocol.serialization`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from common.accounting.child_report import ChildReport, TrainingPath
from common.accounting.traffic import Traffic
from common.errors import WireError

DIGEST_BYTES: Final = 8
MIN_CHUNK_BYTES: Final = 1024
MAX_CHUNK_BYTES: Final = 4_000_000


class Key(NamedTuple):
    """Which round a message is about. Within a parent's session keys only grow.

    `attempt` counts how often the parent went back to an earlier round, so it orders first.
    """

    attempt: int
    global_round: int
    local_round: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a blob is: its content id, size, chunks (xxh3-64 of each), codec and model layout digest.

    `reference`: the blob id of the model that a delta is against, else empty.
    """

    blob: str
    size: int
    chunk_bytes: int
    digests: bytes
    codec: str
    layout: str
    reference: str = ""

    def __post_init__(self) -> None:
        for blob in (self.blob, self.reference or self.blob):
            if not (len(blob) == 16 and set(blob) <= set("0123456789abcdef")):
                raise WireError(f"blob id {blob[:32]!r} is not 16 hexadecimal digits")
        if self.size < 1:
            raise WireError("a blob of no bytes")
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise WireError(f"chunk_bytes {self.chunk_bytes} is outside {MIN_CHUNK_BYTES}..{MAX_CHUNK_BYTES}")
        if len(self.digests) != DIGEST_BYTES * self.chunks:
            raise WireError(f"{len(self.digests)} digest bytes for {self.chunks} chunks")

    @property
    def chunks(self) -> int:
        """Return the number of chunks; the last one may be shorter."""
        return -(-self.size // self.chunk_bytes)

    def span(self, index: int) -> slice:
        """Return the bytes of chunk `index`."""
        return slice(index * self.chunk_bytes, min(self.size, (index + 1) * self.chunk_bytes))


class NodeState(StrEnum):
    """A node's presence, after Homie's and Sparkplug's life cycles."""

    INIT = "init"
    READY = "ready"
    FINISHED = "finished"
    FAILED = "failed"
    DISCONNECTED = "disconnected"
    LOST = "lost"


class Failure(StrEnum):
    """Why a node gave up, as far as it decides how its parent ends."""

    NONE = ""
    INVALID = "invalid"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a living child's /metrics answers, host:port."""

    name: str
    metrics: str


@dataclass(frozen=True, slots=True)
class Presence:
    """A node's retained state; its will says LOST. `answers` names the session of a second node of our name.

    `samples`: a device's training samples, 0 where unknown; `metrics`: the address of its /metrics, `targets` those of
    its own children; `ledger`: names the account of bytes that its children count for. `invalid`: it failed as its part
    in the experiment cannot work.
    """

    state: NodeState
    role: str
    metrics: str = ""
    samples: int = 0
    reason: str = ""
    answers: str = ""
    ledger: str = ""
    failure: Failure = Failure.NONE
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True, slots=True)
class Announcement:
    """The experiment, retained by a parent for its children; the layout serves nodes without torch.

    `partition`: the digest of the cloud's split of the data, empty where nothing is split.
    """

    experiment: str
    layout: str
    partition: str = ""


@dataclass(frozen=True, slots=True)
class WhoIsThere:
    """A question for proof of life, repeated until it is answered: a retained presence alone proves nothing.

    `run`: the run in which the asking node is, empty where it seeks one.
    """

    nonce: str
    run: str = ""


@dataclass(frozen=True, slots=True)
class Alive:
    """The answer to `WhoIsThere` with its nonce. A parent adds its experiment for a child that is not in its run."""

    nonce: str
    presence: Presence
    announcement: Announcement | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A parent's wish, said again until it is answered: train this model for so many epochs."""

    key: Key
    epochs: int
    model: Manifest
    inline: bytes | None


class Phase(StrEnum):
    """What a child is doing in its round."""

    FETCHING = "fetching"
    WAITING = "waiting"
    TRAINING = "training"
    ANNOUNCING = "offering"  # the value in messages of every release


@dataclass(frozen=True, slots=True)
class Progress:
    """A child's sign of life; `done` grows with chunks, steps or, at an institution, its devices' progress.

    `below` is the sum of its own children's links, but for its `wire`: the child's connection to their broker, which
    they share.
    """

    key: Key
    phase: Phase
    done: int
    total: int
    traffic: Traffic
    below: Traffic


@dataclass(frozen=True, slots=True)
class Result:
    """A child's answer, offered again until it has a receipt. Seconds are durations on the child's clock.

    `path_steps`: the steps of SGD that no device could have taken beside others, of each local round the slowest
    device's. `plans`: what the child's own aggregation decided in each of its rounds, as JSON, a list of objects.
    `train_s`: of the trainings; `wait_s`: for a slot before them; `pause_s`: after them, where the child plays a slower
    machine (`common/experiment/hardware.py`). An institution's are sums over its rounds, of each the largest of its
    devices'. `traffic` and `below` as in Progress, at the time of the offer. `path`: a device's.
    """

    key: Key
    model: Manifest
    inline: bytes | None
    samples: int
    loss: float
    epochs: int
    steps: int
    path_steps: int
    train_s: float
    wait_s: float
    pause_s: float
    children: tuple[ChildReport, ...]
    plans: str
    traffic: Traffic = Traffic()
    below: Traffic = Traffic()
    path: TrainingPath = TrainingPath.NONE


@dataclass(frozen=True, slots=True)
class Preparing:
    """A child's progress before it can take part: `done` grows as anything moves.

    `waits_for`: who is absent or failed below it, and why, where it waits for its own children; empty while it works.
    """

    done: int
    waits_for: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A child's refusal of a task that does not fit, and why; the task has changed nothing at the child."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A parent's answer to a result: accepted where `reason` is empty, else refused or late, and why."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A receiver's whole state of one blob: what it lacks, what it saw last, and how much may be in flight.

    `lacking` is a bitmap, chunk 0 in the highest bit; empty = complete. `seen_all` and `seen_own` are the last
    publication numbers seen on the two lanes. `restart`: nothing is in flight any more.
    """

    blob: str
    lacking: bytes
    seen_all: int
    seen_own: int
    window: int
    restart: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """A parent's noise, for its child to pull and to time; said again until it is answered."""

    model: Manifest


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to the probe `asked`: bytes per second as they arrived, 0 if unknown, and noise to pull back."""

    asked: str
    rate: float
    model: Manifest


@dataclass(frozen=True, slots=True)
class Gone:
    """An owner's word that it does not hold a blob."""

    blob: str


@dataclass(frozen=True, slots=True)
class Reports:
    """An institution's final reports on its devices."""

    children: tuple[ChildReport, ...]


@dataclass(frozen=True, slots=True)
class Farewell:
    """A child's last message, small, as it cannot count itself: the final bytes, as in `Progress`.

    It is repeated until the parent answers `Goodbye`.
    """

    traffic: Traffic
    below: Traffic


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A parent's answer to `Farewell`: the child may leave."""


Message: TypeAlias = (
    Presence | Announcement | Probe | Probed | Task | Progress | Result | Acknowledgement | Ask | Gone | Reports
    | Farewell | WhoIsThere | Alive | Preparing | Declined | Goodbye
)  # fmt: skip
