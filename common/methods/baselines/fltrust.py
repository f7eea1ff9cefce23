"""FLTrust (Cao et al. 2021): the node trains on a few samples of its own, and trusts steps that go
the same way.

    g_0: the node's own step from the model z that the children received        g_k = v_k - z
    t_k = max(0, cos(g_k, g_0))        w_next = z + 1 / sum t  sum t_k (||g_0|| / ||g_k||) g_k

Buffers are the mean of the uploads with the weights t_k / sum t. If no step is trusted, the model
stays.
The node's training is in `root_training.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveFloat

from fedstrata import (
    Aggregated,
    ColumnRule,
    Columns,
    CombiningSettings,
    Gram,
    RoundFacts,
    RoundModels,
    Rule,
    RuleContext,
    SingleModelRule,
    Uploads,
)

Count = Annotated[int, Field(ge=1)]
Doubles = npt.NDArray[np.float64]


class FLTrust(CombiningSettings):
    """One model: the steps as long as the node's own, weighted by their cosine with it."""

    step_models = 2.0
    condition: ClassVar[str] = "samples at the node that resemble the devices'; any f"

    name: Literal["fltrust"] = "fltrust"  # the rule
    epochs: NonNegativeInt = 1  # of the node over its samples in each round; 0 is the uniform mean
    batch_size: Count = 32  # samples in each step of the node
    learning_rate: PositiveFloat = 0.05  # of the node's SGD

    def tolerates(self, uploads: int) -> int:
        """Return f: all of them, as the node's own step is honest."""
        return uploads

    @property
    def refiner(self) -> str | None:
        """The node's training, unless it has no epoch."""
        if self.epochs:
            return "fedstrata.common.methods.baselines.root_training:train"
        return None

    def build(self, context: RuleContext) -> Rule:
        return FLTrustRule(self, context)


class TrustedSteps(ColumnRule):
    """The model received, and a mixture of the steps; `mixed_K` and `weights_K` are set before."""

    mixed_K: Doubles | None = None
    weights_K: Doubles

    def weights(self, facts: RoundFacts) -> Doubles:
        if self.mixed_K is None:
            return facts.weights_K
        return self.weights_K

    def columns(self, block: Columns) -> Doubles | npt.NDArray[np.float32]:
        """Return the columns of the next model, [C]."""
        if self.mixed_K is None:
            return block.mean_C
        found: Doubles = block.model_C + self.mixed_K @ (block.uploads_KC - block.model_C).astype(
            np.float64
        )
        return found


class FLTrustRule(SingleModelRule):
    """FLTrust at a node."""

    def __init__(self, settings: FLTrust, context: RuleContext) -> None:
        self._steps = TrustedSteps()
        super().__init__(context, self._steps, weights="uniform")
        self._refiner = context.refiner_of(settings)

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Train on the node's samples, then mix the steps of the uploads."""
        if self._refiner is None:
            return super().aggregate(r, uploads)
        layout = self.context.layout
        size = layout.parameters
        root = self.current.copy()
        rows = [uploads.rows_K[k] for k in uploads.answered]
        uniform_K = uploads.statistics.weights_K("uniform")
        facts = self._refiner.refine(RoundModels(r, layout, root, self.current, rows, uniform_K))
        columns = [layout.floats(row)[:size] for row in (root, *rows)]
        origin = layout.floats(self.current)[:size]
        inner_LL = Gram.of(columns, origin, release=uploads.release).offsets_KK
        trust_K, mixed_K = trusted(inner_LL)
        if not trust_K.any():
            reason = "no step is trusted: the model is kept"
            kept = self._keep(uploads.senders, uploads.statistics, reason)
            return replace(kept, facts={**kept.facts, **facts})
        self._steps.mixed_K = mixed_K
        self._steps.weights_K = trust_K / trust_K.sum()
        done = super().aggregate(r, uploads)
        by_child = dict(zip(uploads.senders, self._steps.weights_K.tolist(), strict=True))
        return replace(done, facts=_joined(done.facts, facts, by_child))


def trusted(inner_LL: Doubles) -> tuple[Doubles, Doubles]:
    """Return t_k and the factors of the steps, float64 [K], by the inner products of g_0, g_1, ...,
    g_K.
    """
    lengths_L = np.sqrt(np.diagonal(inner_LL))
    both_K = lengths_L[0] * lengths_L[1:]
    trust_K = np.maximum(0.0, inner_LL[0, 1:]) / np.where(both_K > 0, both_K, 1.0)
    if not trust_K.any():
        return trust_K, trust_K
    shorter_K = lengths_L[0] / np.where(lengths_L[1:] > 0, lengths_L[1:], 1.0)
    return trust_K, trust_K * shorter_K / trust_K.sum()


def _joined(
    facts: Mapping[str, object], refined: Mapping[str, Any], weights: Mapping[str, float]
) -> dict[str, object]:
    return {**facts, **refined, "weights": dict(weights)}
