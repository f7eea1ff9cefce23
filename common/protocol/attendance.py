"""What a parent knows of all its children together, kept so that a message costs no look at all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from common.protocol.messages import NodeState, Presence
from common.protocol.targets import STAYING

_C = TypeVar("_C")


class Attendance:
    """Which children are ready, and which are present, or have just finished, and owe their farewell."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.owing: set[str] = set()

    def note(self, child: str, presence: Presence | None, *, counted: bool, farewell: bool) -> None:
        """Note a child's presence; `counted`: its samples are known. `farewell`: it has sent it."""
        ready = presence is not None and presence.state is NodeState.READY and counted
        owing = presence is not None and presence.state in STAYING and not farewell
        for children, is_one in ((self.ready, ready), (self.owing, owing)):
            if is_one:
                children.add(child)
            else:
                children.discard(child)


class Lacking(Generic[_C]):
    """The children that lack something. Asking costs little, as the next one to look at stays the same meanwhile."""

    def __init__(self, children: Iterable[_C] = ()) -> None:
        self._children = list(children)

    def add(self, child: _C) -> None:
        """Add a child that lacks it again."""
        self._children.append(child)

    def any(self, lacks: Callable[[_C], bool]) -> bool:
        """Return whether a child lacks it; those that do not are removed."""
        while self._children and not lacks(self._children[-1]):
            self._children.pop()
        return bool(self._children)
