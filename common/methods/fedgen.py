"""FedGen (Zhu et al. 2021, Algorithm 1): the mean of the uploads, and a generator of features learned from their heads.

Children receive the generator behind the model (`device/training/objectives/fedgen.py`) and return the counts of their
labels. After each round the generator learns for which features the children's heads predict a label
(`common/learning/generator.py`), in the node's refiner and without samples. Its tensors are the rule's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.experiment.refined_rules import LABEL_COUNTS, FedGen
from common.lazy import np
from common.methods.column_rule import MeanRule
from common.methods.extras import ExtrasRule, link_layouts
from common.methods.rule import Aggregated, RuleContext, Uploads
from common.methods.single_model import SingleModelRule, read_vectors, write_vectors
from common.model.generator import GeneratorLayout, head_of
from common.model.layout import Row
from common.model.refinement import RoundModels
from common.randomness import Purpose, generator

GENERATOR = "generator"


class GeneratorRule(ExtrasRule):
    """A rule of one model whose children receive a generator of features behind the model."""

    def __init__(self, settings: FedGen, context: RuleContext) -> None:
        layout = context.layout
        if settings.refines and context.refiner is None:
            raise RuntimeError(f"the rule {settings.name} needs a refiner")
        self._refiner = context.refiner if settings.refines else None
        self._model = layout
        self._weight, self._bias = head_of(layout)
        self._made = GeneratorLayout.of(layout, noise=settings.noise, hidden=settings.hidden)
        self._generator = np.zeros(self._made.rows.row_bytes, np.uint8)
        self._made.begin(self._generator, generator(context.seed, Purpose.GENERATOR, context.node))
        self._learned = False
        self._received = {name: np.zeros(shape, np.float32) for name, shape in self._made.sent.items()}
        links = link_layouts(settings, layout)
        rule = SingleModelRule(context, MeanRule(), weights=settings.weights)
        super().__init__(rule, links, sent=self._received)

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate the models, then teach the generator."""
        outcome = super().aggregate(r, uploads)
        if self._refiner is None:
            return outcome
        rows = [self._child(uploads, k) for k in uploads.answered]
        equal = np.full(len(rows), 1 / len(rows))
        facts = self._refiner.refine(RoundModels(r, self._made.rows, self._generator, self._generator, rows, equal))
        self._learned = True
        self._publish()
        return replace(outcome, facts={**outcome.facts, **facts})

    def save(self, folder: Path) -> dict[str, object]:
        """Write the generator, and the state of the rule below."""
        write_vectors({GENERATOR: self._columns}, folder)
        return {**super().save(folder), "learned": self._learned}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore both."""
        read_vectors({GENERATOR: self._columns}, folder)
        self._learned = facts["learned"]
        self._publish()
        super().restore(folder, facts)

    @property
    def _columns(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self._made.rows.floats(self._generator)[: self._made.columns]

    def _child(self, uploads: Uploads, k: int) -> Row:
        """Return a child's head and the counts of its labels, uint8 [row_bytes]."""
        row = np.zeros(self._made.rows.row_bytes, np.uint8)
        tensors, upload = self._made.rows.views(row), uploads.rows_K[k]
        model = self._model.floats(upload)
        tensors["head"].ravel()[:] = model[self._weight.start : self._weight.stop]
        if self._bias is not None:
            tensors["head_bias"][:] = model[self._bias.start : self._bias.stop]
        tensors[LABEL_COUNTS][:] = self._links.up.extras_of(upload)[LABEL_COUNTS]
        return row

    def _publish(self) -> None:
        """Send the generator from now on, or zeros until it has learned."""
        for name, values in self._made.linear(self._generator).items():
            self._received[name][:] = values if self._learned else 0
