"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1): a step towards the mean of the uploads, and control variates.

    next = x + eta (mean of y_k - x)                          over trainable columns, of the S children with an upload
    c    = c + (1 / N) sum of (c_k+ - c_k)                    N: all children

The children receive x and c, and return y_k and c_k+ - c_k (`device/training/objectives/scaffold.py`). If all take part
c is the mean of the c_k. Buffers are the uniform mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from common.experiment.aggregation import Scaffold
from common.lazy import np
from common.methods import server_steps
from common.methods.blocks import cut, over
from common.methods.extras import ExtrasRule, link_layouts
from common.methods.single_model import SingleModelRule
from common.methods.uploads import Aggregated, RuleContext, Uploads

CONTROL: Final = "control"


class ControlVariateRule(ExtrasRule):
    """A rule of one model whose children receive the control variate c behind the model, and return its change."""

    def __init__(self, settings: Scaffold, context: RuleContext) -> None:
        links = link_layouts(settings, context.layout)
        self._children = context.children
        self._control = np.zeros(context.layout.parameters, np.float32)
        rule = SingleModelRule(settings, context)
        super().__init__(rule, links, sent={CONTROL: self._control})

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate the models, then add the mean change of the control variates."""
        outcome = super().aggregate(r, uploads)
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
        return super().save(folder)

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore both."""
        server_steps.restore({CONTROL: self._control}, folder)
        super().restore(folder, facts)
