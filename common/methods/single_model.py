"""What runs a rule of one model at a node: dispatch, the mean or the columns of the uploads, checkpoints.

The rule is one of fedstrata's, or the user's own, `aggregation.name = "package.module:Class"`: a class that inherits
from `ColumnRule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Never

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment import own
from common.experiment.methods import RuleSettings, Weights
from common.experiment.own import OwnName, OwnSettings
from common.experiment.tables import form
from common.lazy import np
from common.methods import mixing
from common.methods.column_rule import ColumnRule, Columns, MeanRule, RoundFacts
from common.methods.mixing import Floats, Mixture, cut, over, whole
from common.methods.rule import Aggregated, Dispatched, Rule, RuleContext, Uploads, WrappedRule, link_layouts
from common.methods.statistics import Doubles, Gram, Statistics, gram
from common.model.layout import LinkLayouts, ModelLayout, Row

KEY: Final = "aggregation.name"
ExtraName = Annotated[str, form(r"^[a-z][a-z0-9_]{0,31}$", "lower-case letters, digits and _, a letter first")]


class OneModel(Rule):
    """Base of the rules of one model: `_current` is dispatched to the children, `_mean` is the result."""

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._mean = layout.empty()
        self._current: Row = self._mean

    @property
    def model(self) -> Row:
        """The mean of the last uploads, or of the selected ones."""
        return self._mean

    def begin(self, model: Row) -> None:
        """Dispatch this model next."""
        self._current = model

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the one model for all children."""
        return [(self._current, children)]

    def _trainable(self, row: Row) -> Floats:
        return self._layout.floats(row)[: self._layout.parameters]

    def _products(self, uploads: Uploads, model: Row) -> Gram:
        """Return the products of the uploads' steps from a model, in the order of the uploads."""
        rows = [self._trainable(uploads.rows_K[k]) for k in uploads.answered]
        return gram(rows, self._trainable(model), release=uploads.release)

    def _average(self, uploads: Uploads, mixture: Mixture) -> None:
        """Write the mean of the uploads that came, by a mixture of these."""
        answered = uploads.answered
        plan = whole(self._layout, [Mixture(tuple(answered[i] for i in mixture.indices), mixture.weights)])
        mixing.apply(plan, uploads.rows_K, layout=self._layout, out=[self._mean], release=uploads.release)

    def distances(self, uploads: Uploads) -> dict[str, float]:
        """Return the distance of each upload to the next model, which is not their mean."""
        squares_K = np.diagonal(self._products(uploads, self._mean).offsets_KK)
        return dict(zip(uploads.senders, map(sqrt, squares_K.tolist()), strict=True))


class SingleModelRule(OneModel):
    """The mean of the uploads by a rule, and the columns that it replaces, if it does.

    `weights`: of the mean, unless the rule has its own. `uploads_least`: with fewer the node keeps its model.
    """

    def __init__(self, context: RuleContext, rule: MeanRule, *, weights: Weights, uploads_least: int = 1) -> None:
        super().__init__(context.layout)
        self._context = context
        self._measures = context.measures
        self._rule = rule
        self._columns = rule if isinstance(rule, ColumnRule) else None
        self._weights = weights
        self._uploads_least = uploads_least
        self._before_D: Floats | None = None  # the model before the last one, of a rule of columns
        self.vectors: dict[str, Floats] = {}
        if self._columns is not None:
            for name in self._columns.vectors:
                self.vectors[name] = np.full(context.layout.parameters, self._columns.first(name), np.float32)

    @property
    def mixed(self) -> Row | None:
        """The mean of the last two models, in a new row, of a rule that is judged by it; else None."""
        if self._columns is None or not self._columns.averages or self._before_D is None:
            return None
        row = self._mean.copy()
        trainable = self._trainable(row)
        np.add(trainable, self._before_D, out=trainable)
        np.multiply(trainable, np.float32(0.5), out=trainable)
        return row

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Write the mean of the uploads, then the rule's columns."""
        statistics, rule, children = uploads.statistics, self._rule, uploads.senders
        if len(children) < self._uploads_least:
            return self._keep(children, statistics)
        mixes = self._columns is None  # then the next model is a mixture of the uploads
        compares = rule.compares or (mixes and self._measures)
        products = self._products(uploads, self._current) if compares else None
        given = products if rule.compares else None
        known = RoundFacts.of(self._context, r, children, statistics, weights=self._weights, products=given)
        facts = dict(rule.begin(known) or {})
        mixture = Mixture.of(rule.weights(known))
        weights_K = mixture.dense(len(children))
        if mixes:  # else the weights are those of buffers and of the loss
            facts["weights"] = known.by_child(weights_K)
        else:
            self._before_D = self._trainable(self._current).copy()
        self._average(uploads, mixture)
        self._current = self._mean
        distances: dict[str, float] = {}
        if mixes and products is not None:
            distances = known.by_child(products.distances(weights_K))
        elif self._columns is not None:
            self._replace(self._columns, uploads, weights_K)
            distances = self.distances(uploads) if self._measures else {}
        return Aggregated(statistics.mean_loss(weights_K), distances, None, facts)

    def save(self, folder: Path) -> dict[str, object]:
        """Write the rule's vectors; return its numbers."""
        write_vectors(self.vectors, folder)
        return {"numbers": self._rule.numbers}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        read_vectors(self.vectors, folder)
        self._rule.numbers = facts["numbers"]

    def _keep(self, children: Sequence[str], statistics: Statistics) -> Aggregated:
        """Keep the model of a round that has fewer uploads than protect from wrong ones."""
        if self._current is not self._mean:
            self._mean[:] = self._current
            self._current = self._mean
        reason = f"{len(children)} uploads do not protect from wrong ones, {self._uploads_least} do: the model is kept"
        facts = {"uploads": len(children), "uploads_least": self._uploads_least}
        return Aggregated(float(statistics.losses_K.mean()), {}, None, facts, dict.fromkeys(children, reason))

    def _replace(self, rule: ColumnRule, uploads: Uploads, weights_K: Doubles) -> None:
        """Write the rule's columns over those of the mean."""
        floats_K, next_D, before_D = self._layout.floats(uploads.rows_K), self._trainable(self._mean), self._before_D
        assert before_D is not None
        missing = len(uploads.answered) < len(uploads.children)
        rows = list(uploads.answered) if missing else slice(None)  # a slice copies nothing

        def block(columns: slice) -> None:
            state = {name: values[columns] for name, values in self.vectors.items()}
            extras = {name: values_K[rows, columns] for name, values_K in uploads.extras.items()}
            found = Columns(
                floats_K[rows, columns], before_D[columns], next_D[columns], weights_K, state=state, extras=extras
            )
            next_D[columns] = rule.columns(found)

        over(list(cut(0, self._layout.parameters)), block, release=uploads.release)


