"""Rules that bound what some wrong uploads can do: median, trimmed mean, Krum and multi-Krum.

    median         the median of each column                                                  (Yin et al. 2018)
    trimmed mean   the mean of each column without its floor(trim K) largest and smallest     (Yin et al. 2018)
    Krum           s_k = sum of the K - f - 2 least ||v_k - v_i||^2, i != k                   (Blanchard et al. 2017)
                   the upload of the least s_k; multi-Krum: the mean of the m of the least

Over trainable columns and without weights. Buffers are those of the uniform mean; with Krum of the chosen uploads. With
fewer uploads than protect (`uploads_least` of the settings) the node keeps its model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.experiment.aggregation import Krum, Median, TrimmedMean
from common.experiment.rounds import share_of
from common.lazy import np
from common.methods.columns import ColumnMean, Columns
from common.methods.fedavg import UNIFORM, ShareMean
from common.methods.mixing import Mixture
from common.methods.statistics import Doubles, Gram, Statistics
from common.methods.uploads import RuleContext


class MedianColumns(ColumnMean):
    """The median of each column."""

    def __init__(self, settings: Median, context: RuleContext) -> None:
        super().__init__(UNIFORM)

    def columns(self, block: Columns) -> Doubles:
        """Return the medians [C]."""
        found: Doubles = np.median(block.uploads_KC, axis=0)
        return found


class TrimmedColumns(ColumnMean):
    """The trimmed mean of each column."""

    def __init__(self, settings: TrimmedMean, context: RuleContext) -> None:
        super().__init__(UNIFORM)
        self._trim = settings.trim

    def columns(self, block: Columns) -> Doubles:
        """Return the means [C] of the values that are left."""
        count = len(block.uploads_KC)
        out = share_of(count, self._trim)
        found: Doubles = np.sort(block.uploads_KC, axis=0)[out : count - out].mean(axis=0, dtype=np.float64)
        return found


class KrumMean(ShareMean):
    """The mean of the uploads that lie closest to most others."""

    compares = True

    def __init__(self, settings: Krum) -> None:
        super().__init__(UNIFORM)
        self._settings = settings

    def of(
        self, r: int, statistics: Statistics, products: Gram | None, children: Sequence[str]
    ) -> tuple[Mixture, Mapping[str, object]]:
        """Return equal weights for the chosen uploads; facts: each child's score, and who was chosen."""
        assert products is not None
        scores_K = scores(products, self._settings.wrong)
        chosen = sorted(np.argsort(scores_K, kind="stable")[: self._settings.keep].tolist())
        weights_K = np.zeros(len(children))
        weights_K[chosen] = 1 / len(chosen)
        facts = {
            "scores": dict(zip(children, scores_K.tolist(), strict=True)),
            "chosen": [children[k] for k in chosen],
        }
        return Mixture.of(weights_K), facts


def scores(products: Gram, wrong: int) -> Doubles:
    """Return Krum's s_k, with at least one neighbour."""
    squares_K = np.diagonal(products.offsets_KK)
    apart_KK = np.maximum(squares_K[:, None] + squares_K[None, :] - 2 * products.offsets_KK, 0.0)
    np.fill_diagonal(apart_KK, np.inf)
    neighbours = max(len(squares_K) - wrong - 2, 1)
    nearest_KN = np.sort(apart_KK, axis=1)[:, :neighbours]
    found: Doubles = np.where(np.isfinite(nearest_KN), nearest_KN, 0.0).sum(axis=1)
    return found
