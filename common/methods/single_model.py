"""Rules of one model that all children train: the next model is a mean of the uploads, or a step towards it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Final, Protocol

from common.experiment.aggregation import FedAdp, FedDyn, FedNova, Krum, Median, Scaffold, TrimmedMean
from common.experiment.rules import OwnRule, RuleSettings
from common.lazy import np
from common.methods import fedadp, fedavg, mixing, robust, server_steps
from common.methods.blocks import cut, over
from common.methods.columns import Columns
from common.methods.fednova import NormalisedSteps
from common.methods.mixing import Floats, Mixture, whole
from common.methods.own_rule import OwnColumns
from common.methods.server_steps import STEPS
from common.methods.statistics import Doubles, Gram, Statistics, gram
from common.methods.uploads import Aggregated, Dispatched, RuleContext, Uploads
from common.model.layout import ModelLayout, Row


class MeanPlan(Protocol):
    """How the uploads are averaged."""

    compares: bool  # whether `of` needs the products of the uploads' steps

    def of(
        self, r: int, statistics: Statistics, products: Gram | None, children: Sequence[str]
    ) -> tuple[Mixture, Mapping[str, object]]:
        """Return W [1, K] for the uploads of these children in round r, and facts for the plan."""

    def save(self) -> dict[str, object]:
        """Return the state, in a form that JSON can hold."""

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore what `save` returned."""


class ColumnPlan(MeanPlan, Protocol):
    """A mean whose trainable columns are not a mixture of the uploads."""

    reads_model: bool  # whether `columns` reads the model that the children received

    def columns(self, block: Columns) -> Doubles:
        """Return columns of the next model, float64 [C]."""

    def state(self) -> Mapping[str, Floats]:
        """Return the state besides that of `save`, float32 [D] each, by name; written in place by `restore`."""


COLUMNS: Final[Mapping[type[RuleSettings], Callable[[Any, RuleContext], ColumnPlan]]] = {
    Median: robust.MedianColumns,
    TrimmedMean: robust.TrimmedColumns,
    FedNova: NormalisedSteps,
    OwnRule: OwnColumns,
}
MEANS: Final[Mapping[type[RuleSettings], Callable[[Any], MeanPlan]]] = {  # others: by shares
    FedAdp: fedadp.AngleMean,
    Krum: robust.KrumMean,
    Scaffold: fedavg.uniform,
    FedDyn: fedavg.uniform,
}


class OneModel:
    """Base of the rules of one model: `_current` is dispatched to the children, `_mean` is the result."""

    choose: Final = None

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._mean = layout.empty()
        self._current: Row = self._mean

    @property
    def reads_start(self) -> bool:
        """Whether `begin` reads the model's values: never, it only passes the model on."""
        return False

    @property
    def model(self) -> Row:
        """The mean of the last uploads, or of the selected ones."""
        return self._mean

    @property
    def mixed(self) -> Row | None:
        """The mean after mixing: None, because nothing is mixed."""
        return None

    def begin(self, model: Row) -> None:
        """Dispatch this model next."""
        self._current = model

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the one model for all children."""
        return [(self._current, children)]

    def _trainable(self, row: Row) -> Floats:
        return self._layout.floats(row)[: self._layout.parameters]

    def _products(self, uploads: Uploads) -> Gram:
        """Return the products of the uploads' steps relative to the dispatched model, in the order of the uploads."""
        trainable = slice(0, self._layout.parameters)
        floats_K = self._layout.floats(uploads.rows_K)
        return gram(
            [floats_K[k, trainable] for k in uploads.answered],
            self._layout.floats(self._current)[trainable],
            release=uploads.release,
        )

    def _distances(self, uploads: Uploads) -> list[float]:
        """Return the distance of each upload to the next model, which is not their mean."""
        floats_K, parameters = self._layout.floats(uploads.rows_K), self._layout.parameters
        rows = [floats_K[k, :parameters] for k in uploads.answered]
        squares_KK = gram(rows, self._trainable(self._mean), release=uploads.release).offsets_KK
        return [sqrt(square) for square in np.diagonal(squares_KK).tolist()]


