"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1): a step towards the mean of the uploads, and
control variates.

    next = x + eta (mean of y_k - x)                          over trainable columns, of the S
    children with an upload
    c    = c + (1 / N) sum of (c_k+ - c_k)                    N: all children

The children receive x and c, and return y_k and c_k+ - c_k
(`device/training/objectives/scaffold.py`). If all take part c is the mean of the c_k. Buffers are
the uniform mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import RuleSettings
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Positive


class Scaffold(RuleSettings):
    """One model: the mean of the uploads, which devices correct by control variates."""

    objective = "scaffold"
    sends: ClassVar[Sequence[str]] = ("control",)  # the control variate of all children
    returns: ClassVar[Sequence[str]] = ("control_change",)  # of the child's own
    remembers: ClassVar[bool] = True  # the control variate
    step_models = 5.0

    name: Literal["scaffold"] = "scaffold"  # the rule
    learning_rate: Positive = 1.0  # of the server (eta): 1 takes the mean of the uploads

    @property
    def acts_from(self) -> int:
        """The first round with control variates, unless the server's step is another one than the
        mean.
        """
        if self.learning_rate == 1.0:
            return 2
        return 1

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, ControlledMean(**self.keywords))


class ControlledMean(ColumnRule):
    """The step towards the mean, and c, which the children receive with the model."""

    vectors = ("control",)

    def __init__(self, *, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._children = 0

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Note the number of children."""
        self._children = facts.all_children
        return {"weights": facts.by_child(facts.weights_K)}

    def columns(self, block: Columns) -> Doubles:
        """Return x + eta (mean - x), and add the mean change to c."""
        changes_KC = block.extras["control_change"]
        block.state["control"][:] += changes_KC.sum(axis=0, dtype=np.float64) / self._children
        x = block.model_C.astype(np.float64)
        return x + self._learning_rate * (block.mean_C - x)
