"""What runs a rule of one model at a node: dispatch, the mean or the columns of the uploads,
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

from fedstrata.common.lazy import np
from fedstrata.common.methods import mixing
from fedstrata.common.methods.column_rule import ColumnRule, Columns, MeanRule, RoundFacts
from fedstrata.common.methods.mixing import Floats, MixedColumns, Mixture, by_block, whole
from fedstrata.common.methods.rule import (
    Aggregated,
    Dispatched,
    Rule,
    RuleContext,
    Uploads,
    WrappedRule,
    link_layouts,
)
from fedstrata.common.methods.settings import RuleSettings, Weights
from fedstrata.common.methods.statistics import Doubles, Gram, Statistics
from fedstrata.common.model.layout import Row


class OneModel(Rule):
    """Base of the rules of one model: `current` is dispatched to the children, `mean` is the
    result.
    """

    def __init__(self, context: RuleContext) -> None:
        self.context = context
        self._layout = context.layout
        self.mean = context.layout.empty()
        self.current: Row = self.mean

    @property
    def model(self) -> Row:
        """The mean of the last uploads, or of the selected ones."""
        return self.mean

    def begin(self, model: Row) -> None:
        """Dispatch this model next."""
        self.current = model

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the one model for all children."""
        return [(self.current, children)]

    def average(self, uploads: Uploads, weights_K: Doubles, *, scale: float = 1.0) -> None:
        """Write the sum of w_k v_k over the uploads that came into the model, `scale` times it in
        the parameters.

        `weights_K`: float64, in the order of `uploads.answered`. Counters are those of the largest
        weight.
        """
        answered = uploads.answered
        layout = self._layout
        mixture = Mixture.of(weights_K)
        convex = Mixture(tuple(answered[i] for i in mixture.indices), mixture.weights)
        plan = whole(layout, [convex])
        if scale != 1.0:
            scaled = Mixture(convex.indices, tuple(scale * weight for weight in convex.weights))
            buffers = slice(layout.parameters, layout.columns)
            plan = (
                MixedColumns((scaled,), (slice(0, layout.parameters),), ()),
                MixedColumns((convex,), (buffers,), (slice(0, layout.counters),)),
            )
        mixing.apply(plan, uploads.rows_K, layout=layout, out=[self.mean], release=uploads.release)

    def products(self, uploads: Uploads, model: Row) -> Gram:
        """Return the products of the uploads' steps from a model, in the order of
        `uploads.answered`.
        """
        rows = [self._trainable(uploads.rows_K[k]) for k in uploads.answered]
        return Gram.of(rows, self._trainable(model), release=uploads.release)

    def _trainable(self, row: Row) -> Floats:
        return self._layout.floats(row)[: self._layout.parameters]

    def distances(self, uploads: Uploads) -> dict[str, float]:
        """Return the distance of each upload to the next model, which is not their mean."""
        squares_K = np.diagonal(self.products(uploads, self.mean).offsets_KK)
        return dict(zip(uploads.senders, map(sqrt, squares_K.tolist()), strict=True))


class SingleModelRule(OneModel):
    """The mean of the uploads by a rule, and the columns that it replaces, if it does.

    `weights`: of the mean, unless the rule has its own. `uploads_least`: with fewer the node keeps
    its model.
    """

    def __init__(
        self, context: RuleContext, rule: MeanRule, *, weights: Weights, uploads_least: int = 1
    ) -> None:
        super().__init__(context)
        self._rule = rule
        self._columns = rule if isinstance(rule, ColumnRule) else None
        self._weights = weights
        self._uploads_least = uploads_least
        self._before_D: Floats | None = None  # the model before the last one, of a rule of columns
        self.vectors: Mapping[str, Floats] = {}
        if self._columns is not None:
            self.vectors = first_vectors(self._columns, context)

    @property
    def mixed(self) -> Row | None:
        """The mean of the last two models, in a new row, of a rule that is judged by it; else
        None.
        """
        if self._columns is None or not self._columns.averages or self._before_D is None:
            return None
        row = self.mean.copy()
        trainable = self._trainable(row)
        np.add(trainable, self._before_D, out=trainable)
        np.multiply(trainable, np.float32(0.5), out=trainable)
        return row

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Write the mean of the uploads, then the rule's columns."""
        statistics = uploads.statistics
        rule = self._rule
        children = uploads.senders
        if len(children) < self._uploads_least:
            return self._keep(children, statistics)
        mixes = self._columns is None  # then the next model is a mixture of the uploads
        compares = rule.compares or (mixes and self.context.measures)
        products = self.products(uploads, self.current) if compares else None
        given = products if rule.compares else None
        known = RoundFacts.of(
            self.context, r, children, statistics, weights=self._weights, products=given
        )
        facts = dict(rule.begin(known) or {})
        weights_K = rule.weights(known)
        if mixes:  # else the weights are those of buffers and of the loss
            facts["weights"] = known.by_child(weights_K)
        else:
            self._before_D = self._trainable(self.current).copy()
        self.average(uploads, weights_K)
        self.current = self.mean
        distances: dict[str, float] = {}
        if mixes and products is not None:
            distances = known.by_child(products.distances(weights_K))
        elif self._columns is not None:
            self._replace(self._columns, uploads, weights_K)
            if self.context.measures:
                distances = self.distances(uploads)
        return Aggregated(statistics.mean_loss(weights_K), distances, None, facts)

    def save(self, folder: Path) -> dict[str, object]:
        """Write the rule's vectors; return its numbers."""
        write_vectors(self.vectors, folder)
        return {"numbers": self._rule.numbers}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        read_vectors(self.vectors, folder)
        self._rule.numbers = facts["numbers"]

    def _keep(
        self, children: Sequence[str], statistics: Statistics, reason: str = ""
    ) -> Aggregated:
        """Keep the model of a round that has fewer uploads than protect from wrong ones, or for
        another reason.
        """
        if self.current is not self.mean:
            self.mean[:] = self.current
            self.current = self.mean
        least = self._uploads_least
        few = f"{len(children)} uploads do not protect from wrong ones, {least} do"
        left_out = dict.fromkeys(children, reason or f"{few}: the model is kept")
        facts = {"uploads": len(children), "uploads_least": least}
        return Aggregated(float(statistics.losses_K.mean()), {}, None, facts, left_out)

    def _replace(self, rule: ColumnRule, uploads: Uploads, weights_K: Doubles) -> None:
        """Write the rule's columns over those of the mean."""
        floats_K = self._layout.floats(uploads.rows_K)
        next_D = self._trainable(self.mean)
        before_D = self._before_D
        assert before_D is not None
        missing = len(uploads.answered) < len(uploads.children)
        rows = list(uploads.answered) if missing else slice(None)  # a slice copies nothing

        def block(columns: slice) -> None:
            state = {name: values[columns] for name, values in self.vectors.items()}
            extras = {name: values_K[rows, columns] for name, values_K in uploads.extras.items()}
            uploads_KC = floats_K[rows, columns]
            before_C = before_D[columns]
            mean_C = next_D[columns]
            found = Columns(uploads_KC, before_C, mean_C, weights_K, state=state, extras=extras)
            next_D[columns] = rule.columns(found)

        by_block(self._layout.parameters, block, release=uploads.release)


