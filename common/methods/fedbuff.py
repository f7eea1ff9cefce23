"""FedBuff (Nguyen et al. 2022, Algorithm 1): asynchronous aggregation of a buffer of K results.

    next = w + eta sum of p_k s(t_k) (v_k - z_k)          over trainable columns; z_k: the model
    that child k received s(t) = 1 / (1 + t)^a                                  t_k: the node's
    rounds since then

p_k is 1/K, or the share of the samples in the buffer. The children that are not in the buffer go on
training; one that is in it gets the next model at once. Each model that a child in flight received
is kept: at most as many as train at once. None is kept on disk: after a restart all children get
the present model. Buffers of the model, such as batch statistics, are the mean by p_k s(t_k),
normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.lazy import np
from fedstrata.common.methods.mixing import by_block
from fedstrata.common.methods.rule import Aggregated, Dispatched, Rule, RuleContext, Uploads
from fedstrata.common.methods.settings import RuleSettings, Weights
from fedstrata.common.methods.single_model import OneModel
from fedstrata.common.methods.statistics import Doubles, shares
from fedstrata.common.model.layout import Row
from fedstrata.common.settings.tables import Count, Positive


class FedBuff(RuleSettings):
    """One model: a step by each `buffer` results, while the other children go on training;
    asynchronous.
    """

    step_models = 2.0

    name: Literal["fedbuff"] = "fedbuff"  # the rule
    weights: Weights = "uniform"  # of the steps in a buffer: 1/K, or shares of their samples
    buffer: Count = 2  # results that make a step (K)
    learning_rate: Positive = 1.0  # of the server (eta)
    # exponent a of the weight 1 / (1 + t)^a of a step t rounds old
    staleness: Annotated[float, Field(ge=0)] = 0.5

    @property
    def closes_with(self) -> int:
        """The results that make a step."""
        return self.buffer

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that so many children train at once. Raises InvalidExperiment."""
        if self.buffer > children:
            problem = f"more than the {children} children that train at once"
            raise InvalidExperiment(
                f"{key}.buffer", self.buffer, problem, f"Use at most {children}."
            )

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return the bytes of the step, and of the models that children in flight received."""
        return (self.step_models + taking_part) * row_bytes

    def build(self, context: RuleContext) -> Rule:
        return BufferedRule(self, context)


class BufferedRule(OneModel):
    """A rule of one model in several versions."""

    def __init__(self, settings: FedBuff, context: RuleContext) -> None:
        super().__init__(context)
        self._settings = settings
        self._versions: dict[int, Row] = {}
        self._received: dict[str, int] = {}  # the round in which a child in flight got its model

    def begin(self, model: Row) -> None:
        """Dispatch this model next; no child is in flight."""
        super().begin(model)
        self._versions = {}
        self._received = {}

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the present model for these children, in memory of its own."""
        if self.current is self.mean:
            self.current = self.mean.copy()
        self._versions[r] = self.current
        self._received |= dict.fromkeys(children, r)
        return [(self.current, children)]

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Take the step of the uploads. Facts: each one's weight p_k s(t_k), and its age t_k."""
        statistics = uploads.statistics
        settings = self._settings
        children = uploads.senders
        ages_K = np.array([r - self._received[child] for child in children])
        shares_K = statistics.weights_K(settings.weights)
        weights_K: Doubles = shares_K / (1.0 + ages_K) ** settings.staleness
        starts = [self._versions[self._received[child]] for child in children]
        self.average(uploads, shares(weights_K))
        self._step(uploads, weights_K, starts)
        self.current = self.mean
        for child in children:
            del self._received[child]
        self._versions = {
            version: self._versions[version] for version in sorted(set(self._received.values()))
        }
        facts = {
            "weights": dict(zip(children, weights_K.tolist(), strict=True)),
            "ages": dict(zip(children, ages_K.tolist(), strict=True)),
        }
        distances = self.distances(uploads) if self.context.measures else {}
        return Aggregated(statistics.mean_loss(shares_K), distances, None, facts)

    def _step(self, uploads: Uploads, weights_K: Doubles, starts: Sequence[Row]) -> None:
        """Write the trainable columns of the next model."""
        floats_K = self._layout.floats(uploads.rows_K)
        rate = self._settings.learning_rate
        before_D = self._trainable(self.current)
        next_D = self._trainable(self.mean)
        versions = [self._trainable(row) for row in starts]

        def block(columns: slice) -> None:
            total = before_D[columns].astype(np.float64)
            for k, weight, version in zip(uploads.answered, weights_K, versions, strict=True):
                total += (
                    rate * weight * (floats_K[k, columns].astype(np.float64) - version[columns])
                )
            next_D[columns] = total

        by_block(self._layout.parameters, block, release=uploads.release)
