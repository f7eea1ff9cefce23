"""FedDF, FedBE and FedLAW: the mean of the uploads, refined with samples at the node.

    FedDF  (Lin et al. 2020)       a student that begins as the mean learns what the ensemble of the
    uploads predicts FedBE  (Chen & Chao 2021)      as well, with more teachers: models sampled
    around the uploads
    FedLAW (Li et al. 2023)        w = gamma sum of lambda_k v_k, gamma and lambda learned

The computation is in `common/learning/` (`distillation.py`, `learned_weights.py`). Buffers and
counters are those of the mean; FedLAW's are mixed by lambda, without gamma: a variance must not be
scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat

from fedstrata import (
    Aggregated,
    CombiningSettings,
    MeanRule,
    RoundModels,
    Rule,
    RuleContext,
    SingleModelRule,
    Uploads,
)

Weights = Literal["data", "uniform"]
Count = Annotated[int, Field(ge=1)]


class FedDF(CombiningSettings):
    """One model: the mean of the uploads, distilled from their ensemble on the node's samples."""

    step_models = 1.0

    name: Literal["feddf"] = "feddf"  # the rule
    # of the mean from which the student starts: shares of the samples, or 1/K
    weights: Weights = "data"
    steps: NonNegativeInt = 500  # of Adam at most; 0 is FedAvg
    patience: Count = 100  # steps without a smaller divergence, after which it stops
    batch_size: Count = 128  # samples in each step
    learning_rate: PositiveFloat = 0.001  # of Adam; a cosine lowers it to 0 over `steps`
    clip_norm: PositiveFloat = 5.0  # longest gradient

    @property
    def refiner(self) -> str | None:
        """Its computation, unless there is no step."""
        if self.steps:
            return "fedstrata.common.methods.baselines.distillation:distil"
        return None

    def build(self, context: RuleContext) -> Rule:
        return DistilledRule(self, context)


class FedBE(CombiningSettings):
    """One model: the mean of the uploads, distilled from a Bayesian ensemble of models around
    them.
    """

    step_models = 1.0

    name: Literal["fedbe"] = "fedbe"  # the rule
    # of the mean from which the student starts: shares of the samples, or 1/K
    weights: Weights = "data"
    # How models are sampled: from a Gaussian around the mean step, or as Dirichlet mixtures of the
    # uploads.
    teachers: Literal["gaussian", "dirichlet"] = "gaussian"
    samples: NonNegativeInt = 10  # models sampled, beside the mean and the uploads
    spread: PositiveFloat = 0.1  # of `gaussian`: factor of the standard deviation
    concentration: PositiveFloat = 1.0  # of `dirichlet`
    # to which the ensemble's mean probabilities are sharpened; 1 leaves them
    temperature: PositiveFloat = 0.5
    epochs: NonNegativeInt = 20  # over the node's samples; 0 is FedAvg
    batch_size: Count = 128  # samples in each step
    learning_rate: PositiveFloat = 0.001  # of SGD
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of SGD

    @property
    def refiner(self) -> str | None:
        """Its computation, unless there is no epoch."""
        if self.epochs:
            return "fedstrata.common.methods.baselines.distillation:distil_ensemble"
        return None

    def build(self, context: RuleContext) -> Rule:
        return DistilledRule(self, context)


class FedLAW(CombiningSettings):
    """One model: gamma times a mean of the uploads, both learned on the node's samples and
    labels.
    """

    step_models = 1.0

    name: Literal["fedlaw"] = "fedlaw"  # the rule
    weights: Weights = "data"  # from which the weights start: shares of the samples, or 1/K
    epochs: NonNegativeInt = 20  # over the node's samples; 0 is FedAvg
    batch_size: Count = 128  # samples in each step
    learning_rate: PositiveFloat = 0.01  # of Adam on ln gamma and on the logarithms of the weights

    @property
    def refiner(self) -> str | None:
        """Its computation, unless there is no epoch."""
        if self.epochs:
            return "fedstrata.common.methods.baselines.learned_weights:learn_weights"
        return None

    def build(self, context: RuleContext) -> Rule:
        return LearnedWeightsRule(self, context)


class DistilledRule(SingleModelRule):
    """FedDF or FedBE."""

    def __init__(self, settings: FedDF | FedBE | FedLAW, context: RuleContext) -> None:
        super().__init__(context, MeanRule(), weights=settings.weights)
        self._refiner = context.refiner_of(settings)

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Write the mean of the uploads, then refine it."""
        received = self.current.copy() if self._refiner is not None else self.current
        outcome = super().aggregate(r, uploads)
        if self._refiner is None:
            return outcome
        weights_K = uploads.statistics.weights_K(self._weights)
        rows = [uploads.rows_K[k] for k in uploads.answered]
        models = RoundModels(r, self.context.layout, self.mean, received, rows, weights_K)
        outcome = self._after(outcome, uploads, self._refiner.refine(models))
        distances = {}
        if self.context.measures:
            distances = self.distances(uploads)
        return replace(outcome, distances=distances)

    def _after(self, outcome: Aggregated, uploads: Uploads, facts: Mapping[str, Any]) -> Aggregated:
        """Return the outcome with the facts of the refinement."""
        return replace(outcome, facts={**outcome.facts, **facts})


class LearnedWeightsRule(DistilledRule):
    """FedLAW."""

    def _after(self, outcome: Aggregated, uploads: Uploads, facts: Mapping[str, Any]) -> Aggregated:
        """Mix the uploads by the learned weights; the loss is weighted by lambda."""
        lambdas_K = np.array(facts["lambdas"])
        self.average(uploads, lambdas_K, scale=facts["gamma"])
        by_child = dict(zip(uploads.senders, lambdas_K.tolist(), strict=True))
        loss = uploads.statistics.mean_loss(lambdas_K)
        return replace(outcome, loss=loss, facts={**facts, "lambdas": by_child})
