"""FedAvg (McMahan et al. 2017; eqs. 4 and 6 of the Tempo paper): one mean, weighted by data or
uniform.
"""

from __future__ import annotations

from typing import Literal

from fedstrata.common.methods.column_rule import MeanRule
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import RuleSettings, Weights
from fedstrata.common.methods.single_model import single_model


class FedAvg(RuleSettings):
    """One model: the mean of the uploads."""

    name: Literal["fedavg"] = "fedavg"  # the rule
    weights: Weights = "data"  # each upload's weight: its share of the samples, or 1/K

    @property
    def of_mean(self) -> Weights | None:
        """The weights of the mean."""
        return self.weights

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, MeanRule(), weights=self.weights)
