"""The places for children that the experiment does not name at this parent."""

from __future__ import annotations

from fedstrata.common.errors import Misfit
from fedstrata.common.protocol.limits import Entering


class Places:
    """Who may enter as a child of one parent, None: nobody, and which of those are away."""

    def __init__(self, entering: Entering | None) -> None:
        self._entering = entering
        self._left: dict[str, float] = {}  # since when each child that had entered is away

    def open_to(self, name: str, *, children: int) -> bool:
        """Return whether a node may enter beside these children. Raises Misfit if all places are
        taken.
        """
        if self._entering is None or not self._entering.admits(name):
            return False
        self._check(self._entering, children)
        return True

    def enter(self, name: str, now: float, *, children: int) -> Entering:
        """Take in a node; return what is known of it. Raises Misfit if all places are taken."""
        assert self._entering is not None
        self._check(self._entering, children)
        self._left[name] = now
        return self._entering

    def may_move_to(self, parent: str) -> bool:
        """Return whether devices may move to another parent."""
        return self._entering is not None and parent in self._entering.parents

    def note(self, child: str, now: float, *, present: bool) -> None:
        """Note whether a child that has entered is present."""
        if present:
            self._left.pop(child, None)
        else:
            self._left.setdefault(child, now)

    def given_back(self, now: float, *, idle_s: float) -> list[str]:
        """Return the children that have been away for `idle_s`, whose places are free now."""
        gone = [name for name, since in self._left.items() if now >= since + idle_s]
        for name in gone:
            del self._left[name]
        return gone

    @staticmethod
    def _check(entering: Entering, children: int) -> None:
        if children >= entering.most:
            raise Misfit(f"it wants to enter, and all places are taken: {entering.most} children")
