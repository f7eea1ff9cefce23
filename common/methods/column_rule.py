"""What the author of a rule of one model writes: a mean of the uploads, or a function of their
columns.

docs/own-methods.md has examples. The rest is the work of `single_model.py`: distances for Tempo,
checkpoints, resuming, buffers (batch statistics are the weighted mean), and memory, which is used
block by block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedstrata.common.lazy import np, npt
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.rule import RuleContext
from fedstrata.common.methods.settings import Weights
from fedstrata.common.methods.statistics import Doubles, Gram, Statistics
from fedstrata.common.settings import own
from fedstrata.common.settings.training import TrainingSettings


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """What is known of a round's K uploads, in their order.

    `children`: the children that sent them. `samples_K`, int64 [K], `losses_K` and `steps_K`,
    float64 [K]: what they reported, NaN for an unknown loss. `weights_K`, float64 [K]: by `weights`
    of the experiment. `products`: the inner products of the uploads' steps v_k - z from the model z
    that they received, if the rule `compares`; else None. `all_children`: how many the node has,
    whether they took part or not. `training`: that of the devices below, which began at
    `learning_rate` and did `local_rounds` in this round of the node. `start_losses_K`, float64 [K]:
    training losses of the model that the children received, where the rule `reads_losses`.
    """

    children: Sequence[str]
    samples_K: npt.NDArray[np.int64]
    losses_K: Doubles
    steps_K: Doubles
    weights_K: Doubles
    products: Gram | None
    all_children: int
    training: TrainingSettings
    learning_rate: float
    local_rounds: int
    start_losses_K: Doubles

    @classmethod
    def of(
        cls,
        context: RuleContext,
        r: int,
        children: Sequence[str],
        statistics: Statistics,
        *,
        weights: Weights,
        products: Gram | None,
    ) -> RoundFacts:
        """Return what is known of round r at the node of a context."""
        return cls(
            children,
            statistics.samples_K,
            statistics.losses_K,
            statistics.steps_K,
            statistics.weights_K(weights),
            products,
            context.children,
            context.training,
            context.learning_rate(r * context.rounds_below),
            context.rounds_below,
            statistics.start_losses_K,
        )

    def by_child(self, values_K: Doubles) -> dict[str, float]:
        """Return values by child, as a plan publishes them."""
        return dict(zip(self.children, values_K.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of a round's models: trainable ones, C of D.

    `uploads_KC`, float32 [K, C]: of the uploads. `model_C`, float32 [C]: of the model that the
    children received; it must not be written. `mean_C`, float32 [C]: of the uploads' mean by
    `weights_K`, float64 [K], whose sum is 1. `state`: of the rule's vectors, float32 [C] each,
    which are kept: write into them. `extras`: of the vectors behind the uploads, float32 [K, C]
    each.
    """

    uploads_KC: Floats
    model_C: Floats
    mean_C: Floats
    weights_K: Doubles
    state: Mapping[str, Floats]
    extras: Mapping[str, Floats] = field(default_factory=dict)


class MeanRule(own.Kept):
    """A rule whose next model is the mean of the uploads. `compares`: it needs the products of
    their steps.
    """

    compares: bool = False

    def begin(self, facts: RoundFacts) -> Mapping[str, object] | None:
        """Prepare a round; return facts for its published plan, of what JSON can hold."""

    def weights(self, facts: RoundFacts) -> Doubles:
        """Return the weights of the mean, which are those of the buffers and of the loss too,
        float64 [K].
        """
        return facts.weights_K


class ColumnRule(MeanRule):
    """A rule that computes the next model column by column. Its keywords are the experiment's keys.

    `vectors` names vectors of state, float32 [D] each, zeros at first, which persist as `numbers`
    do. Those that the experiment's `extras_down` names are vectors of state too, and devices
    receive them with each model. `averages`: the mean of the last two models is evaluated beside
    the last one.
    """

    vectors: Sequence[str] = ()
    averages: bool = False

    def first(self, vector: str) -> float:
        """Return the value with which a vector of state begins in all its columns."""
        return 0.0

    def columns(self, block: Columns) -> Doubles | Floats:
        """Return columns of the next model, [C]. Several threads may call it: write only into
        `block.state`.
        """
        raise NotImplementedError
