"""What a peer may send: so many bytes in a message, so many messages, so many presences, so many reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from common.errors import Flooded, TooLarge, WireError
from common.protocol import serialization, topics
from common.protocol.limits import ANYBODY, STRANGER, SenderBounds, bytes_on
from common.protocol.messages import DIGEST_BYTES, Alive, Ask, Message, Presence, Reports, Result
from common.protocol.pending import ASK_S, ASKS_MOST, MESSAGE_S, MESSAGES_MOST, PRESENCE_S, PRESENCES_MOST, Budget

ASK: Final = bytes([serialization.KINDS.index(Ask)])  # as it follows the session
HEAD_BYTES: Final = 48  # of a message, which contain its sender's session
COUNTED_BYTES: Final = 32_768  # of a message that count as another one
COUNTED_ITEMS: Final = 10  # reports or addresses in a message that count as another one: to read them takes as long


class Admission:
    """The limits of one session's peers. `bounds`: of each peer's messages, as far as the experiment decides them."""

    def __init__(self) -> None:
        self.bounds: Mapping[str, SenderBounds] = {}
        self._messages = Budget(MESSAGES_MOST, MESSAGE_S)
        self._asks = Budget(ASKS_MOST, ASK_S)
        self._presences = Budget(PRESENCES_MOST, PRESENCE_S)

    def check_size(self, topic: topics.Topic, size: int) -> None:
        """Check the bytes of a message before they arrive. Raises TooLarge."""
        sender = topics.sender_of(topic)
        most = bytes_on(topic, self.bounds.get(sender, ANYBODY))
        if size > most:
            raise TooLarge(f"{size} bytes, at most {most} are possible")

    def read(self, peer: str, session: str, body: bytes, now: float) -> tuple[str, Message]:
        """Return the sender's session and a control message, counted under the name of a peer with this session.

        `peer`: "" for a node that is none. Asks have a budget of their own: only they grow with the chunks of a
        transfer. What a message cost beyond its bytes is counted once it is read: the next one waits for that. Raises
        WireError.
        """
        at = body.find(session.encode(), DIGEST_BYTES, HEAD_BYTES) if session else -1
        budget = self._asks if at >= 0 and body.startswith(ASK, at + len(session)) else self._messages
        source = _source(peer, session, body)
        if not budget.take(source, now, 1 + len(body) // COUNTED_BYTES):
            raise Flooded("too many messages at once")
        found = serialization.decode(body, sender=self.bounds.get(peer, ANYBODY) if peer else STRANGER)
        if items := _items(found[1]):
            budget.owe(source, items // COUNTED_ITEMS)
        return found

    def read_presence(
        self, node: str, session: str, body: bytes, now: float, *, retained: bool
    ) -> tuple[str, Presence | None]:
        """Return the sender's session and a presence of a node with this session, None if the node has cleared it.

        Retained ones are not counted: they come with a subscription. Raises WireError.
        """
        if not retained and not self._presences.take(_source(node, session, body), now):
            raise Flooded("too many presences at once")
        found, message = serialization.decode(body, sender=self.bounds.get(node, ANYBODY)) if body else ("", None)
        if not (message is None or isinstance(message, Presence)):
            raise WireError("no presence on a state topic")
        return found, message


def _items(message: Message) -> int:
    """Return the reports and addresses in a message."""
    if isinstance(message, Result | Reports):
        return len(message.children)
    presence = message.presence if isinstance(message, Alive) else message
    return len(presence.targets) if isinstance(presence, Presence) else 0


def _source(name: str, session: str, body: bytes) -> str:
    """Return what a message is counted for: others that use a node's name must not spend what its session may send."""
    return name if session.encode() in body[:HEAD_BYTES] else f"{name} of another session"
