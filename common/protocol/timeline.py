"""Times of the events in a round, and its seconds by phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

PHASES: Final = ("dispatch", "train", "wait", "collect")
GLOBAL_PHASES: Final = ("record", *PHASES, "aggregate", "evaluate")  # in order; they add up to a global round


@dataclass(slots=True)
class Timeline:
    """Times of the events in a round, monotonic seconds at the parent; None = not yet."""

    opened: float
    dispatched: float | None = None
    first_result: float | None = None
    last_result: float | None = None
    closed: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of each result, from its task to its announcement

    def phases(self) -> dict[str, float]:
        """Return the round's seconds by phase; they add up to closed - opened.

        dispatch: until every child has its model; train: until the first result is announced; wait: until the last
        result is announced; collect: until the last upload has arrived. A phase that is overtaken by others has length
        0.
        """
        marks, closed = [self.opened], inf if self.closed is None else self.closed  # later events are of other rounds
        for mark in (self.dispatched, self.first_result, self.last_result, self.closed):
            end = min(closed, inf if mark is None else mark)
            marks.append(max(marks[-1], end) if end < inf else marks[-1])
        return {name: end - start for name, start, end in zip(PHASES, marks, marks[1:], strict=False)}