class SteppedRule(WrappedRule):
    """A rule of one model, and a step of the server from the model before, by the rule's result in place of the mean.

    The result is replaced where it stands, so the rule dispatches what the step has made of it.
    """

    def __init__(self, rule: OneModel, step: ColumnRule, context: RuleContext) -> None:
        super().__init__(rule)
        self._one = rule
        self._step = step
        self._context = context
        size = context.layout.parameters
        self._vectors = {name: np.full(size, step.first(name), np.float32) for name in step.vectors}

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate by the rule, then take the step; a rule that keeps its model takes none."""
        size, floats = self._context.layout.parameters, self._context.layout.floats
        before_D = floats(self._received[uploads.children[0]])[:size].copy()
        outcome = self._rule.aggregate(r, uploads)
        if uploads.answered and len(outcome.left_out) == len(uploads.answered):
            return outcome
        next_D, none_KC, weights_K = floats(self._rule.model)[:size], np.empty((0, 0), np.float32), np.empty(0)

        def block(columns: slice) -> None:
            state = {name: values[columns] for name, values in self._vectors.items()}
            next_D[columns] = self._step.columns(
                Columns(none_KC, before_D[columns], next_D[columns], weights_K, state=state)
            )

        over(list(cut(0, size)), block)
        return replace(outcome, distances=self._one.distances(uploads) if self._context.measures else {})

    def save(self, folder: Path) -> dict[str, object]:
        """Write the step's vectors, too."""
        write_vectors({f"step_{name}": values for name, values in self._vectors.items()}, folder)
        return self._rule.save(folder)

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._rule.restore(folder, facts)
        read_vectors({f"step_{name}": values for name, values in self._vectors.items()}, folder)


class ExtrasRule(WrappedRule):
    """A rule of one model whose children receive vectors behind the model, and return others.

    `sent`: the vectors by name, in the shapes of `links.down`, as they are at each dispatch.
    """

    def __init__(self, rule: SingleModelRule, links: LinkLayouts, *, sent: Mapping[str, Floats]) -> None:
        super().__init__(rule)
        self._links = links
        self._sent = sent
        self._row = links.down.empty()

    @property
    def reads_start(self) -> bool:
        """Always: the row that is dispatched is another one."""
        return True

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the model and the vectors for all children."""
        ((model, _),) = self._rule.dispatch(r, children)
        own = self._row[: model.size]
        own[:] = model
        self._rule.begin(own)  # the rule goes on from the row that is dispatched
        for name, place in self._links.down.extras_of(self._row).items():
            place[...] = self._sent[name]
        return [(self._row, children)]

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate the models; the rule sees the extras beside them."""
        rows_K, up = uploads.rows_K, self._links.up
        models_K = rows_K[:, : up.model_bytes]
        return self._rule.aggregate(r, replace(uploads, rows_K=models_K, extras=up.extras_of(rows_K)))


