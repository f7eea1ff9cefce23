"""A rate from counts that are told now and then."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1
from typing import Final

SMOOTHING_S: Final = 3.0
SILENCE_S: Final = 2.5  # a node at work says its counts every two seconds


@dataclass(slots=True)
class RateMeter:
    """Bytes of one direction of a link: `total` over all sessions of the node that counts, and their rate.

    The rate is the exponentially weighted mean of what passed, weights falling by e in `SMOOTHING_S`. Where nothing is
    told for longer than a node at work is silent, nothing passes.
    """

    total: int = 0
    _count: int | None = None
    _rate: float = 0.0
    _at: float = 0.0

    @property
    def told(self) -> bool:
        """Return whether there was a count."""
        return self._count is not None

    def take(self, count: int, now: float) -> None:
        """Take the count, bytes, as of `now`, seconds; one that falls has begun anew, from zero."""
        if self._count is None:
            self.total += count  # all that passed before we looked says nothing of the rate
        else:
            passed = count - self._count if count >= self._count else count
            x = max(0.0, now - self._at) / SMOOTHING_S
            self._rate = self._rate * exp(-x) + passed / SMOOTHING_S * (-expm1(-x) / x if x else 1.0)
            self.total += passed
        self._count, self._at = count, now

    def turn(self) -> None:
        """Begin a new session of the node that counts: its counts start from zero."""
        if self._count is not None:
            self._count = 0

    def rate(self, now: float) -> float:
        """Return bytes per second."""
        return self._rate * exp(-max(0.0, now - self._at - SILENCE_S) / SMOOTHING_S)
