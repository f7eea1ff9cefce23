"""The table `secure` of a tier: parents learn the sum of their children's models alone.

A value of an update, within `clip`, becomes one of 2^bits integers, and the sum of all is exact.
What `common/secure` does with them is on the page of secure sums.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Final

from pydantic import Field

from fedstrata.common.settings.tables import Count, Positive, SettingsTable

LEAST: Final = 2  # children of a sum: that of one is its model
WORD_BITS: Final = (32, 64)


class SecureSettings(SettingsTable):
    """Secure aggregation of a tier's uploads."""

    # Share of each child's neighbours, itself among them, whose answers open a sum; the others may
    # be lost.
    threshold: Annotated[float, Field(gt=0.5, le=1)] = 0.7
    bits: Annotated[int, Field(ge=4, le=32)] = 24  # of a value of an update
    clip: Positive = 1.0  # the largest value of an update; a larger one becomes this
    # Children with whom each child of a larger round exchanges keys and shares.
    neighbours: Count = 50

    def shares_needed(self, neighbours: int) -> int:
        """Return how many of a child's neighbours, itself among them, open its part of a sum."""
        return max(LEAST, ceil(self.threshold * neighbours - 1e-9))

    def word_bits(self, children: int) -> int:
        """Return the bits of a word that holds the sum of so many children's values."""
        return WORD_BITS[self.bits + (children - 1).bit_length() > WORD_BITS[0]]
