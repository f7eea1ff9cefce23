"""One node's algorithm: which model each child gets, and what becomes of what the children send.

A node calls, in this order: `begin` with the model from above (the cloud: with the initial model, once), then for
each of its rounds `dispatch` and `aggregate`; an institution begins again with each global round's model. To go
on from a checkpoint, the cloud begins with the model that was saved and calls `restore`; an institution restores,
and begins when the next model comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.aggregation.cached_uploads import CachedUploadRule
from common.aggregation.multi_model import MultiModelRule
from common.aggregation.single_model import SingleModelRule
from common.aggregation.uploads import Aggregated, Uploads
from common.experiment.aggregation import FedAdp, FedAvg, FedCDA, Rule
from common.model.layout import ModelLayout, Row

__all__ = ["Aggregated", "Aggregator", "Uploads", "build"]


class Aggregator(Protocol):
    """One node's algorithm over its children."""

    @property
    def reads_start(self) -> bool:
        """Return whether the next `begin` reads the model's values: they must have arrived."""

    @property
    def model(self) -> Row:
        """Return the mean: what is evaluated, sent up and deployed. One array, written by each `aggregate`."""

    @property
    def mixed(self) -> Row | None:
        """Return the mean of the models after mixing where it differs from `model`, else None."""

    def begin(self, model: Row) -> None:
        """Start from a model, uint8 [row_bytes], that stays unchanged until the next `begin`.

        It may be still arriving unless `reads_start`; it must have arrived when the first uploads are aggregated.
        """

    def dispatch(self, r: int, children: Sequence[str]) -> dict[str, Row]:
        """Return the row that each child gets in round r, in the order of the uploads' rows.

        Children that get equal models share one array object. The rows are valid until the next `aggregate` or
        `begin`. Raises ValueError where a rule of K models meets another number of children than it has models.
        """

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Make the next models of round r's uploads, whose values are finite. May write into the missing rows."""

    def save(self, folder: Path) -> dict[str, object]:
        """Write what the next round needs beside `model` as files into a fresh folder; return facts fit for JSON."""

    def restore(self, folder: Path, facts: Mapping[str, object]) -> None:
        """Go on from what `save` wrote; the folder may be removed afterwards."""


def build(
    settings: Rule,
    *,
    layout: ModelLayout,
    node: str,
    tier: str,
    seed: int,
    rows: Callable[[str, int], npt.NDArray[np.uint8]],
    folder: Path | None = None,
) -> Aggregator:
    """Return a node's algorithm. `tier` is "cloud" or "institution".

    `rows(name, count)` hands out memory for models, uint8 [count, row_bytes]; `folder` is where FedCDA keeps cached
    uploads beyond its memory, None: all stay in memory.
    """
    measures = tier == "cloud"  # Tempo's distances
    if isinstance(settings, FedAvg | FedAdp):
        return SingleModelRule(settings, layout=layout, measures=measures)
    if isinstance(settings, FedCDA):
        return CachedUploadRule(settings, layout=layout, node=node, seed=seed, measures=measures, folder=folder)
    return MultiModelRule(settings, layout=layout, node=node, seed=seed, measures=measures, rows=rows)
