"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1): a step towards the mean of the uploads, and control variates.

    next = x + eta (mean of y_k - x)                          over trainable columns, of the S children with an upload
    c    = c + (1 / N) sum of (c_k+ - c_k)                    N: all children

The children receive x and c, and return y_k and c_k+ - c_k (`device/training/objectives/scaffold.py`). If all take part
c is the mean of the c_k. Buffers are the uniform mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.aggregation import server_steps
from common.aggregation.blocks import cut, over
from common.aggregation.extras import link_layouts
from common.aggregation.single_model import SingleModelRule
from common.aggregation.uploads import Aggregated, Dispatched, RuleContext, Uploads
from common.experiment.aggregation import Scaffold
from common.model.layout import Row

CONTROL: Final = "control"


class ControlVariateRule:
    """A rule of one model whose children receive the control variate c behind the model, and return its change."""

    choose: Final = None
    reads_start = True  # the row that is dispatched is another one

    def __init__(self, settings: Scaffold, context: RuleContext) -> None:
        self._rule = SingleModelRule(settings, context)
        self._links = link_layouts(settings, context.layout)
        self._children = context.children
        self._row = self._links.down.empty()
        self._control = self._links.down.extra_columns(self._row)
        self._control[:] = 0

    @property
    def model(self) -> Row:
        """The mean, or the step's result."""
        return self._rule.model

    @property
    def mixed(self) -> Row | None:
        """None: nothing is mixed."""
        return self._rule.mixed

    def begin(self, model: Row) -> None:
        """Dispatch this model next."""
        self._rule.begin(model)

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the model and c for all children."""
        ((model, _),) = self._rule.dispatch(r, children)
        self._row[: model.size] = model
        return [(self._row, children)]

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate the models, then add the mean change of the control variates."""
        models_K = uploads.rows_K[:, : self._links.model.row_bytes]
        outcome = self._rule.aggregate(r, replace(uploads, rows_K=models_K))
        changes_K = self._links.up.extra_columns(uploads.rows_K)

        def block(columns: slice) -> None:
            total = np.zeros(columns.stop - columns.start)
            for k in uploads.answered:
                total += changes_K[k, columns]
            self._control[columns] += total / self._children

        over(list(cut(0, len(self._control))), block, release=uploads.release)
        return outcome

    def save(self, folder: Path) -> dict[str, object]:
        """Write c, and the state of the rule below."""
        server_steps.save({CONTROL: self._control}, folder)
        return self._rule.save(folder)

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore both."""
        server_steps.restore({CONTROL: self._control}, folder)
        self._rule.restore(folder, facts)
