"""FedDyn (Acar et al. 2021, Algorithm 1): the mean of the uploads, moved by the sum of all steps so
far.

    h    = h - alpha (1 / N) sum of (v_k - z)                 N: all children
    next = mean of v_k - h / alpha                            over trainable columns

alpha is the objective's (`device/training/objectives/feddyn.py`). The state is u = h / alpha, in
which alpha cancels. With alpha = 0 it is FedAvg, uniform, by definition. Buffers are the uniform
mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import RuleSettings
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.training import DynamicRegulariser


class FedDyn(RuleSettings):
    """One model: the mean of the uploads, moved by the sum of all steps so far."""

    objective = "feddyn"
    remembers: ClassVar[bool] = True  # the sum
    step_models = 3.0

    name: Literal["feddyn"] = "feddyn"  # the rule

    def build(self, context: RuleContext) -> Rule:
        objective = context.training.objective
        moves = isinstance(objective, DynamicRegulariser) and objective.alpha > 0
        return single_model(self, context, DynamicMean(moves=moves))


class DynamicMean(ColumnRule):
    """The mean - u; without `moves`, the objective's alpha being 0, the mean."""

    vectors = ("offset",)

    def __init__(self, *, moves: bool) -> None:
        self._moves = moves
        self._share = 0.0

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Note the share of the children that have an upload."""
        self._share = len(facts.children) / facts.all_children
        return {"weights": facts.by_child(facts.weights_K)}

    def columns(self, block: Columns) -> Doubles:
        """Return the mean - u."""
        z = block.model_C.astype(np.float64)
        delta = block.mean_C - z
        mean: Doubles = z + delta
        if not self._moves:
            return mean
        offset: Doubles = block.state["offset"] - self._share * delta
        block.state["offset"][:] = offset
        return mean - offset
