"""A node of K models: FedCross, FedMR and the models that are never mixed.

Nobody trains on their mean: model j goes to a child drawn anew in each round (the papers' shuffle), comes back as
upload j, and is mixed with others into the next model j. The mean of the uploads is evaluated, sent up and deployed.
A child that fails hands in what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.aggregation import fedcross, fedmr, independent, mixing
from common.aggregation.mixing import Mixture, Part, whole
from common.aggregation.statistics import Gram, gram, gram_by_entry
from common.aggregation.uploads import Outcome, Uploads
from common.layout import ModelLayout, Row
from common.randomness import Purpose, generator
from common.rules import FedCross, FedMR, Several


class SeveralModels:
    """K models at one node; while all are equal they are one row."""

    def __init__(
        self,
        settings: Several,
        *,
        layout: ModelLayout,
        node: str,
        seed: int,
        rows: Callable[[str, int], npt.NDArray[np.uint8]],
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._node = node
        self._seed = seed
        self._memory = rows
        self._layers = fedmr.layers(settings, layout) if isinstance(settings, FedMR) else ()
        self._mean = layout.empty()
        self._start: Row = self._mean  # what all models are while they are equal
        self._rows: npt.NDArray[np.uint8] | None = None
        self._distinct = False
        self._mixed: Mixture | None = None

    @property
    def reads_start(self) -> bool:
        """Return whether the next model from above is needed to recentre K models."""
        return self._distinct and self._settings.carry == "recentre"

    @property
    def model(self) -> Row:
        """Return the mean of the last uploads."""
        return self._mean

    @property
    def mixed(self) -> Row | None:
        """Return the mean of the models after mixing where the last plan changed it: a row of its own."""
        if self._mixed is None or self._rows is None:
            return None
        row = self._layout.empty()
        mixing.apply(whole(self._layout, [self._mixed]), self._rows, layout=self._layout, out=[row])
        return row

    def begin(self, model: Row) -> None:
        """Start all models from this one, or move them so that it is their mean (`carry`)."""
        if self.reads_start and self._rows is not None:
            mixing.recentre(list(self._rows), model, layout=self._layout)
        else:
            self._start, self._distinct = model, False
        self._mixed = None

    def dispatch(self, r: int, children: Sequence[str]) -> dict[str, Row]:
        """Return model j for the j-th of the children in a random order."""
        order = generator(self._seed, Purpose.DISPATCH, self._node, r).permutation(len(children))
        return {children[place]: row for place, row in zip(order, self._models(len(children)), strict=True)}

    def aggregate(self, r: int, uploads: Uploads) -> Outcome:
        """Mix the uploads into the next models, and take their mean."""
        count, answered = len(uploads.children), uploads.answered
        for k, row in enumerate(self._models(count)):
            if uploads.reports[k] is None:
                uploads.rows_K[k] = row
        shares_K = np.zeros(count)
        shares_K[list(answered)] = uploads.statistics.shares_K
        loss = float(uploads.statistics.losses_K @ self._weights(shares_K[list(answered)]))
        weights_K = self._weights(shares_K)
        mean = Mixture.of(weights_K)
        layout = self._layout
        trainable = list(layout.floats(uploads.rows_K)[:, : layout.parameters])
        products = gram(trainable, trainable[0], release=uploads.release)
        facts: dict[str, object] = {"stand_ins": [uploads.children[k] for k in range(count) if k not in answered]}
        self._mixed = None
        if count == 1 or r < getattr(self._settings, "first_stage_rounds", 0):
            mixing.apply(
                whole(layout, [mean]), uploads.rows_K, layout=layout, out=[self._mean], release=uploads.release
            )
            self._start, self._distinct = self._mean, False
            spread = 0.0
            facts["stage"] = "first"
        else:
            plan, found = self._plan(r, products, uploads)
            facts |= found
            if self._rows is None:
                self._rows = self._memory("models", count)
            mixing.apply(
                [part.with_first(mean) for part in plan],
                uploads.rows_K,
                layout=layout,
                out=[self._mean, *self._rows],
                release=uploads.release,
            )
            self._distinct = True
            # Permutations, one for each part, leave the spread as it was.
            mixing_KK = np.array([mixture.dense(count) for mixture in plan[0].mixtures])
            spread = products.spread(mixing_KK if len(plan) == 1 else np.eye(count))
            if not np.allclose(mixing_KK.mean(axis=0), weights_K, rtol=0, atol=1e-12):
                self._mixed = Mixture.of([1 / count] * count)
        distances = products.distances(weights_K)
        return Outcome(loss, {uploads.children[k]: float(distances[k]) for k in answered}, spread, facts)

    def save(self, folder: Path) -> dict[str, object]:
        """Write the models, unless they are all equal to the model beside which this is saved."""
        if not self._distinct or self._rows is None:
            return {"models": 0}
        with (folder / "models.bin").open("wb") as file:
            for row in self._rows:
                file.write(row.data)
        return {"models": len(self._rows)}

    def restore(self, folder: Path, facts: Mapping[str, object]) -> None:
        """Read the models."""
        count = facts["models"]
        assert isinstance(count, int)
        self._distinct = count > 0
        if count:
            self._rows = self._memory("models", count)
            with (folder / "models.bin").open("rb") as file:
                for row in self._rows:
                    file.readinto(row.data)

    def _models(self, count: int) -> list[Row]:
        if not self._distinct or self._rows is None:
            return [self._start] * count
        if len(self._rows) != count:
            raise ValueError(f"{count} children take part, but there are {len(self._rows)} models")
        return list(self._rows)

    def _weights(self, shares_K: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the weights of a plain mean: the shares of data, in which a stand-in has none, or uniform."""
        return shares_K if self._settings.weights == "data" else np.full(len(shares_K), 1 / len(shares_K))

    def _plan(self, r: int, products: Gram, uploads: Uploads) -> tuple[Sequence[Part], dict[str, object]]:
        settings, count = self._settings, len(uploads.children)
        if isinstance(settings, FedCross):
            stage = fedcross.stage(settings, r, count)
            if stage.similar:
                entries = [products]
                if settings.similarity == "pairwise":
                    entries = gram_by_entry(uploads.rows_K, self._layout)
                similarity_KK = fedcross.similarity(settings, entries)
                partners = [fedcross.by_similarity(similarity_KK, lowest=settings.strategy == "lowest")]
            else:
                partners = [fedcross.in_order(r, count, place) for place in range(stage.partners)]
            facts = {"stage": stage.name, "alpha": stage.alpha, "partners": partners}
            return whole(self._layout, fedcross.plan(stage, partners, count)), facts
        if isinstance(settings, FedMR):
            return fedmr.plan(self._layers, count, seed=self._seed, node=self._node, r=r)
        return whole(self._layout, independent.plan(count)), {}
