"""Rate estimate from counts that are reported irregularly."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1
from typing import Final

SMOOTHING_S: Final = 3.0
SILENCE_S: Final = 2.5  # a working node reports its counts every two seconds


@dataclass(slots=True)
class RateMeter:
    """Bytes in one direction of a link: `total` over all sessions of the counting node, and their rate.

    The rate is an exponentially weighted mean with time constant `SMOOTHING_S`. It decays if no count is reported for
    longer than `SILENCE_S`.
    """

    total: int = 0
    _count: int | None = None
    _rate: float = 0.0
    _at: float = 0.0

    @property
    def known(self) -> bool:
        """Whether a count was reported."""
        return self._count is not None

    def take(self, count: int, now: float) -> None:
        """Record the count, bytes, at `now`, seconds. A count that falls has restarted from zero."""
        if self._count is None:
            self.total += count  # the time before the first count is unknown, so it does not enter the rate
        else:
            passed = count - self._count if count >= self._count else count
            x = max(0.0, now - self._at) / SMOOTHING_S
            self._rate = self._rate * exp(-x) + passed / SMOOTHING_S * (-expm1(-x) / x if x else 1.0)
            self.total += passed
        self._count, self._at = count, now

    def restart(self) -> None:
        """Begin a new session of the counting node: its counts start from zero."""
        if self._count is not None:
            self._count = 0

    def rate(self, now: float) -> float:
        """Return bytes per second."""
        return self._rate * exp(-max(0.0, now - self._at - SILENCE_S) / SMOOTHING_S)
