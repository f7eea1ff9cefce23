"""Messages as bytes: msgpack, checked field by field.

On the wire a message is the 8-byte xxh3-64 digest of the rest, then the array `[VERSION, session,
kind, field, ...]`. `session` identifies the sender's process; the fields follow in the order of the
record. The digest detects damage and proves nothing about the sender. A message is read only if it
is not larger than its kind can be (`bounds`). Every field is checked against its annotation before
a record is created, its length before its content. Anything else is a `WireError`, never another
exception. Control characters of texts are escaped: all texts enter here, whereas they end in many
logs, terminals and files. JSON stays the same JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import msgpack
from xxhash import xxh3_64_digest

from fedstrata.common.errors import OtherRelease, TooLarge, WireError
from fedstrata.common.protocol.limits import ANYBODY, SenderBounds
from fedstrata.common.protocol.messages import DIGEST_BYTES, Here, Message, Question
from fedstrata.common.text import TextLimit, escaped, escaped_within

VERSION: Final = 4
MAX_INT: Final = 2**63 - 1
ITEMS: Final = 64  # of a list that does not grow with the nodes: fields, tiers, findings
HEAD: Final = 3  # items before the fields: the version, the session, the kind
HEAD_BYTES: Final = 160  # which contain them: a session has at most 32 characters
# of msgpack
FIXARRAY = 0x90
ARRAY16 = b"\xdc"
FIXSTR = 0xA0

KINDS: Final[tuple[type[Message], ...]] = get_args(Message)
_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}
# Of the messages that all versions can read: how many of their fields never change, and values of
# the others.
SHARED: Final[Mapping[type[Message], tuple[int, tuple[Any, ...]]]] = {
    Question: (3, ()),
    Here: (5, ("", "", "", "", 0.0, ())),
}

_Record = TypeVar("_Record")


def encode(message: Message, session: str) -> bytes:
    """Return the message's bytes."""
    packed: bytes = msgpack.packb(
        [VERSION, session, _CODES[type(message)], *_values(message)], default=_values
    )
    return xxh3_64_digest(packed) + packed


def decode(
    data: bytes | bytearray | memoryview, *, sender: SenderBounds = ANYBODY
) -> tuple[str, Message]:
    """Return the sender's session and the record, which is within the sender's bounds.

    Raises WireError, whatever the bytes.
    """
    version, session, kind, tree = _read(data, sender)
    if version != VERSION:
        raise _other_release(version)
    message: Message = _DECODERS[kind](tree)
    return session, message


def decode_shared(data: bytes, *, sender: SenderBounds = ANYBODY) -> tuple[int, str, Message]:
    """Return the version, the sender's session, and a message, of another version one that all
    versions can read.

    Of that only the first fields are read. Raises WireError.
    """
    version, session, kind, tree = _read(data, sender)
    if version != VERSION:
        if kind not in SHARED:
            raise _other_release(version)
        shared, others = SHARED[kind]
        tree = (*tree[:shared], *others) if len(tree) >= shared else tree
    message: Message = _DECODERS[kind](tree)
    return version, session, message


def from_facts(kind: type[_Record], facts: Any) -> _Record:
    """Return a record from its fields by name, as `dataclasses.asdict` and JSON have them. Raises
    WireError.
    """
    return _record_decoder(kind)(_tree(facts))


def _tree(facts: Any) -> Any:
    """Return facts as `decode` expects them: the values alone."""
    if isinstance(facts, dict):
        facts = list(facts.values())
    if isinstance(facts, (list, tuple)):
        return tuple(map(_tree, facts))
    return facts


def _read(
    data: bytes | bytearray | memoryview, sender: SenderBounds
) -> tuple[int, str, type[Message], tuple[Any, ...]]:
    """Return a message's version, session and kind, and its fields unchecked. Raises WireError."""
    if len(data) > sender.most_of_all:
        raise TooLarge(
            f"a message of {len(data)} bytes: its sender's have at most {sender.most_of_all}"
        )
    body = memoryview(data)[DIGEST_BYTES:]  # no copy: a small model may be inside
    if data[:DIGEST_BYTES] != xxh3_64_digest(body):
        raise WireError("damaged message")
    version, session, code = _head(body)
    if not 0 <= code < len(KINDS):
        if version != VERSION:
            raise _other_release(version)
        raise WireError(f"unknown kind {code}")
    kind = KINDS[code]
    most = sender.most(kind)
    if len(data) > most:
        raise TooLarge(f"a {kind.__name__} of {len(data)} bytes: its sender's have at most {most}")
    try:
        limits = {"max_array_len": ITEMS + sender.nodes, "max_map_len": 0}
        tree = msgpack.unpackb(body, use_list=False, strict_map_key=True, **limits)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {error}") from None
    return version, session, kind, tree[HEAD:]


