"""The control messages of fedstrata, as typed records, used by both tiers.

`common.protocol.serialization` converts them to bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple, TypeAlias

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import WireError
from fedstrata.common.host.examination import Finding
from fedstrata.common.text import JsonText, NameText, ShortText

DIGEST_BYTES: Final = 8
MIN_CHUNK_BYTES: Final = 1024
MAX_CHUNK_BYTES: Final = 4_000_000


class RoundTurn(IntEnum):
    """What a parent asks of its children in a round, in order; without secure sums the model
    alone.
    """

    KEYS = 0
    SHARES = 1
    MODEL = 2
    UNMASK = 3


class Key(NamedTuple):
    """The round that a message belongs to, and the turn in it. Within a parent's session keys only
    grow.

    `attempt` counts how often the parent returned to an earlier round or turn, so it is compared
    first.
    """

    attempt: int
    global_round: int
    local_round: int
    turn: int = int(RoundTurn.MODEL)

    @property
    def round(self) -> tuple[int, int]:
        """The global and the local round."""
        return self.global_round, self.local_round


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a blob."""

    blob: NameText  # id of its content
    size: int  # bytes
    chunk_bytes: int
    digests: bytes  # xxh3-64 of each chunk
    codec: NameText
    layout: NameText  # digest of the model's layout
    reference: NameText = ""  # the blob id of the model that a delta is based on, else empty
    extras: int = 0  # how many of the last bytes are not the model, but the vectors behind it

    def __post_init__(self) -> None:
        for blob in (self.blob, self.reference or self.blob):
            if not (len(blob) == 16 and set(blob) <= set("0123456789abcdef")):
                raise WireError(f"blob id {blob[:32]!r} is not 16 hexadecimal digits")
        if self.size < 1:
            raise WireError("a blob of no bytes")
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise WireError(
                f"chunk_bytes {self.chunk_bytes} is outside {MIN_CHUNK_BYTES}..{MAX_CHUNK_BYTES}"
            )
        if self.extras > self.size:
            raise WireError(f"{self.extras} bytes of extras in a blob of {self.size}")
        if len(self.digests) != DIGEST_BYTES * self.chunks:
            raise WireError(f"{len(self.digests)} digest bytes for {self.chunks} chunks")

    @property
    def chunks(self) -> int:
        """The number of chunks; the last one may be shorter."""
        return -(-self.size // self.chunk_bytes)

    def span(self, index: int) -> slice:
        """Return the range of bytes of chunk `index`."""
        return slice(index * self.chunk_bytes, min(self.size, (index + 1) * self.chunk_bytes))

    def digest(self, index: int) -> bytes:
        """Return the digest of chunk `index`."""
        return self.digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]

    def extras_in(self, index: int) -> int:
        """Return how many bytes of chunk `index` are extras."""
        begin = index * self.chunk_bytes
        end = min(self.size, (index + 1) * self.chunk_bytes)
        return max(0, end - max(begin, self.size - self.extras))


class NodeState(StrEnum):
    """A node's presence, after the life cycles of Homie and Sparkplug."""

    INIT = "init"
    READY = "ready"
    FINISHED = "finished"
    FAILED = "failed"
    DISCONNECTED = "disconnected"
    LOST = "lost"


LIVING: Final = (NodeState.INIT, NodeState.READY)


class Failure(StrEnum):
    """Why a node failed, as far as it determines how its parent ends."""

    NONE = ""
    INVALID = "invalid"
    STALLED = "stalled"
    MOVED = "moved"  # to another parent: no failure, and nothing is to be expected of it


@dataclass(frozen=True, slots=True)
class Target:
    """Address of a living node's /metrics, host:port, after https:// where it is reached by TLS."""

    name: NameText
    metrics: ShortText


@dataclass(frozen=True, slots=True)
class Presence:
    """A node's retained state; its will has LOST."""

    state: NodeState
    role: NameText
    metrics: ShortText = ""  # the address of its /metrics
    samples: int = 0  # a device's training samples, 0 if unknown
    reason: ShortText = ""
    answers: NameText = ""  # the session of a second node with this node's name
    ledger: NameText = ""  # the id of the byte ledger that its children count for
    failure: Failure = Failure.NONE  # why it failed
    targets: tuple[Target, ...] = ()  # the addresses of /metrics of the nodes below
    # since the run's first global round began, over all its sessions; negative before that
    elapsed_s: float = -1.0
    parent: NameText = ""  # whose child it is, of a device, which may move
    after: int = 0  # the task that another parent used last; 0 for none
    # The test samples of a device that scores models, or of all devices below a node; 0 if it
    # scores none, or their number is not known.
    tests: int = 0


