"""FedAvg (McMahan et al. 2017; eqs. 4 and 6 of the Tempo paper): one mean, by data or uniform."""

from __future__ import annotations

from typing import Literal

import numpy as np

from common.aggregation.mixing import Mixture
from common.aggregation.statistics import Statistics


def plan(statistics: Statistics, *, weights: Literal["data", "uniform"]) -> Mixture:
    """Return W [1, K]: p_k = n_k / sum of n, or 1/K."""
    count = len(statistics.samples_K)
    shares_K = statistics.shares_K if weights == "data" else np.full(count, 1 / count)
    return Mixture.of([float(share) for share in shares_K])
