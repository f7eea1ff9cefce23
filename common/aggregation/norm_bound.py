"""A bound for the length of a child's step, before any rule: c times the median of the round's lengths.

    ||v_k - z_k|| <= c median of ||v_i - z_i||          over trainable columns, z_k: the model that child k received

Longer steps are clipped to the bound (Sun et al. 2019, with a bound that follows the round), or their uploads are left
out as if they had not come. c is at least 1, so half of the uploads always stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.aggregation.blocks import cut, over
from common.aggregation.selection.situation import Choose
from common.aggregation.statistics import Doubles
from common.aggregation.uploads import Aggregated, Aggregator, Dispatched, Uploads
from common.experiment.aggregation import NormBound
from common.model.layout import ModelLayout, Row


class NormBoundedRule:
    """A rule whose uploads are bounded first."""

    def __init__(self, rule: Aggregator, settings: NormBound, layout: ModelLayout) -> None:
        self._rule = rule
        self._settings = settings
        self._layout = layout
        self._received: Mapping[str, Row] = {}

    @property
    def choose(self) -> Choose | None:
        """The rule's."""
        return self._rule.choose

    @property
    def reads_start(self) -> bool:
        """As the rule's."""
        return self._rule.reads_start

    @property
    def model(self) -> Row:
        """The rule's."""
        return self._rule.model

    @property
    def mixed(self) -> Row | None:
        """The rule's."""
        return self._rule.mixed

    def begin(self, model: Row) -> None:
        """Start the rule from a model."""
        self._rule.begin(model)

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the rule's models."""
        found = self._rule.dispatch(r, children)
        self._received = {child: row for row, those in found for child in those}
        return found

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Bound the uploads in their rows, then aggregate them. Facts: each step's length, and whose was too long."""
        lengths = self._lengths(uploads)
        median = float(np.median(list(lengths.values())))
        most, clips = self._settings.factor * median, self._settings.action == "clip"
        long = {name: length for name, length in lengths.items() if length > most}
        reports = list(uploads.reports)
        for k, name in enumerate(uploads.children):
            if name in long and clips:
                self._shorten(uploads, k, most / long[name])
            elif name in long:
                reports[k] = None
        done = self._rule.aggregate(r, replace(uploads, reports=tuple(reports)))
        facts = {**done.facts, "step_lengths": lengths, "clipped" if clips else "left_out": list(long)}
        reasons = {} if clips else {name: _reason(length, median) for name, length in long.items()}
        return replace(done, facts=facts, left_out=reasons)

    def save(self, folder: Path) -> dict[str, object]:
        """Write the rule's state."""
        return self._rule.save(folder)

    def restore(self, folder: Path, facts: Mapping[str, object]) -> None:
        """Restore the rule's state."""
        self._rule.restore(folder, facts)

    def _lengths(self, uploads: Uploads) -> dict[str, float]:
        """Return ||v_k - z_k|| of the uploads that came, by child."""
        floats_K = self._layout.floats(uploads.rows_K)
        pairs = [(k, self._layout.floats(self._received[uploads.children[k]])) for k in uploads.answered]

        def block(columns: slice) -> Doubles:
            steps = (floats_K[k, columns].astype(np.float64) - z[columns] for k, z in pairs)
            return np.array([step @ step for step in steps])

        squares = over(list(cut(0, self._layout.parameters)), block, release=uploads.release)
        lengths_K = np.sqrt(np.sum(squares, axis=0))
        return {uploads.children[k]: float(length) for (k, _), length in zip(pairs, lengths_K, strict=True)}

    def _shorten(self, uploads: Uploads, k: int, share: float) -> None:
        """Replace an upload's trainable columns by z + share (v - z)."""
        upload = self._layout.floats(uploads.rows_K)[k]
        z = self._layout.floats(self._received[uploads.children[k]])

        def block(columns: slice) -> None:
            start = z[columns].astype(np.float64)
            upload[columns] = start + share * (upload[columns] - start)

        over(list(cut(0, self._layout.parameters)), block, release=uploads.release)


def _reason(length: float, median: float) -> str:
    return f"its step is {length / median:.4g} times as long as the median" if median else "the median step is zero"
