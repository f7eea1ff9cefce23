"""Multi-model rules, K models at one node: FedCross, FedMR and models that are never mixed.

Model j is trained by a child that is selected at random in each round (the papers' shuffle),
returns as upload j, and is mixed with others into the next model j. The mean of the uploads is
evaluated, uploaded and deployed, but never trained. The model dispatched to a child that fails is
used as its upload (fallback model).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

from fedstrata.common.lazy import np, npt
from fedstrata.common.methods import mixing
from fedstrata.common.methods.mixing import Floats, MixedColumns, Mixture, whole
from fedstrata.common.methods.rule import (
    RULE_KEY,
    SUM_TOLERANCE,
    Aggregated,
    Dispatched,
    Rule,
    RuleContext,
    Uploads,
)
from fedstrata.common.methods.settings import Rounds, RuleSettings, RuleUse, Weights
from fedstrata.common.methods.statistics import Doubles, Gram, gram_by_entry, manhattan_KK, spread
from fedstrata.common.model.layout import Entry, Row
from fedstrata.common.settings import own
from fedstrata.common.settings.tables import Positive

OnNewModel = Literal["reset", "recentre"]

Mixed: TypeAlias = "npt.NDArray[np.float64] | npt.NDArray[np.int64]"
Layers: TypeAlias = "Sequence[tuple[Sequence[Entry], Mixed]]"
MixingPlan: TypeAlias = "Mixed | Layers | tuple[Mixed | Layers | None, Mapping[str, object]] | None"

FAST_LEARNING_RATE: Final = 0.1


class MixingRule(RuleSettings):
    """Base of the rules of K models, one for each child that takes part: keys, and how the models
    are mixed.
    """

    several: ClassVar[bool] = True

    # of the mean that is evaluated and sent up: shares of the samples, or 1/K
    weights: Weights = "uniform"
    # How an institution's K models start its next global round: all from the model received, or
    # each at its old offset from their mean.
    on_new_model: OnNewModel = "reset"

    def plan(self, now: MixingRound) -> MixingPlan:
        """Return how a round's uploads become the next K models, and if you like facts for the
        published plan.

        W, float64 [K, K], whose rows sum to 1: model j becomes sum_k W[j, k] v_k. Or an int array
        [K]: model j becomes v_k of its number. Or a list of pairs: entries of the layout, and
        either of these for them alone; each entry is in one pair. None: all models become the mean.
        Facts: what JSON can hold, in a tuple with the former.
        """
        raise NotImplementedError

    def build(self, context: RuleContext) -> Rule:
        return MultiModelRule(self, context)

    @property
    def acts_from(self) -> int:
        """The second round: in the first one all models begin alike."""
        return 2

    @property
    def mixes(self) -> bool:
        """Whether models are mixed enough to stay close to each other."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether the offsets of the models persist."""
        return self.on_new_model == "recentre"

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return the bytes of the K models."""
        return min(taking_part * row_bytes, resident_bytes)

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield what a short run, a fast rate or the rule's place makes of several models."""
        key = f"{use.key}.aggregation"
        if use.fewest == 1:
            yield (
                f"{key}.name = {self.name!r}: with one child there is one model, and nothing to "
                "mix."
            )
        if not self.mixes and use.learning_rate >= FAST_LEARNING_RATE:
            yield (
                f"training.learning_rate = {use.learning_rate}: models that hardly mix "
                f"({key}.name = {self.name!r}) collapsed at such rates where fedavg trained well."
            )
        if use.depth == 0 and self.on_new_model != "reset":
            yield (
                f"{key}.on_new_model = {self.on_new_model!r}: the cloud has no parent that "
                "sends it a model."
            )
        if use.depth and self.on_new_model == "reset" and use.tier_rounds == 1:
            yield (
                f"{key}.name = {self.name!r}: with {use.key}.rounds = 1 and on_new_model 'reset' "
                "the mixed models are discarded before any device trains on them; this is fedavg "
                f"with {self.weights} weights."
            )
        if use.depth and self.on_new_model == "recentre" and not use.alone:
            yield from self.recentred(key)

    def first_stage_advice(self, use: RuleUse, first_stage_rounds: int) -> Iterator[str]:
        """Yield a warning if all rounds belong to a first stage, in which all models become their
        mean.
        """
        if 0 < use.rounds <= first_stage_rounds:
            yield (
                f"{use.key}.aggregation.first_stage_rounds = {first_stage_rounds}: all "
                f"{use.rounds} rounds belong to the first stage, which is the same as fedavg."
            )

    def recentred(self, key: str) -> Iterator[str]:
        """Yield what recentred models do to the rule."""
        yield (
            f"{key}.on_new_model = 'recentre': hurts {self.name} (fedmr on digits: 85 % against "
            "93 %)."
        )