def _head(body: memoryview) -> tuple[int, str, int]:
    """Return the version, the sender's session and the kind's code of a message, of which nothing
    else is read.
    """
    head = bytes(body[:HEAD_BYTES])
    at = 3 if head[:1] == ARRAY16 else 1
    end = at + 2 + head[at + 1] - FIXSTR if len(head) > at + 1 else 0
    if at + 2 < end < min(len(head), at + 34) and head[at] == VERSION and head[end] < len(KINDS):
        session = head[at + 2 : end]
        if session.isalnum() and (at == 3 or head[0] & 0xF0 == FIXARRAY):
            # as our nodes write it; others may write it differently
            return VERSION, session.decode(), head[end]
    unpacker = msgpack.Unpacker(use_list=False)
    unpacker.feed(head)
    try:
        if unpacker.read_array_header() < HEAD:
            raise WireError("not a message")
        version = unpacker.unpack()
        session = unpacker.unpack()
        code = unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException):
        raise WireError("not a message") from None
    if type(version) is not int:
        raise _other_release(version)
    if not isinstance(session, str) or not 0 < len(session) <= 32:
        raise WireError("no session id")
    if type(code) is not int:
        raise WireError(f"unknown kind {_brief(code)}")
    return version, escaped(session), code


def _other_release(version: Any) -> OtherRelease:
    return OtherRelease(f"protocol version {_brief(version)}, this release uses {VERSION}")


def _values(record: Any) -> tuple[Any, ...]:
    """Return a record's fields for msgpack, which accepts tuples, numbers and texts directly."""
    return tuple([getattr(record, name) for name in _names(type(record))])  # type: ignore[arg-type]  # it is hashable


@cache
def _names(kind: type[object]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))  # type: ignore[arg-type]  # a record's


def _record_decoder(kind: type[_Record]) -> Callable[[Any], _Record]:
    hints = get_type_hints(kind, include_extras=True)
    names = list(kind._fields) if issubclass(kind, tuple) else [f.name for f in fields(kind)]  # type: ignore[attr-defined, arg-type]
    checks = [(name, _value_decoder(hints[name])) for name in names]

    def decode_record(value: Any) -> _Record:
        if not isinstance(value, tuple) or len(value) != len(checks):
            raise WireError(f"{kind.__name__} needs {len(checks)} fields")
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
    if get_origin(hint) is Annotated:
        (limit,) = hint.__metadata__
        return lambda value: _text(value, limit)
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
    """Return an unchecked value for an error's text; `repr` of a deeply nested one would be a
    RecursionError.
    """
    if isinstance(value, (str, bytes)):
        return repr(value[:32])
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"a {type(value).__name__}"


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise WireError(f"{_brief(value)} is not a count")
    return value


def _exactly(kind: type, what: str) -> Callable[[Any], Any]:
    """Return the check that a value is of one type."""

    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise WireError(f"{_brief(value)} is not {what}")
        return value

    return check


def _text(value: Any, limit: TextLimit) -> str:
    if not isinstance(value, str):
        raise WireError(f"{_brief(value)} is not a text")
    text = escaped_within(value, limit)  # whoever passes it on escapes it no more
    if text is None:
        raise WireError(f"a text of {len(value)} characters, at most {limit.most} are possible")
    return text


def _enum(kind: type[StrEnum], value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise WireError(f"{_brief(value)} is not a {kind.__name__}") from None


_tuple: Final = _exactly(tuple, "a list")
_SCALARS: Final[dict[Any, Callable[[Any], Any]]] = {
    int: _integer,
    # NaN is allowed: a diverged child's result must arrive to be refused
    float: _exactly(float, "a number"),
    bytes: _exactly(bytes, "a byte string"),
    bool: _exactly(bool, "a flag"),
}
_DECODERS: Final[dict[type[Message], Callable[[Any], Any]]] = {
    kind: _record_decoder(kind) for kind in KINDS
}
