"""Who a node is, and its claim to its name."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from common.wire.topics import DEFAULT_LAB


def new_session() -> str:
    """Return an id for this process's life."""
    return secrets.token_hex(8)


@dataclass(slots=True)
class Claim:
    """One process's claim to its name: the sessions that it told to end, and whether it was told so itself."""

    told: set[str] = field(default_factory=set)
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a node is in a run of a lab.

    `session` and `claim` are shared by its endpoints; `metrics` is its /metrics address.
    `books`: the account of bytes that its children count for, the session where it is not kept over restarts.
    """

    run: str
    name: str
    role: str
    session: str
    metrics: str = ""
    books: str = ""
    lab: str = DEFAULT_LAB
    claim: Claim = field(default_factory=Claim, compare=False)
