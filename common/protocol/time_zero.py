"""The time zero of a run's traces, as a child learns it from its parent's presences."""

from __future__ import annotations

from typing import Final

ELAPSED_MOST_S: Final = 1e10
MOVED_S: Final = 0.25  # by which a later report must differ to count


class TimeZero:
    """When the run's first global round began, in monotonic seconds of this node, None: it has not.

    Clocks of machines are never compared: a presence has the seconds that have passed when it is sent, so the error is
    the time for which it travels.
    """

    def __init__(self) -> None:
        self.begun: float | None = None
        self._session = ""

    def note(self, elapsed_s: float, session: str, now: float, *, published: bool) -> float | None:
        """Note the seconds in a presence of the parent's session; return time zero if it has changed.

        `published`: by itself; a reply may have waited for its link, and counts only for a session that is new.
        """
        if not 0 <= elapsed_s <= ELAPSED_MOST_S or (session == self._session and not published):
            return None
        self._session, begun = session, now - elapsed_s
        if self.begun is not None and abs(begun - self.begun) < MOVED_S:
            return None
        self.begun = begun
        return begun
