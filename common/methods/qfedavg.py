"""q-FedAvg (Li et al., ICLR 2020, algorithm 2): devices with higher losses weigh more, for a fairer
model.

    Delta_k = F_k^q L (z - v_k)    h_k = q F_k^(q-1) L^2 ||z - v_k||^2 + L F_k^q    next = z - sum
    Delta_k / sum h_k

z: the dispatched model; F_k: the training loss of device k at z, which it computes before it
trains; L = 1 / eta, eta the devices' learning rate in this round. With q = 0 the next model is the
uniform mean. A loss of 0 counts as 1e-10, as in the authors' code (litian96/fair_flearn). Over
trainable columns; buffers are the uniform mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import RuleSettings
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles

LOSS_LEAST: Final = 1e-10


class QFedAvg(RuleSettings):
    """One model: steps weighted by the q-th power of the devices' losses at the model that they
    received.
    """

    step_models = 2.0
    reads_losses = True

    name: Literal["qfedavg"] = "qfedavg"  # the rule
    # 0 is the uniform mean; the paper has 0.001 to 5, fairer with more
    q: Annotated[float, Field(ge=0)] = 1.0

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, WeightedByLoss(q=self.q))


class WeightedByLoss(ColumnRule):
    """The dispatched model, and a share of each device's step."""

    compares = True

    def __init__(self, *, q: float) -> None:
        self._q = q

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Return each device's share of its step, and its loss."""
        assert facts.products is not None
        q = self._q
        lipschitz = 1 / facts.learning_rate
        losses_K = np.maximum(facts.start_losses_K, LOSS_LEAST)
        squares_K = np.diagonal(facts.products.offsets_KK)
        h_K = q * losses_K ** (q - 1) * lipschitz**2 * squares_K + lipschitz * losses_K**q
        self._shares_K: Doubles = lipschitz * losses_K**q / h_K.sum()
        return {
            "shares": facts.by_child(self._shares_K),
            "start_losses": facts.by_child(facts.start_losses_K),
        }

    def columns(self, block: Columns) -> Doubles:
        """Return z + sum of shares (v_k - z)."""
        z = block.model_C.astype(np.float64)
        found: Doubles = z + self._shares_K @ (block.uploads_KC - z)
        return found
