"""A node's word on itself, retained on the broker, and the defence of its name.

There is no timer in it: a living node answers a second one's birth under its name, and the broker's order of messages
decides which of the two that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.errors import DuplicateName
from common.node.identity import Identity
from common.wire.messages import NodeState, Presence, Target


class Herald:
    """One node's presence on one broker; `publish` puts it there."""

    def __init__(self, identity: Identity, publish: Callable[[Presence], None], *, broker: str) -> None:
        self._identity = identity
        self._publish = publish
        self._broker = broker
        self._presence = Presence(
            NodeState.INIT, identity.role, identity.metrics, books=identity.books or identity.session
        )
        self._established = False
        self.leaving = False

    def set_state(self, state: NodeState, *, reason: str, samples: int, invalid: bool) -> None:
        """Say how this node is."""
        self._presence = replace(self._presence, state=state, reason=reason, samples=samples, invalid=invalid)
        self._publish(self._presence)

    def set_targets(self, targets: tuple[Target, ...]) -> None:
        """Say where the /metrics of this node's children are."""
        self._presence = replace(self._presence, targets=targets)
        if not self.leaving:
            self._publish(self._presence)

    def connected(self) -> None:
        """Say it on a new connection. The name is ours once the broker has sent it back."""
        self._established = False
        self._publish(self._presence)

    def hear(self, run: str, session: str, presence: Presence | None, *, retained: bool) -> None:
        """Take what came on the state topic of our own name, in any run. Raises DuplicateName."""
        claim, mine = self._identity.claim, self._identity.session
        if session == mine:
            if presence is not None and presence.state is NodeState.LOST is not self._presence.state:
                self._publish(self._presence)  # the will of our own broken connection
            else:
                self._established = True
        elif retained or self.leaving or claim.lost or (presence is None and run != self._identity.run):
            return
        elif presence is not None and presence.answers == mine:
            if session in claim.challenged and session > mine:
                return  # both came at once and told each other: one stays
            claim.lost = True
            raise DuplicateName(
                f"{self._identity.name} is already alive on broker {self._broker} (run {run}). "
                "Give this one another --name, or end the other."
            )
        elif self._established and (presence is None or not presence.answers):
            claim.challenge(session)
            self._publish(replace(self._presence, answers=session))  # a second node of our name reads it and ends
