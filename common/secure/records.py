"""What a parent and its children exchange around the uploads of a secure sum, as bytes.

turn      the parent asks with        a child answers with
keys      Begin                       Keys
shares    Roster                      Boxes
model     the round's task            its result, whose model is masked
unmask    Present                     Opened
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgpack

from fedstrata.common.errors import WireError
from fedstrata.common.protocol.serialization import from_facts
from fedstrata.common.text import NameText

ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of an exchange: a number that no other one has."""

    exchange: bytes


class Opening(NamedTuple):
    """One child of a sum that was opened."""

    name: NameText


@dataclass(frozen=True, slots=True)
class Keys:
    """A child's public keys of an exchange; `opened`: the children of the sum of this round that it
    has helped to open, if it has. It opens no other one.
    """

    masks: bytes
    boxes: bytes
    opened: tuple[Opening, ...]


class SumMember(NamedTuple):
    """A child that takes part, with its public keys."""

    name: NameText
    masks: bytes
    boxes: bytes


@dataclass(frozen=True, slots=True)
class Roster:
    """All children of an exchange; `samples_most`: the most samples of one, 0 if all weigh the
    same.
    """

    exchange: bytes
    samples_most: int
    members: tuple[SumMember, ...]


class SealedShares(NamedTuple):
    """What one child has sealed for another one, by the name of the other end."""

    name: NameText
    box: bytes


@dataclass(frozen=True, slots=True)
class Boxes:
    """A child's shares of its secrets, for each of its neighbours."""

    boxes: tuple[SealedShares, ...]


@dataclass(frozen=True, slots=True)
class Present:
    """The children whose uploads are in the sum, and what the neighbours of the asked child have
    sealed for it.
    """

    exchange: bytes
    names: tuple[Opening, ...]
    boxes: tuple[SealedShares, ...]


class Share(NamedTuple):
    """A share of a secret of a neighbour: of its own mask if it is `present`, else of its key."""

    name: NameText
    present: bool
    share: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """What opens a sum, of one child."""

    shares: tuple[Share, ...]


Record: TypeAlias = Begin | Keys | Roster | Boxes | Present | Opened
_R = TypeVar("_R", bound=Record)


def packed(record: Record) -> bytes:
    """Return a record's bytes."""
    fields = [getattr(record, name) for name in type(record).__dataclass_fields__]
    data: bytes = msgpack.packb(fields)
    return data


def read(kind: type[_R], data: bytes | memoryview) -> _R:
    """Return a record from its bytes. Raises WireError."""
    try:
        tree = msgpack.unpackb(data, use_list=False, max_map_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {error}") from None
    return from_facts(kind, tree)