def single_model(settings: RuleSettings, context: RuleContext, rule: MeanRule, *, weights: Weights = "uniform") -> Rule:
    """Return a rule of one model, with the extras that its settings name; those sent are vectors of its state."""
    made = SingleModelRule(context, rule, weights=weights, uploads_least=settings.uploads_least)
    if not (settings.sends or settings.returns):
        return made
    sent = {name: made.vectors[name] for name in settings.sends}
    return ExtrasRule(made, link_layouts(settings, context.layout), sent=sent)


class OwnRule(RuleSettings, OwnSettings):
    """A rule of the user's own; the other keys are its keywords."""

    remembers: ClassVar[bool] = True  # it may have state

    name: OwnName  # the class, `package.module:Name`
    weights: Weights = "data"  # of the buffers, and of the loss that is reported: shares of the samples, or 1/K
    # Vectors of the rule that devices get with each model.
    extras_down: list[ExtraName] = Field(default_factory=list)
    # Vectors that the devices' objective returns with each model.
    extras_up: list[ExtraName] = Field(default_factory=list)

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The keywords for the class: all keys but those above."""
        return self.model_extra or {}

    @property
    def sends(self) -> Sequence[str]:
        """The vectors behind the models that go down."""
        return self.extras_down

    @property
    def returns(self) -> Sequence[str]:
        """The vectors behind the models that come up."""
        return self.extras_up

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that no vector is named twice. Raises InvalidExperiment."""
        for direction, names in (("extras_down", self.extras_down), ("extras_up", self.extras_up)):
            if len(set(names)) < len(names):
                raise InvalidExperiment(f"{key}.{direction}", names, "duplicate name", "Name each vector once.")

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, GuardedRule(self), weights=self.weights)


class GuardedRule(ColumnRule):
    """The user's rule. An error in it ends the run as InvalidExperiment."""

    def __init__(self, settings: OwnRule) -> None:
        self._name = settings.name
        self._rule = rule = own.build(KEY, settings, ColumnRule)
        self.numbers, self.compares, self.averages = rule.numbers, rule.compares, rule.averages
        with own.guarded({KEY: self._name}):
            self.vectors = tuple(dict.fromkeys((*rule.vectors, *settings.sends)))

    def first(self, vector: str) -> float:
        """Return the rule's first value of a vector."""
        with own.guarded({KEY: self._name}):
            return self._rule.first(vector)

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Return the rule's facts, and keep its numbers."""
        name, rule = self._name, self._rule
        rule.numbers = self.numbers
        with own.guarded({KEY: name}):
            found = rule.begin(facts) or {}
        self.numbers = own.kept(KEY, name, rule.numbers, "`numbers` are")
        published: Mapping[str, object] = own.kept(KEY, name, found, "`begin` returns")
        return published

    def weights(self, facts: RoundFacts) -> Doubles:
        """Return the rule's weights."""
        with own.guarded({KEY: self._name}):
            return self._rule.weights(facts)

    def columns(self, block: Columns) -> Doubles:
        """Return the rule's columns as float64. Raises InvalidExperiment unless they are C finite numbers."""
        name = self._name
        with own.guarded({KEY: name}):
            state = _Vectors(block.state, named_in="its `vectors`, or in extras_down of the experiment")
            extras = _Vectors(block.extras, named_in="extras_up of the experiment")
            given = replace(block, uploads_KC=block.uploads_KC.copy(), state=state, extras=extras)
            found = np.asarray(self._rule.columns(given), np.float64)
        if found.shape != block.model_C.shape:
            problem = f"returns {list(found.shape)} for columns of {list(block.model_C.shape)}"
            own.refuse(KEY, name, problem, "Return one number for each column.")
        if not np.isfinite(found).all():
            own.refuse(KEY, name, "computes numbers that are not finite", "Look for a division by zero.")
        return found


class _Vectors(dict[str, Floats]):
    """Vectors of a block by name; an assignment writes into the vector, which is kept, and not into this table."""

    def __init__(self, vectors: Mapping[str, Floats], *, named_in: str) -> None:
        super().__init__(vectors)
        self._named_in = named_in

    def __missing__(self, name: str) -> Never:
        raise LookupError(f"the rule has no vector {name!r}: name it in {self._named_in}")

    def __setitem__(self, name: str, values: Floats) -> None:
        self[name][...] = values


def write_vectors(vectors: Mapping[str, Floats], folder: Path) -> None:
    """Write vectors of state as files."""
    for name, values in vectors.items():
        (folder / name).write_bytes(values.data)


def read_vectors(vectors: Mapping[str, Floats], folder: Path) -> None:
    """Read what `write_vectors` wrote."""
    for name, values in vectors.items():
        values[:] = np.fromfile(folder / name, np.float32)
