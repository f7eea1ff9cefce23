"""A node of one model: FedAvg and FedAdp. All children train what the node holds; their mean is what it holds next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.aggregation import fedavg, mixing
from common.aggregation.mixing import whole
from common.aggregation.statistics import gram
from common.aggregation.uploads import Outcome, Uploads
from common.layout import ModelLayout, Row
from common.rules import FedAdp, FedAvg


class SingleModel:
    """One model at one node. `measures`: distances are wanted though the plan needs none."""

    def __init__(self, settings: FedAvg | FedAdp, *, layout: ModelLayout, measures: bool) -> None:
        self._settings = settings
        self._layout = layout
        self._measures = measures
        self._mean = layout.empty()
        self._current: Row = self._mean

    @property
    def reads_start(self) -> bool:
        """Return that the model from above is only passed on."""
        return False

    @property
    def stateful(self) -> bool:
        """Return whether a child's angles outlive a global iteration."""
        return isinstance(self._settings, FedAdp)

    @property
    def model(self) -> Row:
        """Return the mean of the last uploads."""
        return self._mean

    @property
    def mixed(self) -> None:
        """Return that nothing is mixed after the mean."""

    def begin(self, model: Row) -> None:
        """Hand this model to the children next."""
        self._current = model

    def dispatch(self, r: int, children: Sequence[str]) -> dict[str, Row]:
        """Return the one model for all."""
        return dict.fromkeys(children, self._current)

    def aggregate(self, r: int, uploads: Uploads) -> Outcome:
        """Write the mean of the uploads that are there."""
        layout, answered, statistics = self._layout, uploads.answered, uploads.statistics
        assert isinstance(self._settings, FedAvg)
        mixture = fedavg.plan(statistics, weights=self._settings.weights)
        weights_K = mixture.dense(len(answered))
        distances: dict[str, float] = {}
        if self._measures:
            trainable = slice(0, layout.parameters)
            floats = layout.floats(uploads.rows_K)
            products = gram(
                [floats[k, trainable] for k in answered],
                layout.floats(self._current)[trainable],
                release=uploads.release,
            )
            found = products.distances(weights_K)
            distances = {uploads.children[k]: float(d) for k, d in zip(answered, found, strict=True)}
        rows = mixing.Mixture(tuple(answered[i] for i in mixture.indices), mixture.weights)
        mixing.apply(whole(layout, [rows]), uploads.rows_K, layout=layout, out=[self._mean], release=uploads.release)
        self._current = self._mean
        weights = {uploads.children[k]: float(w) for k, w in zip(answered, weights_K, strict=True)}
        return Outcome(float(weights_K @ statistics.losses_K), distances, None, {"weights": weights})

    def save(self, folder: Path) -> dict[str, object]:
        """Return what is kept of each child."""
        return {}

    def restore(self, folder: Path, facts: Mapping[str, object]) -> None:
        """Take up what is kept of each child."""
