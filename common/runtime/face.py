"""What an endpoint asks of the side that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.protocol.messages import Message, Presence
from common.protocol.receiver import IncomingEvent


class Face(Protocol):
    """A parent's or a child's side of an endpoint; all calls come from the event loop."""

    @property
    def peers(self) -> Sequence[str]:
        """Return who this side talks to."""

    def received(self, sender: str, session: str, message: Message, now: float) -> None:
        """Take a control message from a peer."""

    def presence(self, node: str, session: str, presence: Presence | None, now: float) -> None:
        """Take a peer's retained state; None = cleared."""

    def moved(self, peer: str, now: float) -> None:
        """Note that model bytes moved to or from a peer."""

    def transferred(self, event: IncomingEvent, now: float) -> None:
        """Take a finished or failed fetch."""

    def reconnected(self, now: float) -> None:
        """Note that the connection is new: say again what it may have swallowed."""

    def tick(self, now: float) -> None:
        """Let the core judge by the time, and act on its events."""

    def to_send(self, now: float) -> Sequence[tuple[str, Message]]:
        """Return what is due, each with its peer; called only while the broker is there."""

    def next_deadline(self) -> float | None:
        """Return when `tick` or `to_send` next has something to do."""
