"""The methods that the parent's and the child's half of a session implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from common.protocol.fetches import ReceiverEvent
from common.protocol.messages import Message, Presence, WhoIsThere
from common.protocol.outbox import Output


class Side(ABC):
    """A parent's or a child's half of a session."""

    @abstractmethod
    def _inboxes(self) -> Iterable[str]:
        """Return the further topics to subscribe to."""

    @abstractmethod
    def _reconnected(self, now: float) -> None:
        """Note a new connection."""

    @abstractmethod
    def _message(self, sender: str, session: str, message: Message, now: float) -> None:
        """Handle a message of a peer's present session. Raises WireError if the side does not accept its kind."""

    @abstractmethod
    def _presence(
        self, peer: str, session: str, presence: Presence | None, now: float, *, published: bool = True
    ) -> None:
        """Handle a peer's proven presence; None = it left. `published`: on its topic, else a reply to this node."""

    @abstractmethod
    def _moved(self, peer: str, now: float) -> None:
        """Note that chunks of a model were transferred to or from a peer."""

    @abstractmethod
    def _transferred(self, event: ReceiverEvent, now: float) -> None:
        """Handle a finished or failed fetch."""

    @abstractmethod
    def _silent(self, peer: str, now: float) -> None:
        """Note that a peer that was alive before the reconnection does not prove itself."""

    @abstractmethod
    def _tick(self, now: float) -> None:
        """Evaluate the state at this time."""

    @abstractmethod
    def _take_events(self, now: float) -> None:
        """Convert the events of the state machines into events of the session."""

    @abstractmethod
    def _due(self, now: float) -> Iterable[tuple[str, Message]]:
        """Return the messages that are due, each with its peer."""

    @abstractmethod
    def _next_deadline(self) -> float | None:
        """Return when `_tick` or `_due` has something to do."""

    @abstractmethod
    def _next_deadline_away(self) -> float:
        """Return when `_tick` has something to do while the broker is away, inf for never."""

    @abstractmethod
    def _question(self, peer: str, question: WhoIsThere, now: float) -> list[Output]:
        """Ask a peer for proof of life; return the outputs that do not go through the outbox."""

    @abstractmethod
    def _elsewhere(self, run: str, sender: str, session: str, message: Message) -> None:
        """Handle a message of another run. Raises WireError."""

    @abstractmethod
    def _lives(self, peer: str, session: str, now: float) -> None:
        """Note a sign of life of a peer's present session."""

    @abstractmethod
    def _state_of_the_dead(self, peer: str, presence: Presence) -> None:
        """Handle a retained final state of a session that never proved itself here."""
