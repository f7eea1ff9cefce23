"""What a peer may send before it is read: so many messages, so many presences, so many items in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from common.errors import Flooded
from common.protocol import serialization
from common.protocol.messages import DIGEST_BYTES, Ask, Message
from common.protocol.pending import ASK_S, ASKS_MOST, MESSAGE_S, MESSAGES_MOST, PRESENCE_S, PRESENCES_MOST, Budget

ASK: Final = bytes([serialization.KINDS.index(Ask)])  # as it follows the session
HEAD_BYTES: Final = 48  # of a message, which contain its sender's session
ITEMS: Final = 64  # of a message that reports on nobody: fields, counts of each tier


class Admission:
    """The limits of one session's peers. `reports`: the number of nodes that a peer may report on."""

    def __init__(self) -> None:
        self.reports: Mapping[str, int] = {}
        self._messages = Budget(MESSAGES_MOST, MESSAGE_S)
        self._asks = Budget(ASKS_MOST, ASK_S)
        self._presences = Budget(PRESENCES_MOST, PRESENCE_S)

    def check_message(self, peer: str, session: str, body: bytes, now: float) -> None:
        """Count a control message under the name of a peer with this session. Raises Flooded.

        Asks have a budget of their own: only they grow with the chunks of a transfer.
        """
        at = body.find(session.encode(), DIGEST_BYTES, HEAD_BYTES) if session else -1
        budget = self._asks if at >= 0 and body.startswith(ASK, at + len(session)) else self._messages
        if not budget.take(_source(peer, session, body), now):
            raise Flooded("too many messages at once")

    def check_presence(self, node: str, session: str, body: bytes, now: float) -> None:
        """Count a presence under the name of a node with this session. Raises Flooded."""
        if not self._presences.take(_source(node, session, body), now):
            raise Flooded("too many presences at once")

    def decode(self, sender: str, body: bytes) -> tuple[str, Message]:
        """Return the sender's session and the message; a list of more nodes than there are is not read.

        Raises WireError.
        """
        reports = self.reports.get(sender)
        return serialization.decode(body, items=serialization.MAX_ITEMS if reports is None else ITEMS + reports)


def _source(name: str, session: str, body: bytes) -> str:
    """Return what a message is counted for: others that use a node's name must not spend what its session may send."""
    return name if session.encode() in body[:HEAD_BYTES] else f"{name} of another session"
