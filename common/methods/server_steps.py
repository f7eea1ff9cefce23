"""Server optimisers: the next model from the dispatched one, z, and the mean of the uploads.

    delta = mean - z                                       over trainable columns

    FedAvgM (Hsu, Qi, Brown 2019)        m = beta m + delta                  next = z + eta m
    Reddi et al. 2021, Algorithm 2       m = beta_1 m + (1 - beta_1) delta   next = z + eta m / (sqrt(v) + tau)
        FedAdagrad                       v = v + delta^2
        FedAdam                          v = beta_2 v + (1 - beta_2) delta^2
        FedYogi                          v = v - (1 - beta_2) delta^2 sign(v - delta^2)
    SCAFFOLD (Karimireddy et al. 2020)   next = z + eta delta
    FedExP (Jhunjhunwala et al. 2023)    next = z + eta delta
        eta = max(1, sum of p_k ||v_k - z||^2 / (2 (||delta||^2 + S epsilon)))

S uploads; their authors' code has it, their paper has epsilon alone. FedExP is judged by the mean of its last two
models, as both ask. v begins at tau^2, m at zero. Buffers and counters are those of the mean. FedDyn's step is in
`feddyn.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from common.experiment.aggregation import FedAdagrad, FedAdam, FedAvgM, FedDyn, FedExP, FedYogi, Scaffold
from common.lazy import np
from common.methods.blocks import cut, over
from common.methods.feddyn import DynamicStep
from common.methods.mixing import Floats
from common.methods.statistics import Doubles, Gram
from common.methods.uploads import RuleContext


class ServerStep(Protocol):
    """What follows the mean of a round."""

    compares: bool  # whether `begin` needs the products of the uploads' steps
    averages: bool  # whether the mean of the last two models is evaluated besides the last one

    def begin(self, products: Gram | None, weights_K: Doubles) -> Mapping[str, object]:
        """Prepare the step of a round, from the uploads' steps relative to z and their weights; return facts."""

    def apply(self, z: Doubles, delta: Doubles, columns: slice) -> Doubles:
        """Return columns of the next model, float64, and update the state in these columns."""

    def state(self) -> Mapping[str, Floats]:
        """Return the state, float32 [D] each, by name; written in place by `restore`."""


class Momentum:
    """FedAvgM."""

    compares = averages = False

    def __init__(self, settings: FedAvgM, context: RuleContext) -> None:
        self._settings = settings
        self._momentum = np.zeros(context.layout.parameters, np.float32)

    def begin(self, products: Gram | None, weights_K: Doubles) -> Mapping[str, object]:
        """Do nothing."""
        return {}

    def apply(self, z: Doubles, delta: Doubles, columns: slice) -> Doubles:
        """Return z + eta m."""
        moved: Doubles = self._settings.momentum * self._momentum[columns].astype(np.float64) + delta
        self._momentum[columns] = moved
        return z + self._settings.learning_rate * moved

    def state(self) -> Mapping[str, Floats]:
        """Return the momentum."""
        return {"momentum": self._momentum}


class Adaptive:
    """FedAdagrad, FedAdam or FedYogi: `second` returns the next v from v and delta^2."""

    compares = averages = False

    def __init__(
        self,
        settings: FedAdagrad | FedAdam | FedYogi,
        context: RuleContext,
        *,
        second: Callable[[Doubles, Doubles], Doubles],
    ) -> None:
        self._settings = settings
        self._second = second
        self._first_moments = np.zeros(context.layout.parameters, np.float32)
        self._second_moments = np.full(context.layout.parameters, settings.tau**2, np.float32)

    def begin(self, products: Gram | None, weights_K: Doubles) -> Mapping[str, object]:
        """Do nothing."""
        return {}

    def apply(self, z: Doubles, delta: Doubles, columns: slice) -> Doubles:
        """Return z + eta m / (sqrt(v) + tau)."""
        own = self._settings
        assert own.learning_rate is not None  # checked
        m: Doubles = own.beta_1 * self._first_moments[columns].astype(np.float64) + (1 - own.beta_1) * delta
        v = self._second(self._second_moments[columns].astype(np.float64), delta * delta)
        self._first_moments[columns], self._second_moments[columns] = m, v
        return z + own.learning_rate * m / (np.sqrt(v) + own.tau)

    def state(self) -> Mapping[str, Floats]:
        """Return both moments."""
        return {"first_moments": self._first_moments, "second_moments": self._second_moments}


