"""FedDF, FedBE and FedLAW: the mean of the uploads, refined with samples at the node.

    FedDF  (Lin et al. 2020)       a student that begins as the mean learns what the ensemble of the uploads predicts
    FedBE  (Chen & Chao 2021)      as well, with more teachers: models sampled around the uploads
    FedLAW (Li et al. 2023)        w = gamma sum of lambda_k v_k, gamma and lambda learned

The computation is in `common/learning/` (`distillation.py`, `bayesian_ensemble.py`, `learned_weights.py`). Buffers and
counters are those of the mean; FedLAW's are mixed by lambda, without gamma: a variance must not be scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.experiment.refined_rules import FedBE, FedDF, FedLAW
from common.lazy import np
from common.methods import mixing
from common.methods.column_rule import MeanRule
from common.methods.mixing import MixedColumns, Mixture
from common.methods.rule import Aggregated, RuleContext, Uploads
from common.methods.single_model import SingleModelRule
from common.model.refinement import RoundModels


class DistilledRule(SingleModelRule):
    """FedDF or FedBE."""

    def __init__(self, settings: FedDF | FedBE | FedLAW, context: RuleContext) -> None:
        super().__init__(context, MeanRule(), weights=settings.weights)
        if settings.refines and context.refiner is None:
            raise RuntimeError(f"the rule {settings.name} needs a refiner")
        self._refiner = context.refiner if settings.refines else None

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Write the mean of the uploads, then refine it."""
        received = self._current.copy() if self._refiner is not None else self._current
        outcome = super().aggregate(r, uploads)
        if self._refiner is None:
            return outcome
        answered = uploads.answered
        children = [uploads.children[k] for k in answered]
        weights_K = uploads.statistics.weights_K(self._weights)
        rows = [uploads.rows_K[k] for k in answered]
        facts = self._refiner.refine(RoundModels(r, self._layout, self._mean, received, rows, weights_K))
        outcome = self._after(outcome, uploads, facts)
        distances = self._distances(uploads) if self._measures else []
        return replace(outcome, distances=dict(zip(children, distances, strict=False)))

    def _after(self, outcome: Aggregated, uploads: Uploads, facts: Mapping[str, Any]) -> Aggregated:
        """Return the outcome with the facts of the refinement."""
        return replace(outcome, facts={**outcome.facts, **facts})


class LearnedWeightsRule(DistilledRule):
    """FedLAW."""

    def _after(self, outcome: Aggregated, uploads: Uploads, facts: Mapping[str, Any]) -> Aggregated:
        """Mix the uploads by the learned weights; the loss is weighted by lambda."""
        answered, layout = uploads.answered, self._layout
        lambdas_K, gamma = np.array(facts["lambdas"]), float(facts["gamma"])
        kept = [(k, weight) for k, weight in zip(answered, lambdas_K.tolist(), strict=True) if weight]
        indices, weights = tuple(k for k, _ in kept), tuple(weight for _, weight in kept)
        learned, convex = Mixture(indices, tuple(gamma * weight for weight in weights)), Mixture(indices, weights)
        plan = (
            MixedColumns((learned,), (slice(0, layout.parameters),), ()),
            MixedColumns((convex,), (slice(layout.parameters, layout.columns),), (slice(0, layout.counters),)),
        )
        mixing.apply(plan, uploads.rows_K, layout=layout, out=[self._mean], release=uploads.release)
        by_child = dict(zip((uploads.children[k] for k in answered), lambdas_K.tolist(), strict=True))
        loss = float(lambdas_K @ uploads.statistics.losses_K)
        return replace(outcome, loss=loss, facts={**facts, "lambdas": by_child})
