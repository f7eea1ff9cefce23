"""A parent's books: the bytes of its children's links over a run, each direction counted where it arrived."""

from __future__ import annotations

from dataclasses import astuple
from typing import Final

from common.errors import WireError
from common.net.accounting import Account
from common.wire.messages import Traffic

BYTES_MOST: Final = 2**50

_NOTHING: Final = (Traffic(), Traffic())


class Ledger:
    """What each child counted on its own link and below it, summed over the child's processes."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, Traffic, Traffic]] = {}
        self._before: dict[str, tuple[Traffic, Traffic]] = {}

    def enter(self, child: str, session: str, *, link: Traffic, below: Traffic) -> None:
        """Take a child's counts, which grow within a session. Raises WireError on counts that cannot be."""
        if any(count > BYTES_MOST for part in (link, below) for count in astuple(part)):
            raise WireError(f"{child} counts more bytes than there are")  # their sums must fit in a message
        known, *last = self._seen.get(child, (session, *_NOTHING))
        if known != session:  # a new process counts from zero
            self._before[child] = self._plus(child, last[0], last[1])
        self._seen[child] = (session, link, below)

    def link(self, child: str, account: Account) -> Traffic:
        """Return a child's link: `received_*` as our `account` has it (up), `sent_*` as the child had it (down)."""
        here, (there, _) = account.traffic(child), self._reported(child)
        return Traffic(
            there.received_model_payload,
            there.received_model_message,
            there.received_control_payload,
            there.received_control_message,
            here.received_model_payload,
            here.received_model_message,
            here.received_control_payload,
            here.received_control_message,
        )

    def below(self, child: str) -> Traffic:
        """Return the sum of a child's own children's links."""
        return self._reported(child)[1]

    def _reported(self, child: str) -> tuple[Traffic, Traffic]:
        _, link, below = self._seen.get(child, ("", *_NOTHING))
        return self._plus(child, link, below)

    def _plus(self, child: str, link: Traffic, below: Traffic) -> tuple[Traffic, Traffic]:
        before = self._before.get(child, _NOTHING)
        return before[0] + link, before[1] + below
