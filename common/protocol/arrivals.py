"""What a link passes on to its session: what has come from its peers, and from nodes that may
become some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fedstrata.common.protocol.messages import Message, Presence


@dataclass(frozen=True, slots=True)
class Living:
    """A sign of life of a peer's present session."""

    peer: str
    session: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a peer's present session, for its session here to handle."""

    peer: str
    session: str
    message: Message


@dataclass(frozen=True, slots=True)
class Proven:
    """A peer's proven presence, None: it left. `published`: on its topic, else a reply to this
    node.
    """

    peer: str
    session: str
    presence: Presence | None
    published: bool = True


@dataclass(frozen=True, slots=True)
class Unproven:
    """A retained final state of a session that never proved itself here."""

    peer: str
    presence: Presence


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A peer's message of another run."""

    run: str
    peer: str
    session: str
    message: Message


@dataclass(frozen=True, slots=True)
class Sought:
    """A node that is no peer looks for a run here."""

    name: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A node that was expected has published that it takes part, as a child of this node."""

    name: str


Arrival: TypeAlias = Living | Received | Proven | Unproven | Elsewhere | Sought | Joined