class Extrapolation:
    """FedExP."""

    compares = averages = True

    def __init__(self, settings: FedExP, context: RuleContext) -> None:
        self._epsilon = settings.epsilon
        self._eta = 1.0

    def begin(self, products: Gram | None, weights_K: Doubles) -> Mapping[str, object]:
        """Compute eta."""
        assert products is not None
        squares = float(weights_K @ np.diagonal(products.offsets_KK))
        together = float(weights_K @ products.offsets_KK @ weights_K)
        self._eta = max(1.0, squares / (2 * (together + len(weights_K) * self._epsilon)))
        return {"server_learning_rate": self._eta}

    def apply(self, z: Doubles, delta: Doubles, columns: slice) -> Doubles:
        """Return z + eta delta."""
        return z + self._eta * delta

    def state(self) -> Mapping[str, Floats]:
        """Return nothing: eta is each round's own."""
        return {}


class Relaxation:
    """SCAFFOLD's: a share of the way to the mean, or beyond it."""

    compares = averages = False

    def __init__(self, settings: Scaffold, context: RuleContext) -> None:
        self._eta = settings.learning_rate

    def begin(self, products: Gram | None, weights_K: Doubles) -> Mapping[str, object]:
        """Do nothing."""
        return {}

    def apply(self, z: Doubles, delta: Doubles, columns: slice) -> Doubles:
        """Return z + eta delta."""
        return z + self._eta * delta

    def state(self) -> Mapping[str, Floats]:
        """Return nothing."""
        return {}


def adagrad(settings: FedAdagrad, context: RuleContext) -> ServerStep:
    """Return FedAdagrad's step."""
    return Adaptive(settings, context, second=lambda v, squares: v + squares)


def adam(settings: FedAdam, context: RuleContext) -> ServerStep:
    """Return FedAdam's step."""
    beta = settings.beta_2
    return Adaptive(settings, context, second=lambda v, squares: beta * v + (1 - beta) * squares)


def yogi(settings: FedYogi, context: RuleContext) -> ServerStep:
    """Return FedYogi's step."""
    rate = 1 - settings.beta_2
    return Adaptive(settings, context, second=lambda v, squares: v - rate * squares * np.sign(v - squares))


STEPS: Final[Mapping[type, Callable[[Any, RuleContext], ServerStep]]] = {
    FedAvgM: Momentum,
    FedAdagrad: adagrad,
    FedAdam: adam,
    FedYogi: yogi,
    FedExP: Extrapolation,
    Scaffold: Relaxation,
    FedDyn: DynamicStep,
}


def take(step: ServerStep, base_D: Floats, mean_D: Floats) -> None:
    """Replace the mean, float32 [D], by the next model, block by block; `base_D` is the dispatched model."""

    def block(columns: slice) -> None:
        z = base_D[columns].astype(np.float64)
        mean_D[columns] = step.apply(z, mean_D[columns].astype(np.float64) - z, columns)

    over(list(cut(0, len(base_D))), block)


def save(state: Mapping[str, Floats], folder: Path) -> None:
    """Write vectors of state as files."""
    for name, values in state.items():
        (folder / name).write_bytes(values.data)


def restore(state: Mapping[str, Floats], folder: Path) -> None:
    """Read what `save` wrote."""
    for name, values in state.items():
        values[:] = np.fromfile(folder / name, np.float32)
