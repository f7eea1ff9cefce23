"""The control messages of fedstrata, as typed records and as msgpack.

On the wire a message is the msgpack array `[VERSION, session, kind, field, ...]`: `session` names the
sender's process, the fields follow in the order of the record. Every field is checked against its
annotation and the caps below before a record exists; whatever else arrives is a `WireError`, never
another exception. Both tiers speak the same messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from common.errors import WireError

VERSION: Final = 1
MAX_TEXT: Final = 4_000_000
MAX_INT: Final = 2**63 - 1
MAX_ITEMS: Final = 100_000
DIGEST_BYTES: Final = 8
MIN_CHUNK_BYTES: Final = 1024
MAX_CHUNK_BYTES: Final = 4_000_000


class Key(NamedTuple):
    """Which round a message is about. Within a parent's session keys only grow.

    `attempt` counts how often the parent went back to an earlier round, so it orders first.
    """

    attempt: int
    iteration: int
    round: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a blob is: its content id, size, chunks (xxh3-64 of each), codec and model layout digest."""

    blob: str
    size: int
    chunk_bytes: int
    digests: bytes
    codec: str
    layout: str

    def __post_init__(self) -> None:
        if not (len(self.blob) == 16 and set(self.blob) <= set("0123456789abcdef")):
            raise WireError(f"blob id {self.blob[:32]!r} is not 16 hexadecimal digits")
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


@dataclass(frozen=True, slots=True)
class Presence:
    """A node's retained state; its will says LOST. `answers` names the session of a second node of our name.

    `samples`: a device's training samples, 0 where unknown; `metrics`: the address of its /metrics.
    """

    state: NodeState
    role: str
    metrics: str = ""
    samples: int = 0
    reason: str = ""
    answers: str = ""


@dataclass(frozen=True, slots=True)
class Announcement:
    """The experiment, retained by a parent for its children; the layout serves nodes without torch."""

    experiment: str
    layout: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one link since the node's session began, as one end counted them.

    `payload`: blob bytes, or message bodies; `message`: whole MQTT packets.
    """

    sent_model_payload: int = 0
    sent_model_message: int = 0
    sent_control_payload: int = 0
    sent_control_message: int = 0
    received_model_payload: int = 0
    received_model_message: int = 0
    received_control_payload: int = 0
    received_control_message: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def sent(self) -> int:
        """Return all MQTT bytes sent."""
        return self.sent_model_message + self.sent_control_message

    @property
    def received(self) -> int:
        """Return all MQTT bytes received."""
        return self.received_model_message + self.received_control_message


@dataclass(frozen=True, slots=True)
class ChildReport:
    """What one device did in an iteration, and its link's bytes in the whole run so far.

    `up` and `down` are each measured where they arrive: `up` at the parent, `down` at the child.
    """

    name: str
    samples: int = 0
    rounds: int = 0
    epochs: int = 0
    steps: int = 0
    loss: float = 0.0
    train_s: float = 0.0
    wait_s: float = 0.0
    traffic: Traffic = Traffic()


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
    OFFERING = "offering"


@dataclass(frozen=True, slots=True)
class Progress:
    """A child's sign of life; `done` grows with chunks, steps or, at an institution, its devices' progress."""

    key: Key
    phase: Phase
    done: int
    total: int
    traffic: Traffic
    below: Traffic


@dataclass(frozen=True, slots=True)
class Result:
    """A child's answer, offered again until it has a receipt. Seconds are durations on the child's clock."""

    key: Key
    model: Manifest
    inline: bytes | None
    samples: int
    loss: float
    epochs: int
    steps: int
    train_s: float
    wait_s: float
    children: tuple[ChildReport, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A parent's word on a result: taken where `reason` is empty, else refused or late, and why."""

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
class Gone:
    """An owner's word that it does not hold a blob."""

    blob: str


@dataclass(frozen=True, slots=True)
class Farewell:
    """A child's last message: final bytes of its link and, from an institution, of its devices' links."""

    traffic: Traffic
    below: Traffic
    children: tuple[ChildReport, ...]


