"""FedNova (Wang et al., NeurIPS 2020): steps are divided by their number before they are averaged.

    next = z + tau_eff sum of p_k (v_k - z) / a_k        tau_eff = sum of p_k a_k

z: the dispatched model. a_k: the sum of the weights that child k's gradients got in v_k - z, the L1
norm of the paper's vector a_k: for tau_k steps of plain SGD it is tau_k, see `gradient_weights`. An
institution's steps are those on its critical path, spread evenly over the local rounds of its
devices, each of which begins with a fresh momentum. So a child that took more steps than others,
because it has more samples or epochs, does not pull the model its way. Over trainable columns;
buffers are the mean by p_k, as in the authors' code (JYWa/FedNova).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import RuleSettings, Weights
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.data import ModelSettings
from fedstrata.common.settings.training import TrainingSettings


class FedNova(RuleSettings):
    """One model: the mean of the steps, each divided by the child's number of SGD steps."""

    step_models = 2.0

    name: Literal["fednova"] = "fednova"  # the rule
    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K

    def check_devices(self, key: str, training: TrainingSettings, model: ModelSettings) -> None:
        """Check that the gradients' weights are known. Raises InvalidExperiment."""
        if not training.by_sgd:
            name = training.optimizer.name
            problem = "fednova weighs the gradients of SGD"
            raise InvalidExperiment("training.optimizer.name", name, problem, "Use sgd.")
        if training.clip_norm is not None and training.objective.proximal:
            problem = "fednova cannot weigh gradients that are clipped together with fedprox's term"
            raise InvalidExperiment("training.clip_norm", training.clip_norm, problem, "Omit it.")

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, NormalisedSteps(), weights=self.weights)


class NormalisedSteps(ColumnRule):
    """The mean of the steps, each divided by its a_k."""

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Return each child's a_k, and tau_eff."""
        shares_K = facts.weights_K
        rounds = facts.local_rounds
        steps_K = facts.steps_K / rounds
        norms_K = rounds * gradient_weights(steps_K, facts.training, facts.learning_rate)
        effective = float(shares_K @ norms_K)
        self._factors_K = effective * shares_K / norms_K
        return {"steps": facts.by_child(norms_K), "effective_steps": effective}

    def columns(self, block: Columns) -> Doubles:
        """Return z + sum of factors (v_k - z)."""
        z = block.model_C.astype(np.float64)
        found: Doubles = z + self._factors_K @ (block.uploads_KC - z)
        return found


def gradient_weights(steps_K: Doubles, training: TrainingSettings, learning_rate: float) -> Doubles:
    """Return the sums a_k of the weights of the gradients in tau_k steps of SGD, at least one step
    each.

    Of a linear loss, whose gradient is g, steps of `device.training.sgd.step` move the parameters
    by -eta s g. With momentum m and c = eta (weight_decay + mu), mu being FedProx's, each step is

        x = 1 - c s        b = m b + x        s = s + (x + m b with Nesterov momentum, else b)
        s = b = 0 at first

    A fraction of a step counts as this share of the next one.
    """
    steps_K = np.maximum(steps_K, 1.0)
    m = training.momentum
    c = learning_rate * (training.weight_decay + training.objective.proximal)
    if not m and not c:
        return steps_K
    ahead = m if training.nesterov else 0.0
    own = 1 + ahead  # the share of x in a step
    step = np.array([[1 - own * c, m * (ahead or 1), own], [-c, m, 1], [0, 0, 1]])  # of (s, b, 1)
    low_K = np.floor(steps_K)
    high_K = np.ceil(steps_K)
    sums = {
        count: float(np.linalg.matrix_power(step, int(count))[0, 2]) for count in {*low_K, *high_K}
    }
    lows_K = np.array([sums[count] for count in low_K])
    highs_K = np.array([sums[count] for count in high_K])
    found: Doubles = lows_K + (steps_K - low_K) * (highs_K - lows_K)
    return found