@dataclass(frozen=True, slots=True)
class Announcement:
    """The experiment, retained by a parent for its children; the layout is for nodes without torch.

    `partition`: the digest of the cloud's data split, empty if nothing is split.
    """

    experiment: JsonText
    layout: JsonText
    partition: NameText = ""


class About(StrEnum):
    """What a question asks for, and the message that answers it."""

    PRESENCE = "presence"  # Alive; a retained presence alone proves nothing
    ENTRY = "entry"  # Here
    STATUS = "status"  # Status, for some seconds
    FROZEN = "frozen"  # FrozenOffered


@dataclass(frozen=True, slots=True)
class Question:
    """A question, repeated until it is answered. The answer has its nonce, unless it is for all who
    ask.

    `run`: the run that it is about, and of a presence that of the asking node, empty during
    discovery.
    """

    nonce: NameText
    about: About = About.PRESENCE
    run: NameText = ""


@dataclass(frozen=True, slots=True)
class Alive:
    """A node's presence. A parent adds its experiment for a child that is not in its run."""

    nonce: NameText
    presence: Presence
    announcement: Announcement | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Assignment of a model and a number of epochs to a child, resent until it is answered.

    With no epochs the model is to be scored only, and its result has no model of its own: its
    manifest is that of the task.
    """

    key: Key
    epochs: int
    model: Manifest
    inline: bytes | None
    # The child's last task whose result was used, counted over the run from 1; 0 if there is none.
    # Its state after that task is the one that this task starts from.
    follows: int = 0


class Phase(StrEnum):
    """The activity of a child in its round."""

    FETCHING = "fetching"
    WAITING = "waiting"
    TRAINING = "training"
    ANNOUNCING = "announcing"


@dataclass(frozen=True, slots=True)
class Progress:
    """A child's progress."""

    key: Key
    phase: Phase
    done: int  # grows with chunks, steps or, at an institution, with its children's progress
    total: int
    traffic: Traffic
    # The sums of the links below it by tier, from those to its own children down. Their `wire` is
    # that of the parents' connections, which all of a parent's links share.
    below: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A child's result announcement, repeated until it is acknowledged."""

    key: Key
    model: Manifest
    inline: bytes | None
    work: Work  # of its task
    # the SGD steps on the critical path: in each local round those of the slowest device
    path_steps: int
    children: tuple[ChildReport, ...]  # on all nodes below it
    # The decisions of the child's own aggregation, and of those below it, in each of their rounds:
    # a JSON object of lists of objects, by node.
    plans: JsonText
    traffic: Traffic = Traffic()  # as in Progress, at the time of the announcement, and `below`
    below: tuple[Traffic, ...] = ()
    # A device's training loss of the model that came with the task, where the parent's rule reads
    # it.
    start_loss: float | None = None
    withdrawn: ShortText = ""  # why there is no model, and the parent has to refuse the result

    @property
    def samples(self) -> int:
        """The samples of its work, which a rule weighs by."""
        return self.work.samples

    @property
    def loss(self) -> float | None:
        """The training loss of its work, which a rule may read."""
        return self.work.loss

    def work_of(self, child: str) -> ChildReport:
        """Return the report on the child's own work."""
        return ChildReport(child, self.work, rounds=min(1, self.work.epochs))


@dataclass(frozen=True, slots=True)
class Preparing:
    """A child's progress before it can take part: `done` grows with any progress.

    `waits_for`: which of its own children are absent or failed, and why; empty if it does not wait
    for them.
    """

    done: int
    waits_for: ShortText


@dataclass(frozen=True, slots=True)
class Declined:
    """A child's rejection of an invalid task, with the reason; the task has changed nothing at the
    child.

    `lacks_keys`: the keys of its secure sum are those of an earlier process.
    """

    key: Key
    reason: ShortText
    lacks_keys: bool = False


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A parent's reply to a result: accepted if `reason` is empty, else refused or late, with the
    reason.
    """

    key: Key
    reason: ShortText


@dataclass(frozen=True, slots=True)
class Ask:
    """A receiver's complete state of one blob."""

    blob: NameText
    lacking: bytes  # bitmap of the chunks, chunk 0 in the highest bit; empty = complete
    # the last publication numbers seen on the broadcast and the unicast stream
    seen_all: int
    seen_own: int
    window: int
    restart: bool  # nothing is in flight any more