class TwoStageRule(MixingRule):
    """K models that are mixed after a first stage, in which all become their mean.

    It ends before round `first_stage_rounds`, or with the first round whose training loss is small
    enough.
    """

    first_stage_rounds: Rounds = 0  # first rounds, in which all models become their mean
    # Training loss, the mean over the uploads, that ends these rounds early: those of a round with
    # less are mixed.
    first_stage_loss: Positive | None = None

    @property
    def compares_losses(self) -> bool:
        """Whether a loss ends the first stage."""
        return self.first_stage_loss is not None

    @property
    def remembers(self) -> bool:
        """Whether it does, or the offsets of the models persist."""
        return self.compares_losses or super().remembers

    @property
    def acts_from(self) -> int:
        """The second round after the first stage, at least."""
        if self.compares_losses:
            return 2
        return self.first_stage_rounds + 2

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield a warning for a run that is a first stage, too, and for a loss that ends none."""
        key = f"{use.key}.aggregation"
        if self.first_stage_loss is not None and not self.first_stage_rounds:
            problem = "there is no first stage to end. Set first_stage_rounds, its most rounds."
            yield f"{key}.first_stage_loss = {self.first_stage_loss}: {problem}"
        elif 0 < use.rounds <= self.first_stage_rounds and not self.compares_losses:
            yield (
                f"{key}.first_stage_rounds = {self.first_stage_rounds}: all {use.rounds} rounds "
                "belong to the first"
                " stage, which is the same as fedavg."
            )
        yield from super().advice(use)


@dataclass(frozen=True)
class MixingRound:
    """One round of K models at a node: their uploads, and what a plan may compare of them.

    `r`: the node's round, from 0, never reset. `uploads`: row k is the upload of model k; where a
    child failed, it is the model that was sent.
    """

    r: int
    uploads: Uploads
    context: RuleContext

    @property
    def count(self) -> int:
        """K."""
        return len(self.uploads.children)

    @property
    def floats_KF(self) -> Floats:
        """The uploads' parameters and buffers, float32 [K, F]; the first
        `context.layout.parameters` are trained.
        """
        return self.context.layout.floats(self.uploads.rows_K)

    @cached_property
    def products(self) -> Gram:
        """The inner products of the uploads' trainable columns, computed when first used."""
        rows = list(self.floats_KF[:, : self.context.layout.parameters])
        return Gram.of(rows, rows[0], release=self.uploads.release)

    @cached_property
    def products_by_entry(self) -> list[Gram]:
        """The inner products of each entry of the state, in the order of
        `layout.in_state_order`.
        """
        return gram_by_entry(self.uploads.rows_K, self.context.layout, release=self.uploads.release)

    @cached_property
    def manhattan_KK(self) -> Doubles:
        """The sums of the absolute differences of trainable columns, float64 [K, K]."""
        rows = list(self.floats_KF[:, : self.context.layout.parameters])
        return manhattan_KK(rows, release=self.uploads.release)


class Independent(MixingRule):
    """K models that are never mixed: the baseline that separates mixing from averaging."""

    name: Literal["independent"] = "independent"  # the rule

    def plan(self, now: MixingRound) -> MixingPlan:
        """Keep each model."""
        return np.arange(now.count), {"stage": "unmixed"}


