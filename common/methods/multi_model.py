"""Multi-model rules, K models at one node: FedCross, FedMR and models that are never mixed.

Model j is trained by a child that is selected at random in each round (the papers' shuffle), returns as upload j, and
is mixed with others into the next model j. The mean of the uploads is evaluated, uploaded and deployed, but never
trained. The model dispatched to a child that fails is used as its upload (fallback model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from common.experiment.methods import RuleSettings, RuleUse, Weights
from common.lazy import np, npt
from common.methods import mixing
from common.methods.mixing import MixedColumns, Mixture, whole
from common.methods.rule import Aggregated, Dispatched, MixingPlan, Planner, Rule, RuleContext, Uploads
from common.methods.statistics import Doubles, Gram, gram, spread
from common.model.layout import Row
from common.randomness import Purpose, generator

OnNewModel = Literal["reset", "recentre"]

FAST_LEARNING_RATE: Final = 0.1


class MultiModelSettings(RuleSettings):
    """K models, one for each child that takes part."""

    several: ClassVar[bool] = True

    weights: Weights = "uniform"  # of the mean that is evaluated and sent up: shares of the samples, or 1/K
    # How an institution's K models start its next global round: all from the model received, or each at its old offset
    # from their mean.
    on_new_model: OnNewModel = "reset"

    @property
    def mixes(self) -> bool:
        """Whether models are mixed enough to stay close to each other."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether the offsets of the models persist."""
        return self.on_new_model == "recentre"

    def held_bytes(self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float) -> float:
        """Return the bytes of the K models."""
        return min(taking_part * row_bytes, resident_bytes)

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield what a short run, a fast rate or the rule's place makes of several models."""
        key = f"{use.key}.aggregation"
        if use.fewest == 1:
            yield f"{key}.name = {self.name!r}: with one child there is one model, and nothing to mix."
        if not self.mixes and use.learning_rate >= FAST_LEARNING_RATE:
            yield (
                f"training.learning_rate = {use.learning_rate}: models that hardly mix ({key}.name = {self.name!r})"
                " collapsed at such rates where fedavg trained well."
            )
        if use.depth == 0 and self.on_new_model != "reset":
            yield f"{key}.on_new_model = {self.on_new_model!r}: the cloud has no parent that sends it a model."
        if use.depth and self.on_new_model == "reset" and use.tier_rounds == 1:
            yield (
                f"{key}.name = {self.name!r}: with {use.key}.rounds = 1 and on_new_model 'reset' the mixed models are"
                f" discarded before any device trains on them; this is fedavg with {self.weights} weights."
            )
        if use.depth and self.on_new_model == "recentre" and not use.alone:
            yield from self.recentred(key)

    def recentred(self, key: str) -> Iterator[str]:
        """Yield what recentred models do to the rule."""
        yield f"{key}.on_new_model = 'recentre': hurts {self.name} (fedmr on digits: 85 % against 93 %)."


def first_stage_advice(key: str, first_stage_rounds: int, rounds: int) -> Iterator[str]:
    """Yield a warning if all rounds belong to the first stage."""
    if 0 < rounds <= first_stage_rounds:
        yield (
            f"{key}.aggregation.first_stage_rounds = {first_stage_rounds}: all {rounds} rounds belong to the first"
            " stage, which is the same as fedavg."
        )


class Independent(MultiModelSettings):
    """K models that are never mixed: the baseline that separates mixing from averaging."""

    name: Literal["independent"] = "independent"  # the rule

    def build(self, context: RuleContext) -> Rule:
        def unmixed(r: int, uploads: Uploads, compare: Callable[[], Gram]) -> MixingPlan:
            return whole(context.layout, [Mixture.copy(k) for k in range(len(uploads.children))]), {"stage": "unmixed"}

        return MultiModelRule(self, context, unmixed)