class SteppedRule(WrappedRule):
    """A rule of one model, and a step of the server from the model before, by the rule's result in
    place of the mean.

    The result is replaced where it stands, so the rule dispatches what the step has made of it.
    """

    def __init__(self, rule: OneModel, step: ColumnRule, context: RuleContext) -> None:
        super().__init__(rule)
        self._one = rule
        self._step = step
        self._context = context
        self._vectors = first_vectors(step, context)

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate by the rule, then take the step; a rule that keeps its model takes none."""
        size = self._context.layout.parameters
        floats = self._context.layout.floats
        before_D = floats(self._received[uploads.children[0]])[:size].copy()
        outcome = self._rule.aggregate(r, uploads)
        if uploads.answered and len(outcome.left_out) == len(uploads.answered):
            return outcome
        next_D = floats(self._rule.model)[:size]
        none_KC = np.empty((0, 0), np.float32)
        weights_K = np.empty(0)

        def block(columns: slice) -> None:
            state = {name: values[columns] for name, values in self._vectors.items()}
            found = Columns(none_KC, before_D[columns], next_D[columns], weights_K, state=state)
            next_D[columns] = self._step.columns(found)

        by_block(size, block)
        distances = {}
        if self._context.measures:
            distances = self._one.distances(uploads)
        return replace(outcome, distances=distances)

    def save(self, folder: Path) -> dict[str, object]:
        """Write the step's vectors, too."""
        write_vectors({f"step_{name}": values for name, values in self._vectors.items()}, folder)
        return self._rule.save(folder)

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._rule.restore(folder, facts)
        read_vectors({f"step_{name}": values for name, values in self._vectors.items()}, folder)


class ExtrasRule(WrappedRule):
    """A rule of one model whose children receive vectors behind the model, and return others.

    `sent`: the vectors by name, in the shapes that the settings give them, as they are at each
    dispatch.
    """

    def __init__(
        self,
        rule: SingleModelRule,
        settings: RuleSettings,
        context: RuleContext,
        *,
        sent: Mapping[str, Floats],
    ) -> None:
        super().__init__(rule)
        self._links = links = link_layouts(settings, context.layout)
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
        rows_K = uploads.rows_K
        up = self._links.up
        models_K = rows_K[:, : up.model_bytes]
        apart = replace(uploads, rows_K=models_K, extras=up.extras_of(rows_K))
        return self._rule.aggregate(r, apart)


def single_model(
    settings: RuleSettings, context: RuleContext, rule: MeanRule, *, weights: Weights = "uniform"
) -> Rule:
    """Return a rule of one model, with the extras that its settings name; those sent are vectors of
    its state.
    """
    made = SingleModelRule(context, rule, weights=weights, uploads_least=settings.uploads_least)
    if not (settings.sends or settings.returns):
        return made
    sent = {name: made.vectors[name] for name in settings.sends}
    return ExtrasRule(made, settings, context, sent=sent)


def first_vectors(rule: ColumnRule, context: RuleContext) -> dict[str, Floats]:
    """Return the vectors of a rule's state, float32 [D] each, before its first round."""
    size = context.layout.parameters
    return {name: np.full(size, rule.first(name), np.float32) for name in rule.vectors}


def write_vectors(vectors: Mapping[str, Floats], folder: Path) -> None:
    """Write vectors of state as files."""
    for name, values in vectors.items():
        (folder / name).write_bytes(values.data)


def read_vectors(vectors: Mapping[str, Floats], folder: Path) -> None:
    """Read what `write_vectors` wrote."""
    for name, values in vectors.items():
        values[:] = np.fromfile(folder / name, np.float32)
