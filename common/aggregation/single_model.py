"""Rules of one model that all children train. FedAvg and FedAdp: the next model is the mean of the uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.aggregation import fedadp, fedavg, mixing
from common.aggregation.fedadp import Angle, Angles
from common.aggregation.mixing import Mixture, whole
from common.aggregation.statistics import Gram, gram
from common.aggregation.uploads import Aggregated, Dispatched, Uploads
from common.experiment.aggregation import FedAdp, FedAvg
from common.model.layout import ModelLayout, Row


class OneModel:
    """Base of the rules of one model: `_current` is dispatched to the children, `_mean` is the result."""

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
    def mixed(self) -> None:
        """The mean after mixing: None, because nothing is mixed."""

    def begin(self, model: Row) -> None:
        """Dispatch this model next."""
        self._current = model

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the one model for all children."""
        return [(self._current, children)]

    def _products(self, uploads: Uploads) -> Gram:
        """Return the products of the uploads' steps relative to the dispatched model, in the order of the uploads."""
        trainable = slice(0, self._layout.parameters)
        floats_K = self._layout.floats(uploads.rows_K)
        return gram(
            [floats_K[k, trainable] for k in uploads.answered],
            self._layout.floats(self._current)[trainable],
            release=uploads.release,
        )


class SingleModelRule(OneModel):
    """FedAvg or FedAdp at one node. `measures`: compute distances even if the plan does not need them."""

    def __init__(self, settings: FedAvg | FedAdp, *, layout: ModelLayout, measures: bool) -> None:
        super().__init__(layout)
        self._settings = settings
        self._measures = measures
        self._angles: Angles = {}

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Write the mean of the uploads."""
        settings, answered, statistics = self._settings, uploads.answered, uploads.statistics
        children = [uploads.children[k] for k in answered]
        products = self._products(uploads) if self._measures or isinstance(settings, FedAdp) else None
        facts: dict[str, object] = {}
        if isinstance(settings, FedAdp):
            assert products is not None
            mixture, self._angles, facts = fedadp.plan(
                self._angles, statistics, products, children=children, a=settings.a
            )
        else:
            mixture = fedavg.plan(statistics, weights=settings.weights)
        weights_K = mixture.dense(len(answered))
        rows = Mixture(tuple(answered[i] for i in mixture.indices), mixture.weights)
        plan = whole(self._layout, [rows])
        mixing.apply(plan, uploads.rows_K, layout=self._layout, out=[self._mean], release=uploads.release)
        self._current = self._mean
        facts["weights"] = dict(zip(children, weights_K.tolist(), strict=True))
        distances = {} if products is None else dict(zip(children, products.distances(weights_K).tolist(), strict=True))
        return Aggregated(float(weights_K @ statistics.losses_K), distances, None, facts)

    def save(self, folder: Path) -> dict[str, object]:
        """Return the children's angles."""
        return {"angles": {child: [angle.count, angle.smoothed] for child, angle in self._angles.items()}}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore the children's angles."""
        self._angles = {
            child: Angle(int(count), float(smoothed)) for child, (count, smoothed) in facts["angles"].items()
        }
