"""A connection's failures as few log lines. No clock, no logger.

A broker that drops a client immediately causes some hundred equal failures an hour, and one that is away as many as a
process has devices. A failure is reported when its kind is new, and then at most once a minute, with the number of
equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

REPEAT_S: Final = 60.0
KINDS_MOST: Final = 32  # a broker may have several addresses


@dataclass(slots=True)
class _Kind:
    """When a kind of failure was last reported, and the number of failures since then."""

    reported_at: float
    unreported: int = 0


class FailureLog:
    """Selects the failures to report; `recovered` forgets them."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._total = 0
        self._since = 0.0

    def failed(self, kind: str, text: str, now: float) -> str | None:
        """Count a failure. Return the line to log, `text` with the number of equal failures, or None.

        `kind` defines which failures are equal; their `text` may differ.
        """
        if self._total == 0:
            self._since = now
        self._total += 1
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) == KINDS_MOST:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[kind] = _Kind(now)
            return text
        known.unreported += 1
        elapsed_s = now - known.reported_at
        if elapsed_s < REPEAT_S:
            return None
        count, known.unreported, known.reported_at = known.unreported, 0, now
        return f"{text} ({count} times in {elapsed_s:.0f} s)"

    def recovered(self, now: float) -> str | None:
        """Forget all failures. Return their number and duration, or None without failures."""
        total, elapsed_s = self._total, now - self._since
        self._kinds.clear()
        self._total = 0
        return f"{total} failure{'s' * (total > 1)} in {elapsed_s:.0f} s" if total else None