Message: TypeAlias = Presence | Announcement | Task | Progress | Result | Receipt | Ask | Gone | Farewell
KINDS: Final[tuple[type[Message], ...]] = (
    Presence, Announcement, Task, Progress, Result, Receipt, Ask, Gone, Farewell,
)  # fmt: skip
_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}


def encode(message: Message, session: str) -> bytes:
    """Return the message's bytes."""
    packed: bytes = msgpack.packb([VERSION, session, _CODES[type(message)], *_plain(message)])
    return packed


def decode(data: bytes | bytearray | memoryview) -> tuple[str, Message]:
    """Return the sender's session and the record. Raises WireError, whatever the bytes."""
    try:
        tree = msgpack.unpackb(data, use_list=False, strict_map_key=True, max_array_len=MAX_ITEMS, max_map_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {error}") from None
    if not isinstance(tree, tuple) or len(tree) < 3:
        raise WireError("not a message")
    version, session, code, *values = tree
    if type(version) is not int or version != VERSION:
        raise WireError(f"protocol version {_brief(version)}, this release speaks {VERSION}")
    if not isinstance(session, str) or not 0 < len(session) <= 32:
        raise WireError("no session id")
    if type(code) is not int or not 0 <= code < len(KINDS):
        raise WireError(f"unknown kind {_brief(code)}")
    message: Message = _DECODERS[KINDS[code]](tuple(values))
    return session, message


def _plain(record: Any) -> list[Any]:
    return [_plain_value(getattr(record, field.name)) for field in fields(record)]


def _plain_value(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return _plain(value)
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return value


_Record = TypeVar("_Record")


def _record_decoder(kind: type[_Record]) -> Callable[[Any], _Record]:
    hints = get_type_hints(kind)
    names = list(kind._fields) if issubclass(kind, tuple) else [f.name for f in fields(kind)]  # type: ignore[attr-defined, arg-type]
    checks = [(name, _value_decoder(hints[name])) for name in names]

    def decode_record(value: Any) -> _Record:
        if not isinstance(value, tuple) or len(value) != len(checks):
            raise WireError(f"{kind.__name__} wants {len(checks)} fields")
        decoded = []
        for (name, check), item in zip(checks, value, strict=True):
            try:
                decoded.append(check(item))
            except WireError as error:
                raise WireError(f"{kind.__name__}.{name}: {error}") from None
        return kind(*decoded)

    return decode_record


def _value_decoder(hint: Any) -> Callable[[Any], Any]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if get_origin(hint) is UnionType:
        inner = _value_decoder(next(arg for arg in get_args(hint) if arg is not NoneType))
        return lambda value: None if value is None else inner(value)
    if get_origin(hint) is tuple:
        item = _record_decoder(get_args(hint)[0])
        return lambda value: tuple(map(item, _tuple(value)))
    if issubclass(hint, StrEnum):
        return lambda value: _enum(hint, value)
    return _record_decoder(hint)


def _brief(value: Any) -> str:
    """Return a foreign value for an error's text; `repr` of a deeply nested one would be a RecursionError."""
    if isinstance(value, (str, bytes)):
        return repr(value[:32])
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise WireError(f"{_brief(value)} is no count")
    return value


def _real(value: Any) -> float:
    if type(value) is not float:  # NaN may travel: a diverged child must be heard to be refused
        raise WireError(f"{_brief(value)} is no number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise WireError(f"{_brief(value)} is no text")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise WireError(f"{_brief(value)} is no byte string")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"{_brief(value)} is no flag")
    return value


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise WireError(f"{_brief(value)} is no list")
    return value


def _enum(kind: type[StrEnum], value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise WireError(f"{_brief(value)} is no {kind.__name__}") from None


_SCALARS: Final[dict[Any, Callable[[Any], Any]]] = {
    int: _integer, float: _real, str: _text, bytes: _bytes, bool: _flag,
}  # fmt: skip
_DECODERS: Final[dict[type[Message], Callable[[Any], Any]]] = {kind: _record_decoder(kind) for kind in KINDS}
