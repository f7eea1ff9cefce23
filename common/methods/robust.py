"""Rules that bound what some wrong uploads can do: median, trimmed mean, Krum and multi-Krum.

    median         the median of each column                                                  (Yin
    et al. 2018)
    trimmed mean   the mean of each column without its floor(trim K) largest and smallest     (Yin
    et al. 2018)
    Krum           s_k = sum of the K - f - 2 least ||v_k - v_i||^2, i != k
                   (Blanchard et al. 2017) the upload of the least s_k; multi-Krum: the mean of the
                   m of the least

Over trainable columns and without weights. Buffers are those of the uniform mean; with Krum of the
chosen uploads. With fewer uploads than protect (`uploads_least` of the settings) the node keeps its
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import ColumnRule, Columns, MeanRule, RoundFacts
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.rule import Rule, RuleContext
from fedstrata.common.methods.settings import CombiningSettings, RuleUse
from fedstrata.common.methods.single_model import single_model
from fedstrata.common.methods.statistics import Doubles, Gram
from fedstrata.common.settings.tables import Count
from fedstrata.common.settings.topology import share_of


class Median(CombiningSettings):
    """One model: the median of each column of the uploads."""

    step_models = 1.0
    uploads_least: ClassVar[int] = 3  # the median of two is their mean
    condition: ClassVar[str] = "n >= 2 f + 1"

    name: Literal["median"] = "median"  # the rule

    def tolerates(self, uploads: int) -> int:
        """Return f, a minority."""
        return max(0, (uploads - 1) // 2)

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that enough uploads come. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        check_uploads(
            f"{key}.name",
            self.name,
            self.uploads_least,
            children,
            uploads,
            instead="Use another rule",
        )

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield a warning for uploads that change few columns."""
        yield from sparse_advice(self.name, use)

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, Medians())


class TrimmedMean(CombiningSettings):
    """One model: the mean of each column without its largest and smallest values."""

    step_models = 1.0
    condition: ClassVar[str] = "f <= floor(trim n)"

    name: Literal["trimmed_mean"] = "trimmed_mean"  # the rule
    # Share of the uploads left out at each end, rounded down. It must be at least one, of all
    # uploads that close a round; 0 is the uniform mean.
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.1

    @property
    def uploads_least(self) -> int:
        """The least number of which one is left out at each end."""
        if self.trim:
            return ceil(1 / self.trim - 1e-9)
        return 1

    def tolerates(self, uploads: int) -> int:
        """Return f: as many as are left out at each end."""
        return share_of(uploads, self.trim)

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that enough uploads come. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        check_uploads(
            f"{key}.trim", self.trim, self.uploads_least, children, uploads, instead="Raise it"
        )

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield a warning for uploads that change few columns."""
        if self.trim:
            yield from sparse_advice(self.name, use)

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, TrimmedMeans(**self.keywords))


class Krum(CombiningSettings):
    """One model: the mean of the uploads that lie closest to most others."""

    condition: ClassVar[str] = "n >= 2 f + 3, with f of the key `wrong`"

    name: Literal["krum"] = "krum"  # the rule
    wrong: Annotated[int, Field(ge=0)] = 1  # wrong uploads that are expected (f)
    keep: Count = 1  # uploads of which the mean is taken (m): 1 is Krum, more multi-Krum

    @property
    def uploads_least(self) -> int:
        """2 f + 3, and so many that f may be left out; any number if none is expected to be
        wrong.
        """
        if self.wrong:
            return max(2 * self.wrong + 3, self.wrong + self.keep)
        return 1

    def tolerates(self, uploads: int) -> int:
        """Return f, if there are so many uploads."""
        if uploads >= self.uploads_least:
            return self.wrong
        return 0

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that enough uploads come. Raises InvalidExperiment."""
        super().check(key, children, uploads)
        least = 2 * self.wrong + 3 if self.wrong else 1
        check_uploads(f"{key}.wrong", self.wrong, least, children, uploads, instead="Lower it")
        if self.keep > (most := uploads - self.wrong):
            problem = f"{self.wrong} of {uploads} uploads may be wrong"
            raise InvalidExperiment(f"{key}.keep", self.keep, problem, f"Use at most {most}.")

    def build(self, context: RuleContext) -> Rule:
        return single_model(self, context, CloseMean(**self.keywords))


def sparse_advice(name: str, use: RuleUse) -> Iterator[str]:
    """Yield a warning for uploads that change few columns: most others leave a column as it is, and
    they decide.
    """
    if use.sparse:
        yield (
            f"{use.key}.aggregation.name = {name!r}: the codec of the uploads sends few columns, "
            "each child others, so"
            " the rule takes most changes for outliers and leaves the columns as they are. Use "
            "krum, or a dense codec."
        )


def check_uploads(
    key: str, value: object, least: int, children: int, uploads: int, *, instead: str
) -> None:
    """Check that enough uploads come. Raises InvalidExperiment."""
    if uploads < least:
        has = f"of {children} children that take part"
        more = "let more children take part"
        if uploads < children:
            has = f"and a round closes with {uploads}"
            more = "raise the quorum"
        raise InvalidExperiment(
            key, value, f"needs {least} uploads, {has}", f"{instead}, or {more}."
        )


class Medians(ColumnRule):
    """The median of each column."""

    def columns(self, block: Columns) -> Floats:
        """Return the medians [C]."""
        found: Floats = np.median(block.uploads_KC, axis=0)
        return found


class TrimmedMeans(ColumnRule):
    """The trimmed mean of each column."""

    def __init__(self, *, trim: float) -> None:
        self._trim = trim

    def columns(self, block: Columns) -> Doubles:
        """Return the means [C] of the values that are left."""
        count = len(block.uploads_KC)
        out = share_of(count, self._trim)
        found: Doubles = np.sort(block.uploads_KC, axis=0)[out : count - out].mean(
            axis=0, dtype=np.float64
        )
        return found


class CloseMean(MeanRule):
    """Krum: the mean of the uploads that lie closest to most others."""

    compares = True

    def __init__(self, *, wrong: int, keep: int) -> None:
        self._wrong = wrong
        self._keep = keep

    def begin(self, facts: RoundFacts) -> Mapping[str, object]:
        """Choose uploads; return each child's score, and the chosen children."""
        assert facts.products is not None
        scores_K = scores(facts.products, self._wrong)
        chosen = sorted(np.argsort(scores_K, kind="stable")[: self._keep].tolist())
        self._weights_K = np.zeros(len(scores_K))
        self._weights_K[chosen] = 1 / len(chosen)
        return {"scores": facts.by_child(scores_K), "chosen": [facts.children[k] for k in chosen]}

    def weights(self, facts: RoundFacts) -> Doubles:
        return self._weights_K


def scores(products: Gram, wrong: int) -> Doubles:
    """Return Krum's s_k, with at least one neighbour."""
    squares_K = np.diagonal(products.offsets_KK)
    apart_KK = np.maximum(squares_K[:, None] + squares_K[None, :] - 2 * products.offsets_KK, 0.0)
    np.fill_diagonal(apart_KK, np.inf)
    neighbours = max(len(squares_K) - wrong - 2, 1)
    nearest_KN = np.sort(apart_KK, axis=1)[:, :neighbours]
    found: Doubles = np.where(np.isfinite(nearest_KN), nearest_KN, 0.0).sum(axis=1)
    return found
