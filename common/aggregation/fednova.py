"""FedNova (Wang et al., NeurIPS 2020): steps are divided by their number before they are averaged.

    next = z + tau_eff sum of p_k (v_k - z) / a_k        tau_eff = sum of p_k a_k
    a_k = tau_k                                          SGD (a_k is the L1 norm of the paper's a_k)
    a_k = (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho)      with momentum rho, fresh in each local round

z: the dispatched model; tau_k: the child's SGD steps, of an institution those on its critical path, without rho. So a
child that took more steps than others, because it has more samples or epochs, does not pull the model its way. Over
trainable columns; buffers are the mean by p_k, as in the authors' code (JYWa/FedNova).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from common.aggregation.columns import ColumnMean, Columns
from common.aggregation.mixing import Mixture
from common.aggregation.statistics import Doubles, Gram, Statistics
from common.aggregation.uploads import RuleContext
from common.experiment.aggregation import FedNova


class NormalisedSteps(ColumnMean):
    """The plan of a round."""

    reads_model = True

    def __init__(self, settings: FedNova, context: RuleContext) -> None:
        super().__init__(settings)
        self._momentum = context.training.momentum if context.training is not None else 0.0
        self._factors_K: Doubles = np.ones(0)

    def of(
        self, statistics: Statistics, products: Gram | None, children: Sequence[str]
    ) -> tuple[Mixture, Mapping[str, object]]:
        """Return the weights p_k; facts: each child's a_k, and tau_eff."""
        mixture, _ = super().of(statistics, products, children)
        shares_K = mixture.dense(len(children))
        norms_K = norms(statistics.steps_K, self._momentum)
        effective = float(shares_K @ norms_K)
        self._factors_K = effective * shares_K / norms_K
        return mixture, {"steps": dict(zip(children, norms_K.tolist(), strict=True)), "effective_steps": effective}

    def columns(self, block: Columns) -> Doubles:
        """Return z + sum of factors (v_k - z)."""
        z = block.model_C.astype(np.float64)
        found: Doubles = z + self._factors_K @ (block.uploads_KC - z)
        return found


def norms(steps_K: Doubles, momentum: float) -> Doubles:
    """Return a_k from tau_k, at least one step each."""
    steps_K = np.maximum(steps_K, 1.0)
    if not momentum:
        return steps_K
    found: Doubles = (steps_K - momentum * (1 - momentum**steps_K) / (1 - momentum)) / (1 - momentum)
    return found
