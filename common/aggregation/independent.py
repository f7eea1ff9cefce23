"""The baseline of the multi-model rules: no mixing, each model continues from its own upload."""

from __future__ import annotations

from common.aggregation.mixing import Mixture, Mixtures


def plan(count: int) -> Mixtures:
    """Return the identity [K, K]."""
    return tuple(Mixture.copy(k) for k in range(count))
