"""One node's aggregation rule: it chooses each child's model and aggregates the uploads.

Call order: `begin` with the parent's model (at the cloud once, with the initial model), then `dispatch` and `aggregate`
in each of the node's rounds. An institution calls `begin` in every global round. To resume from a checkpoint, the cloud
calls `begin` with the saved model and then `restore`; an institution calls `restore`, and `begin` when the next model
arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from common.aggregation.cached_uploads import CachedUploadRule
from common.aggregation.multi_model import MultiModelRule
from common.aggregation.server_steps import STEPS
from common.aggregation.single_model import COLUMNS, SingleModelRule
from common.aggregation.uploads import Aggregated, Dispatched, RuleContext, Uploads
from common.experiment.aggregation import FedAdp, FedAvg, FedCDA, FedCross, FedMR, Independent, Krum, RuleSettings
from common.model.layout import ModelLayout, Row

__all__ = ["Aggregated", "Aggregator", "Uploads", "build"]


class Aggregator(Protocol):
    """One node's aggregation rule over its children."""

    @property
    def reads_start(self) -> bool:
        """Whether the next `begin` reads the model's values, which must have arrived then."""

    @property
    def model(self) -> Row:
        """The mean: evaluated, uploaded and deployed. One array, written by each `aggregate`."""

    @property
    def mixed(self) -> Row | None:
        """The mean of the models after mixing if it differs from `model`, else None."""

    def begin(self, model: Row) -> None:
        """Start from a model, uint8 [row_bytes], which must not change until the next `begin`.

        Unless `reads_start`, it may still be arriving: all children receive it in the next round. It must be complete
        when the first uploads are aggregated.
        """

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the models of round r with their children, whose order is that of the uploads' rows.

        Equal models are one. The arrays are valid until the next `aggregate` or `begin`.
        Raises ValueError if a multi-model rule has another number of models than there are children.
        """

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Compute the next models from round r's uploads, whose values are finite. May overwrite missing rows."""

    def save(self, folder: Path) -> dict[str, object]:
        """Write the state besides `model` as files into a new folder; return facts that JSON can hold."""

    def restore(self, folder: Path, facts: Mapping[str, object]) -> None:
        """Restore the state that `save` wrote; the folder may be removed afterwards."""


BUILT: Final[Mapping[type[RuleSettings], Callable[[Any, RuleContext], Aggregator]]] = {
    FedAvg: SingleModelRule,
    FedAdp: SingleModelRule,
    **dict.fromkeys((*STEPS, *COLUMNS, Krum), SingleModelRule),
    Independent: MultiModelRule,
    FedCross: MultiModelRule,
    FedMR: MultiModelRule,
    FedCDA: CachedUploadRule,
}


def build(
    settings: RuleSettings,
    *,
    layout: ModelLayout,
    node: str,
    seed: int,
    measures: bool,
    rows: Callable[[str, int], npt.NDArray[np.uint8]],
    folder: Path | None = None,
    momentum: float = 0.0,
) -> Aggregator:
    """Return a node's rule; for the arguments see `RuleContext`."""
    return BUILT[type(settings)](settings, RuleContext(layout, node, seed, measures, rows, folder, momentum))
