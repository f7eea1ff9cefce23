"""FedDyn (Acar et al. 2021, Algorithm 1): the mean of the uploads, moved by the sum of all steps so far.

    h    = h - alpha (1 / N) sum of (v_k - z)                 N: all children
    next = mean of v_k - h / alpha                            over trainable columns

alpha is the objective's (`device/training/objectives/feddyn.py`). The state is u = h / alpha, in which alpha cancels.
With alpha = 0 it is FedAvg, uniform, by definition. Buffers are the uniform mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.experiment.aggregation import FedDyn
from common.experiment.objectives import DynamicRegulariser
from common.lazy import np
from common.methods.mixing import Floats
from common.methods.statistics import Doubles, Gram
from common.methods.uploads import RuleContext


class DynamicStep:
    """What follows the mean of a round."""

    compares = averages = False

    def __init__(self, settings: FedDyn, context: RuleContext) -> None:
        objective = context.training.objective
        self._moves = isinstance(objective, DynamicRegulariser) and objective.alpha > 0
        self._children = context.children
        self._taking_part = 0
        self._offset = np.zeros(context.layout.parameters, np.float32)

    def begin(self, products: Gram | None, weights_K: Doubles) -> Mapping[str, object]:
        """Note how many uploads there are."""
        self._taking_part = len(weights_K)
        return {}

    def apply(self, z: Doubles, delta: Doubles, columns: slice) -> Doubles:
        """Return the mean - u, z + delta being the mean."""
        mean: Doubles = z + delta
        if not self._moves:
            return mean
        offset: Doubles = self._offset[columns] - self._taking_part / self._children * delta
        self._offset[columns] = offset
        return mean - offset

    def state(self) -> Mapping[str, Floats]:
        """Return u."""
        return {"offset": self._offset}
