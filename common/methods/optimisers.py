"""Server optimisers: the next model from the dispatched one, z, and the mean of the uploads.

    delta = mean - z                                       over trainable columns

    FedAvgM (Hsu, Qi, Brown 2019)        m = beta m + delta                  next = z + eta m
    Reddi et al. 2021, Algorithm 2       m = beta_1 m + (1 - beta_1) delta   next = z + eta m /
        (sqrt(v) + tau) FedAdagrad                       v = v + delta^2
        FedAdam                          v = beta_2 v + (1 - beta_2) delta^2
        FedYogi                          v = v - (1 - beta_2) delta^2 sign(v - delta^2)
    FedExP (Jhunjhunwala et al. 2023)    next = z + eta delta
        eta = max(1, sum of p_k ||v_k - z||^2 / (2 (||delta||^2 + S epsilon)))

S uploads; their authors' code has it, their paper has epsilon alone. FedExP is judged by the mean
of its last two models, as both ask. v begins at tau^2, m at zero. Buffers and counters are those of
the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import RuleSettings, Weights
from fedstrata.common.methods.single_model import OneModel, SteppedRule, single_model
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Positive


class StepSettings(RuleSettings):
    """The settings of a rule that is a step of the server from the mean, or from another rule's
    result.
    """

    remembers: ClassVar[bool] = True  # the moments

    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K

    @property
    def of_mean(self) -> Weights | None:
        """The weights of the mean from which the server steps."""
        return self.weights

    def step(self) -> ServerStep:
        """Return a node's step."""
        raise NotImplementedError

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, self.step(), weights=self.weights)


class FedAvgM(StepSettings):
    """One model: the server moves it by the mean of the steps, with momentum."""

    step_models = 3.0

    name: Literal["fedavgm"] = "fedavgm"  # the rule
    learning_rate: Positive = 1.0  # of the server (eta); 1 without momentum is FedAvg
    # share of the last move that is kept (beta)
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    def step(self) -> ServerStep:
        return Momentum(**self.keywords)


class AdaptiveSettings(StepSettings):
    """One model: the server moves each weight at its own rate."""

    step_models = 4.0

    name: str  # the rule
    # of the server (eta): none suits all, the paper tunes it from 0.003 to 1
    learning_rate: Positive | None = None
    beta_1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # decay of the first moments
    tau: Positive = 0.001  # added to the root of the second moments: small values adapt more

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that there is a learning rate. Raises InvalidExperiment."""
        if self.learning_rate is None:
            problem = f"{self.name} needs the server's learning rate; the paper tunes it"
            remedy = "Try 0.01, 0.1 and 1."
            raise InvalidExperiment(f"{key}.learning_rate", "not set", problem, remedy)


class FedAdagrad(AdaptiveSettings):
    """One model: the server moves it by Adagrad."""

    name: Literal["fedadagrad"] = "fedadagrad"  # the rule
    beta_1: Annotated[float, Field(ge=0, lt=1)] = 0.0  # decay of the first moments

    def step(self) -> ServerStep:
        return Adaptive(**self.keywords)


class FedAdam(AdaptiveSettings):
    """One model: the server moves it by Adam, without bias correction, or by Yogi, whose second
    moments fall slowly.
    """

    name: Literal["fedadam", "fedyogi"]  # the rule
    beta_2: Annotated[float, Field(ge=0, lt=1)] = 0.99  # decay of the second moments

    def step(self) -> ServerStep:
        if self.name == "fedadam":
            return AdamMoments(**self.keywords)
        return YogiMoments(**self.keywords)


class FedExP(RuleSettings):
    """One model: the server goes farther than the mean where the steps of the children differ."""

    step_models = 2.0

    name: Literal["fedexp"] = "fedexp"  # the rule
    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K
    # times the children that took part, added to the squared length of the mean step
    epsilon: Positive = 0.001

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, Extrapolation(**self.keywords), weights=self.weights)


def stepped(rule: Rule, settings: RuleSettings, context: RuleContext) -> Rule:
    """Return a rule of one model behind whose result the server takes a step."""
    # as their settings are checked
    assert isinstance(rule, OneModel) and isinstance(settings, StepSettings)
    return SteppedRule(rule, settings.step(), context)


class ServerStep(ColumnRule):
    """A step of the server from z, by the mean of the uploads."""

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Return the weights of the mean."""
        return {"weights": facts.by_child(facts.weights_K)}


class Momentum(ServerStep):
    """FedAvgM."""

    vectors = ("momentum",)

    def __init__(self, *, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum

    def columns(self, block: Columns) -> Doubles:
        """Return z + eta m."""
        z = block.model_C.astype(np.float64)
        state_C = block.state["momentum"]
        moved: Doubles = self._momentum * state_C.astype(np.float64) + (block.mean_C - z)
        state_C[:] = moved
        return z + self._learning_rate * moved


class Adaptive(ServerStep):
    """FedAdagrad, FedAdam or FedYogi: `second` returns the next v from v and delta^2."""

    vectors = ("first_moments", "second_moments")

    def __init__(self, *, learning_rate: float, beta_1: float, tau: float) -> None:
        self._learning_rate = learning_rate
        self._beta_1 = beta_1
        self._tau = tau

    def first(self, vector: str) -> float:
        """Return tau^2 for v."""
        if vector == "second_moments":
            return self._tau**2
        return 0.0

    def columns(self, block: Columns) -> Doubles:
        """Return z + eta m / (sqrt(v) + tau)."""
        z = block.model_C.astype(np.float64)
        delta = block.mean_C - z
        first_C = block.state["first_moments"]
        second_C = block.state["second_moments"]
        m: Doubles = self._beta_1 * first_C.astype(np.float64) + (1 - self._beta_1) * delta
        v = self.second(second_C.astype(np.float64), delta * delta)
        first_C[:] = m
        second_C[:] = v
        return z + self._learning_rate * m / (np.sqrt(v) + self._tau)

    def second(self, v: Doubles, squares: Doubles) -> Doubles:
        """Return the next v of FedAdagrad."""
        return v + squares


class AdamMoments(Adaptive):
    """FedAdam."""

    def __init__(self, *, beta_2: float, **keys: float) -> None:
        super().__init__(**keys)
        self._beta_2 = beta_2

    def second(self, v: Doubles, squares: Doubles) -> Doubles:
        return self._beta_2 * v + (1 - self._beta_2) * squares


class YogiMoments(AdamMoments):
    """FedYogi."""

    def second(self, v: Doubles, squares: Doubles) -> Doubles:
        found: Doubles = v - (1 - self._beta_2) * squares * np.sign(v - squares)
        return found


class Extrapolation(ServerStep):
    """FedExP."""

    compares = averages = True

    def __init__(self, *, epsilon: float) -> None:
        self._epsilon = epsilon
        self._eta = 1.0

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Compute eta."""
        assert facts.products is not None
        weights_K = facts.weights_K
        offsets_KK = facts.products.offsets_KK
        squares = float(weights_K @ np.diagonal(offsets_KK))
        together = float(weights_K @ offsets_KK @ weights_K)
        self._eta = max(1.0, squares / (2 * (together + len(weights_K) * self._epsilon)))
        return {**super().begin(facts), "server_learning_rate": self._eta}

    def columns(self, block: Columns) -> Doubles:
        """Return z + eta delta."""
        z = block.model_C.astype(np.float64)
        return z + self._eta * (block.mean_C - z)
