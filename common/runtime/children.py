"""A parent's children as seen by its rounds, over a network or in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from common.accounting.ledger import Ledger
from common.runtime.round import ClosedRound, Dispatch
from common.runtime.world import nothing

Observe: TypeAlias = Callable[[str, dict[str, object]], None]  # takes an event: its name, and facts that JSON can hold


class Children(Protocol):
    """The children on a broker (`common.runtime.parent_endpoint`) or in this process (`deploy.local.calls`)."""

    @property
    def samples(self) -> dict[str, int]:
        """The training samples of each child that has reported them."""

    @property
    def ledger(self) -> Ledger:
        """The bytes of the links to them."""

    @property
    def moves(self) -> int:
        """A count that grows with any progress below."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Their names in order."""

    def now(self) -> float:
        """Return the time of the clock that measures rounds, in seconds."""

    async def round(self, dispatch: Dispatch, *, on_progress: Callable[[], None] = nothing) -> ClosedRound:
        """Send each child its model and return the results, see `Dispatch` and `ParentEndpoint.round`."""


def unreported(children: Children) -> list[str]:
    """Return the children whose samples are not known."""
    return [name for name in children.peers if name not in children.samples]