class MultiModelRule(Rule):
    """K models at one node; equal models are stored once."""

    def __init__(self, settings: MixingRule, context: RuleContext) -> None:
        layout = context.layout
        self._settings = settings
        self._context = context
        self._layout = layout
        self._memory = context.rows
        self._mean = layout.empty()
        self._start: Row = self._mean  # the common value of all models while they are equal
        self._rows: npt.NDArray[np.uint8] | None = None
        self._distinct = False
        self._mixed: Mixture | None = None
        self._in_first_stage = isinstance(settings, TwoStageRule)

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
        """The mean of the models after mixing, in a new row, if the last plan changed it; else
        None.
        """
        if self._mixed is None or self._rows is None:
            return None
        row = self._layout.empty()
        mixing.apply(whole(self._layout, [self._mixed]), self._rows, layout=self._layout, out=[row])
        return row

    def begin(self, model: Row) -> None:
        """Start all models from this one, or shift them so that it becomes their mean
        (`on_new_model`).
        """
        if self.reads_start and self._rows is not None:
            mixing.recentre(list(self._rows), model, layout=self._layout)
        else:
            self._start = model
            self._distinct = False
        self._mixed = None

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return model j for the j-th of the children in a random order, or the one model while all
        are equal.
        """
        order = self._context.chance(r, "dispatch").permutation(len(children))
        dealt = [children[place] for place in order]
        if not self._distinct:
            return [(self._start, dealt)]
        return [(row, [child]) for row, child in zip(self._models(len(dealt)), dealt, strict=True)]

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Mix the uploads into the next models and compute their mean."""
        count = len(uploads.children)
        answered = uploads.answered
        for k, row in enumerate(self._models(count)):
            if k not in answered:
                uploads.rows_K[k] = row
        statistics = uploads.statistics
        weights_K = np.full(count, 1 / count)
        loss = statistics.mean_loss(statistics.weights_K(self._settings.weights))
        if self._settings.weights == "data":  # a fallback model has none
            weights_K[:] = 0.0
            weights_K[list(answered)] = statistics.shares_K
        now = MixingRound(r, uploads, self._context)
        parts: list[_Part] = []  # without any all models become the mean
        facts: Mapping[str, object] = {"stage": "one model" if count == 1 else "first"}
        if not self._first_stage(r, loss) and count > 1:
            parts, facts = self._planned(now)
        of_data = self._settings.weights == "data"
        compares = self._context.measures or of_data or "products" in vars(now)
        products = now.products if compares else None
        apart = self._mix(parts, weights_K, products, uploads)
        distances: dict[str, float] = {}
        if products is not None:
            distances_K = products.distances(weights_K)
            distances = {uploads.children[k]: float(distances_K[k]) for k in answered}
        fallback = [child for k, child in enumerate(uploads.children) if k not in answered]
        return Aggregated(loss, distances, apart, {**facts, "fallback_models": fallback})

    def _first_stage(self, r: int, loss: float | None) -> bool:
        """Return whether a round belongs to the first stage; what has ended stays so."""
        settings = self._settings
        if self._in_first_stage and isinstance(settings, TwoStageRule):
            self._in_first_stage = r < settings.first_stage_rounds
            if settings.first_stage_loss is not None and loss is not None:
                self._in_first_stage &= not loss <= settings.first_stage_loss
        return self._in_first_stage

    def _planned(self, now: MixingRound) -> tuple[list[_Part], Mapping[str, object]]:
        """Return the settings' plan, none if all models become the mean, and its facts. Raises
        InvalidExperiment.
        """
        plan = self._settings.plan
        name = self._settings.name
        with own.guarded({RULE_KEY: name}):
            found: Any = plan(now)
        mixing, facts = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        own.kept(RULE_KEY, name, facts, "the facts of `plan` are", at=own.place(plan))
        entries = self._layout.entries
        try:
            if mixing is None:
                return [], facts
            if isinstance(mixing, np.ndarray):
                return [_Part.of(entries, mixing, now.count)], facts
            paired = isinstance(mixing, Sequence)
            if not paired or not all(isinstance(each, tuple) for each in mixing):
                raise ValueError(f"returns {type(mixing).__name__}, not an array")
            parts = [_Part.of(chosen, each, now.count) for chosen, each in mixing]
            names = Counter(entry.name for chosen, _ in mixing for entry in chosen)
            for entry in entries:
                if names[entry.name] != 1:
                    raise ValueError(f"mixes {entry.name} {names[entry.name]} times")
        except (AttributeError, TypeError, ValueError) as error:
            array = f"an array [{now.count}, {now.count}] whose rows sum to 1"
            remedy = f"Return {array}, or one for each part of the layout."
            own.refuse(RULE_KEY, name, f"plan {error}{own.place(plan)}", remedy)
        return parts, facts

    def _mix(
        self, parts: Sequence[_Part], weights_K: Doubles, products: Gram | None, uploads: Uploads
    ) -> float:
        """Write the mean and the next models; return their spread. Without parts all models become
        the mean.
        """
        mean = Mixture.of(weights_K)
        count = len(weights_K)
        rows: list[Row] = []
        if parts:
            if self._rows is None or len(self._rows) != count:
                self._rows = self._memory("models", count)
            rows = list(self._rows)
        self._start = self._mean
        self._distinct = bool(parts)
        self._mixed = None
        plan = [part.columns.with_first(mean) for part in parts] or whole(self._layout, [mean])
        out = [self._mean, *rows]
        mixing.apply(plan, uploads.rows_K, layout=self._layout, out=out, release=uploads.release)
        if not parts:
            return 0.0
        means = (part.mixing_KK.mean(axis=0) for part in parts)
        if not all(np.allclose(each, weights_K, rtol=0, atol=1e-12) for each in means):
            self._mixed = Mixture.of([1 / count] * count)
        if products is not None and (len(parts) == 1 or all(part.permutes for part in parts)):
            return products.spread(parts[0].mixing_KK)  # permutations do not change the spread
        mixed = self.mixed
        parameters = self._layout.parameters
        floats = self._layout.floats
        centre = self._mean if mixed is None else mixed
        return spread([floats(row)[:parameters] for row in rows], floats(centre)[:parameters])

    def save(self, folder: Path) -> dict[str, object]:
        """Write the models, unless they are all equal to the model that is saved with this
        state.
        """
        stage = {"first_stage": self._in_first_stage}
        if not self._distinct or self._rows is None:
            return {"models": 0, **stage}
        with (folder / "models.bin").open("wb") as file:
            for row in self._rows:
                file.write(row.data)
        return {"models": len(self._rows), **stage}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Read the models."""
        self._in_first_stage = facts["first_stage"]
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Some columns of the next models, and `found`, float64 [K, K] or int64 [K]: the uploads that
    they are made of.
    """

    columns: MixedColumns
    found: npt.NDArray[Any]

    @classmethod
    def of(cls, entries: Sequence[Entry], found: Any, count: int) -> _Part:
        """Return the part of a plan. Raises ValueError, with what is wrong with its numbers."""
        values = np.asarray(found)
        if values.dtype.kind in "iu" and values.ndim == 1:
            if values.shape != (count,) or not ((values >= 0) & (values < count)).all():
                raise ValueError(f"returns {values.tolist()!r:.60} for {count} numbers of uploads")
            return cls(MixedColumns.of(tuple(map(Mixture.copy, values.tolist())), entries), values)
        if values.shape != (count, count):
            raise ValueError(f"returns {list(values.shape)} for {[count, count]} weights")
        weights_KK = values.astype(np.float64)
        if not np.isfinite(weights_KK).all():
            raise ValueError("computes weights that are not finite")
        if (wrong := np.abs(weights_KK.sum(axis=1) - 1) > SUM_TOLERANCE).any():
            row = int(wrong.argmax())
            raise ValueError(f"returns weights of sum {weights_KK[row].sum():.6g} for model {row}")
        return cls(MixedColumns.of(tuple(map(Mixture.of, weights_KK)), entries), weights_KK)

    @property
    def mixing_KK(self) -> Doubles:
        """The weights, float64 [K, K]."""
        return self.found if self.found.ndim == 2 else np.eye(len(self.found))[self.found]

    @property
    def permutes(self) -> bool:
        """Whether each upload is used once, as it is."""
        return self.found.ndim == 1 and len(set(self.found.tolist())) == len(self.found)