class SingleModelRule(OneModel):
    """A mean of the uploads, and what follows it: nothing, or a server optimiser's step."""

    def __init__(self, settings: RuleSettings, context: RuleContext) -> None:
        super().__init__(context.layout)
        self._measures = context.measures
        self._uploads_least = settings.uploads_least
        column_plan = COLUMNS.get(type(settings))
        self._columns = column_plan(settings, context) if column_plan is not None else None
        self._mean_plan: MeanPlan = self._columns or MEANS.get(type(settings), fedavg.ShareMean)(settings)
        step = STEPS.get(type(settings))
        self._step = step(settings, context) if step is not None else None
        self._before_D: Floats | None = None  # the model before the last step

    @property
    def mixed(self) -> Row | None:
        """The mean of the last two models, in a new row, of a rule that is judged by it; else None."""
        if self._step is None or not self._step.averages or self._before_D is None:
            return None
        row = self._mean.copy()
        trainable = self._trainable(row)
        np.add(trainable, self._before_D, out=trainable)
        np.multiply(trainable, np.float32(0.5), out=trainable)
        return row

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Write the mean of the uploads, then take the step."""
        answered, statistics, step = uploads.answered, uploads.statistics, self._step
        children = [uploads.children[k] for k in answered]
        if len(answered) < self._uploads_least:
            return self._keep(children, statistics)
        mixes = step is None and self._columns is None  # then the next model is a mixture of the uploads
        compares = self._mean_plan.compares or (self._measures if mixes else step is not None and step.compares)
        products = self._products(uploads) if compares else None
        mixture, facts = self._mean_plan.of(r, statistics, products, children)
        weights_K = mixture.dense(len(answered))
        reads_model = step is not None or (self._columns is not None and self._columns.reads_model)
        self._before_D = self._trainable(self._current).copy() if reads_model else None
        rows = Mixture(tuple(answered[i] for i in mixture.indices), mixture.weights)
        plan = whole(self._layout, [rows])
        mixing.apply(plan, uploads.rows_K, layout=self._layout, out=[self._mean], release=uploads.release)
        self._current = self._mean
        facts = dict(facts)
        if self._columns is None:  # else the weights are those of buffers and of the loss alone
            facts["weights"] = dict(zip(children, weights_K.tolist(), strict=True))
        distances = [] if products is None else products.distances(weights_K).tolist()
        if self._columns is not None:
            self._replace_columns(self._columns, uploads, weights_K)
        if step is not None and self._before_D is not None:
            facts |= step.begin(products, weights_K)
            server_steps.take(step, self._before_D, self._trainable(self._mean))
        if not mixes:
            distances = self._distances(uploads) if self._measures else []
        loss = float(weights_K @ statistics.losses_K)
        return Aggregated(loss, dict(zip(children, distances, strict=False)), None, facts)

    def _keep(self, children: Sequence[str], statistics: Statistics) -> Aggregated:
        """Keep the model of a round that has fewer uploads than protect from wrong ones."""
        if self._current is not self._mean:
            self._mean[:] = self._current
            self._current = self._mean
        reason = f"{len(children)} uploads do not protect from wrong ones, {self._uploads_least} do: the model is kept"
        facts = {"uploads": len(children), "uploads_least": self._uploads_least}
        return Aggregated(float(statistics.losses_K.mean()), {}, None, facts, dict.fromkeys(children, reason))

    def save(self, folder: Path) -> dict[str, object]:
        """Write the state of the plan and of the step."""
        server_steps.save(self.vectors, folder)
        return self._mean_plan.save()

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore both."""
        server_steps.restore(self.vectors, folder)
        self._mean_plan.restore(facts)

    @property
    def vectors(self) -> Mapping[str, Floats]:
        """The vectors of its state, float32 [D] each, by name."""
        owner = self._step or self._columns
        return owner.state() if owner is not None else {}

    def _replace_columns(self, plan: ColumnPlan, uploads: Uploads, weights_K: Doubles) -> None:
        """Write the trainable columns of the next model."""
        floats_K, answered = self._layout.floats(uploads.rows_K), list(uploads.answered)
        target_D, state = self._trainable(self._mean), plan.state()
        model_D = self._before_D if self._before_D is not None else target_D

        def block(columns: slice) -> None:
            found = {name: values[columns] for name, values in state.items()}
            extras = {name: values_K[answered, columns] for name, values_K in uploads.extras.items()}
            part = Columns(floats_K[answered, columns], model_D[columns], weights_K, found, extras)
            target_D[columns] = plan.columns(part)

        over(list(cut(0, self._layout.parameters)), block, release=uploads.release)
