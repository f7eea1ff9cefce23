"""Bulyan (El Mhamdi et al. 2018): uploads chosen one after another by Krum, then a mean around
their median.

    S: theta = K - 2 f uploads, each the one of the least Krum score among those that are left
    w_next[c] = mean of the beta = theta - 2 f values of S that are nearest to the median of S in
    column c

Over trainable columns and without weights; buffers are the mean of those of S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.mixing import cut
from fedstrata.common.methods.robust import check_uploads, scores
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import CombiningSettings
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles, Gram

PIECE_COLUMNS: Final = 4096  # sorted at once: places take twice the memory of values


class Bulyan(CombiningSettings):
    """One model: in each column the mean of the values nearest to the median, of uploads that Krum
    chooses.
    """

    step_models = 1.0
    condition: ClassVar[str] = "n >= 4 f + 3, with f of the key `wrong`"

    name: Literal["bulyan"] = "bulyan"  # the rule
    # wrong uploads that are expected (f); 0 is the uniform mean
    wrong: Annotated[int, Field(ge=0)] = 1

    @property
    def uploads_least(self) -> int:
        """4 f + 3, of its theorem; any number if none is expected to be wrong."""
        if self.wrong:
            return 4 * self.wrong + 3
        return 1

    def tolerates(self, uploads: int) -> int:
        """Return f, if there are so many uploads."""
        if uploads >= self.uploads_least:
            return self.wrong
        return 0

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that enough uploads come. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        check_uploads(
            f"{key}.wrong", self.wrong, self.uploads_least, children, uploads, instead="Lower it"
        )

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, NearMedian(wrong=self.wrong))


class NearMedian(ColumnRule):
    """Bulyan's two stages."""

    compares = True

    def __init__(self, *, wrong: int) -> None:
        self._wrong = wrong

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Choose uploads; return the chosen children, and weights of 0 for the others."""
        assert facts.products is not None
        offsets_KK = facts.products.offsets_KK
        left = list(range(len(offsets_KK)))
        chosen = []
        for _ in range(max(len(left) - 2 * self._wrong, 1)):
            some = np.ix_(left, left)
            scores_L = scores(Gram(offsets_KK[some], np.zeros(len(left)), 0.0), self._wrong)
            chosen.append(left.pop(int(scores_L.argmin())))
        self._chosen = sorted(chosen)
        self._weights_K = np.zeros(len(offsets_KK))
        self._weights_K[self._chosen] = 1 / len(chosen)
        return {
            "chosen": [facts.children[k] for k in self._chosen],
            "weights": facts.by_child(self._weights_K),
        }

    def weights(self, facts: RoundFacts) -> Doubles:
        return self._weights_K

    def columns(self, block: Columns) -> Doubles:
        """Return the means [C] of the values nearest to the medians."""
        count = max(len(self._chosen) - 2 * self._wrong, 1)
        found = np.empty(len(block.model_C))
        for piece in cut(0, len(found), PIECE_COLUMNS):
            chosen_SP = block.uploads_KC[self._chosen, piece]
            far_SP = np.abs(chosen_SP - np.median(chosen_SP, axis=0))
            nearest = np.argsort(far_SP, axis=0, kind="stable")[:count]
            found[piece] = np.take_along_axis(chosen_SP, nearest, axis=0).mean(
                axis=0, dtype=np.float64
            )
        return found