class MultiModelRule(Rule):
    """K models at one node; equal models are stored once."""

    def __init__(self, settings: MultiModelSettings, context: RuleContext, planner: Planner) -> None:
        layout = context.layout
        self._settings = settings
        self._measures = context.measures
        self._layout = layout
        self._node = context.node
        self._seed = context.seed
        self._memory = context.rows
        self._planner = planner
        self._mean = layout.empty()
        self._start: Row = self._mean  # the common value of all models while they are equal
        self._rows: npt.NDArray[np.uint8] | None = None
        self._distinct = False
        self._mixed: Mixture | None = None

    @property
    def reads_start(self) -> bool:
        """Whether the next `begin` needs the model's values to recentre the K models."""
        return self._distinct and self._settings.on_new_model == "recentre"

    @property
    def model(self) -> Row:
        """The mean of the last uploads."""
        return self._mean

    @property
    def mixed(self) -> Row | None:
        """The mean of the models after mixing, in a new row, if the last plan changed it; else None."""
        if self._mixed is None or self._rows is None:
            return None
        row = self._layout.empty()
        mixing.apply(whole(self._layout, [self._mixed]), self._rows, layout=self._layout, out=[row])
        return row

    def begin(self, model: Row) -> None:
        """Start all models from this one, or shift them so that it becomes their mean (`on_new_model`)."""
        if self.reads_start and self._rows is not None:
            mixing.recentre(list(self._rows), model, layout=self._layout)
        else:
            self._start, self._distinct = model, False
        self._mixed = None

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return model j for the j-th of the children in a random order, or the one model while all are equal."""
        order = generator(self._seed, Purpose.DISPATCH, self._node, r).permutation(len(children))
        dealt = [children[place] for place in order]
        if not self._distinct:
            return [(self._start, dealt)]
        return [(row, [child]) for row, child in zip(self._models(len(dealt)), dealt, strict=True)]

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Mix the uploads into the next models and compute their mean."""
        layout, count, answered = self._layout, len(uploads.children), uploads.answered
        for k, row in enumerate(self._models(count)):
            if k not in answered:
                uploads.rows_K[k] = row
        statistics, weights_K = uploads.statistics, np.full(count, 1 / count)
        loss = statistics.mean_loss(statistics.weights_K(self._settings.weights))
        if self._settings.weights == "data":  # a fallback model has none
            weights_K[:] = 0.0
            weights_K[list(answered)] = statistics.shares_K
        products: Gram | None = None

        def compare() -> Gram:
            nonlocal products
            if products is None:
                trainable = list(layout.floats(uploads.rows_K)[:, : layout.parameters])
                products = gram(trainable, trainable[0], release=uploads.release)
            return products

        # Without a plan all models become the mean.
        plan, facts = self._planner(r, uploads, compare) if count > 1 else ((), {"stage": "one model"})
        if self._measures or self._settings.weights == "data":
            compare()
        apart = self._mix(plan, weights_K, products, uploads)
        distances: dict[str, float] = {}
        if products is not None:
            distances_K = products.distances(weights_K)
            distances = {uploads.children[k]: float(distances_K[k]) for k in answered}
        fallback = [child for k, child in enumerate(uploads.children) if k not in answered]
        return Aggregated(loss, distances, apart, {**facts, "fallback_models": fallback})

    def _mix(self, plan: Sequence[MixedColumns], weights_K: Doubles, products: Gram | None, uploads: Uploads) -> float:
        """Write the mean and the next models; return their spread. Without a plan all models become the mean."""
        mean, count = Mixture.of(weights_K), len(weights_K)
        rows: list[Row] = []
        if plan:
            if self._rows is None or len(self._rows) != count:
                self._rows = self._memory("models", count)
            rows = list(self._rows)
        self._start, self._distinct, self._mixed = self._mean, bool(plan), None
        parts = [part.with_first(mean) for part in plan] or whole(self._layout, [mean])
        out = [self._mean, *rows]
        mixing.apply(parts, uploads.rows_K, layout=self._layout, out=out, release=uploads.release)
        if not plan:
            return 0.0
        if products is None:  # every upload has equal total weight in the next models, so their mean is the same
            parameters, floats = self._layout.parameters, self._layout.floats
            return spread([floats(row)[:parameters] for row in rows], floats(self._mean)[:parameters])
        mixing_KK = np.array([mixture.dense(count) for mixture in plan[0].mixtures])
        if not np.allclose(mixing_KK.mean(axis=0), weights_K, rtol=0, atol=1e-12):
            self._mixed = Mixture.of([1 / count] * count)
        return products.spread(mixing_KK)  # several parts are permutations, which do not change the spread

    def save(self, folder: Path) -> dict[str, object]:
        """Write the models, unless they are all equal to the model that is saved with this state."""
        if not self._distinct or self._rows is None:
            return {"models": 0}
        with (folder / "models.bin").open("wb") as file:
            for row in self._rows:
                file.write(row.data)
        return {"models": len(self._rows)}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Read the models."""
        count: int = facts["models"]
        self._distinct = count > 0
        if count:
            self._rows = self._memory("models", count)
            with (folder / "models.bin").open("rb") as file:
                for row in self._rows:
                    if file.readinto(row.data) != len(row):
                        raise ValueError(f"{file.name} is too short for {count} models")

    def _models(self, count: int) -> list[Row]:
        if not self._distinct or self._rows is None:
            return [self._start] * count
        if len(self._rows) != count:
            raise ValueError(f"{count} children take part, but there are {len(self._rows)} models")
        return list(self._rows)
