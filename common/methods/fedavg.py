"""FedAvg (McMahan et al. 2017; eqs. 4 and 6 of the Tempo paper): one mean, weighted by data or uniform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from common.experiment.aggregation import FedAvg
from common.experiment.rules import Weights
from common.methods.mixing import Mixture
from common.methods.statistics import Gram, Statistics

UNIFORM: Final = FedAvg(weights="uniform")


class Weighted(Protocol):
    """Settings with weights."""

    weights: Weights


class ShareMean:
    """The mean by shares of the samples, or uniform; without state."""

    compares = False

    def __init__(self, settings: Weighted) -> None:
        self._weights = settings.weights

    def of(
        self, r: int, statistics: Statistics, products: Gram | None, children: Sequence[str]
    ) -> tuple[Mixture, Mapping[str, object]]:
        """Return the weights."""
        return plan(statistics, weights=self._weights), {}

    def save(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Do nothing."""


def uniform(_: object) -> ShareMean:
    """Return the uniform mean, whatever the settings of the rule."""
    return ShareMean(UNIFORM)


def plan(statistics: Statistics, *, weights: Weights) -> Mixture:
    """Return W [1, K]: p_k = n_k / sum of n, or 1/K."""
    count = len(statistics.samples_K)
    return Mixture.of(statistics.shares_K if weights == "data" else [1 / count] * count)