@dataclass(frozen=True, slots=True)
class FrozenOffered:
    """The frozen arrays of the model, which the child may fetch. The manifest's layout is their
    digest.
    """

    model: Manifest


@dataclass(frozen=True, slots=True)
class Probe:
    """A parent's link calibration: noise that the child fetches and times; repeated until it is
    answered.
    """

    model: Manifest


@dataclass(frozen=True, slots=True)
class Probed:
    """The reply to the probe `asked`: the measured bytes per second, 0 if unknown, and noise for
    the way back.
    """

    asked: NameText
    rate: float
    model: Manifest


@dataclass(frozen=True, slots=True)
class Gone:
    """An owner's report that it does not hold a blob."""

    blob: NameText


@dataclass(frozen=True, slots=True)
class Reports:
    """An institution's final reports on all nodes below it."""

    children: tuple[ChildReport, ...]


@dataclass(frozen=True, slots=True)
class Farewell:
    """A child's last message: the final byte counts, as in `Progress`. It is small, because it
    cannot count itself.

    It is repeated until the parent replies with `Goodbye`.
    """

    traffic: Traffic
    below: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A parent's reply to `Farewell`: the child may leave."""


@dataclass(frozen=True, slots=True)
class Here:
    """A node's entry in the roll of the lab."""

    nonce: NameText
    role: NameText
    parent: NameText
    run: NameText  # empty while the node waits for one
    release: NameText
    host: ShortText
    hardware: ShortText  # the accelerators of a device
    data: ShortText  # the data sets on its host
    kit: NameText  # digest of the machine's part of the lab's file, "" outside kits
    clock_s: float  # the time there, Unix seconds
    findings: tuple[Finding, ...]


class Step(StrEnum):
    """What a child does in its parent's round, in order."""

    IDLE = "idle"
    ASSIGNED = "assigned"
    FETCHING = "fetching"
    WAITING = "waiting"
    TRAINING = "training"
    OFFERING = "offering"
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """A child as its parent knows it."""

    name: NameText
    state: NodeState | None  # its presence, None if there is none
    step: Step
    done: int  # of `total`: its progress within its step, 0 of 0 if it is unknown
    total: int
    size: int  # bytes of the model in transfer
    epochs: int
    up: int  # MQTT bytes of its link, each counted on arrival, and `down`
    down: int
    loss: float | None  # of its last training, None before the first, and the `seconds` of that
    seconds: float
    text: ShortText  # whom it waits for, or why it failed or is refused


@dataclass(frozen=True, slots=True)
class ChildCount:
    """The number of children with one presence and one step."""

    state: NodeState | None
    step: Step
    count: int


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """MQTT bytes of all links of a tier below a node."""

    up: int
    down: int


@dataclass(frozen=True, slots=True)
class RoundScore:
    """A closed global round: its training loss, and the score and loss of its model, None until it
    is evaluated.

    A loss that is not finite is None, too.
    """

    global_round: int
    train_loss: float | None
    score: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Seconds of one phase of the last global round."""

    name: NameText
    seconds: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run's progress: closed global rounds, their seconds, and of the last ones the scores and
    the mean seconds.
    """

    closed: int = 0
    elapsed_s: float = 0.0
    round_s: float = 0.0
    phases: tuple[PhaseSeconds, ...] = ()
    scores: tuple[RoundScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """What a parent knows of its round and of its children, published while somebody asks for
    it.
    """

    at_s: float  # seconds of its clock, of which only differences have a meaning
    key: Key | None  # its children's last round, and whether that is `open`
    open: bool
    measuring: bool  # it calibrates the links
    tiers: tuple[LinkBytes, ...]  # below it, from its own links down
    children: tuple[ChildStatus, ...]  # all of them, or of many the missing and the slowest ones
    others: tuple[ChildCount, ...]  # the numbers of the rest
    run: RunStatus | None = None  # at the cloud


# In the order of their codes on the wire.
Message: TypeAlias = (
    Presence
    | Announcement
    | Task
    | Progress
    | Result
    | Acknowledgement
    | Ask
    | Gone
    | Reports
    | Farewell
    | Probe
    | Probed
    | Question
    | Alive
    | Preparing
    | Declined
    | Goodbye
    | Here
    | Status
    | FrozenOffered
)
