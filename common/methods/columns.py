"""Rules that compute each column of the next model from the same columns of the uploads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.methods.fedavg import ShareMean
from common.methods.mixing import Floats
from common.methods.statistics import Doubles


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of a round's models: trainable ones, C of D.

    `uploads_KC`, float32 [K, C]: of the uploads. `model_C`, float32 [C]: of the model that the children received; it
    must not be written. `weights_K`, float64 [K]: the uploads' weights, whose sum is 1. `state`: of the rule's vectors,
    float32 [C] each, which are kept: write into them. `extras`: of the vectors behind the uploads, float32 [K, C] each.
    """

    uploads_KC: Floats
    model_C: Floats
    weights_K: Doubles
    state: Mapping[str, Floats]
    extras: Mapping[str, Floats] = field(default_factory=dict)


class ColumnMean(ShareMean):
    """Base of the rules whose buffers are the mean: a subclass has `columns`, which replaces the trainable ones."""

    reads_model = False

    def state(self) -> Mapping[str, Floats]:
        """Return nothing: no vector is kept."""
        return {}
