"""FedAvg (McMahan et al. 2017; eqs. 4 and 6 of the Tempo paper): one mean, weighted by data or uniform."""

from __future__ import annotations

from common.aggregation.mixing import Mixture
from common.aggregation.statistics import Statistics
from common.experiment.aggregation import Weights


def plan(statistics: Statistics, *, weights: Weights) -> Mixture:
    """Return W [1, K]: p_k = n_k / sum of n, or 1/K."""
    count = len(statistics.samples_K)
    return Mixture.of(statistics.shares_K if weights == "data" else [1 / count] * count)
