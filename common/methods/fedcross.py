"""FedCross (Hu et al., ICDE 2024, Algorithm 1): each of K models is mixed with a partner that
changes every round.

    w_j = alpha * v_j + (1 - alpha) * v_co(j)

The papers leave the propellers' weights and offsets and the schedule of dynamic alpha open;
fedstrata defines them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, NonNegativeInt

from fedstrata.common.lazy import np, npt
from fedstrata.common.methods.multi_model import MixingRound, TwoStageRule
from fedstrata.common.methods.settings import RuleUse
from fedstrata.common.methods.statistics import Gram

Doubles: TypeAlias = "npt.NDArray[np.float64]"

LEAST_ALPHA: Final = 0.5
UNMIXED_ALPHA: Final = 0.99  # from which the models hardly mix
PROPELLER_ALPHA_MOST: Final = 0.9  # from which propellers have no measurable effect
RECENTRE_ALPHA_MOST: Final = 0.9  # above which recentred models diverge from each other


class FedCross(TwoStageRule):
    """K models, each mixed with a partner: w_j = alpha v_j + (1 - alpha) v_co(j).

    In the first stage all models become their mean. Propellers take rounds 0 .. propeller_rounds -
    1, dynamic alpha the dynamic_alpha_rounds after those. A first stage takes precedence over both.
    """

    name: Literal["fedcross"] = "fedcross"  # the rule
    alpha: Annotated[float, Field(ge=0.5, le=1)] = 0.99  # weight of the model's own upload
    # the partner: in turn, or by similarity
    strategy: Literal["in_order", "lowest", "highest"] = "lowest"
    # Between whole models; `pairwise` by state entries. Of distances, the smaller is the more
    # similar.
    similarity: Literal["cosine", "sum_norm", "pairwise", "euclidean", "manhattan"] = "cosine"
    # of `pairwise`: the mean over the pairs in place of their sum; the ranking is the same
    normalise: bool = False
    # first rounds, in which each model mixes with several partners in order
    propeller_rounds: NonNegativeInt = 0
    propellers: Annotated[int, Field(ge=1)] = 2  # partners in those rounds, at most K - 1
    # Own weight in those rounds; not set: 1 / (propellers + 1).
    propeller_alpha: Annotated[float, Field(gt=0, le=1)] | None = None
    # the rounds after those, in which alpha rises from 0.5 to `alpha`
    dynamic_alpha_rounds: NonNegativeInt = 0

    def plan(self, now: MixingRound) -> tuple[Doubles, dict[str, object]]:
        """Return W: alpha for the own upload, the rest in equal parts for the partners of each
        model.
        """
        found = stage(self, now.r, now.count)
        if found.similar:
            partners = [by_similarity(similarity(self, now), lowest=self.strategy == "lowest")]
        else:
            partners = [in_order(now.r, now.count, place) for place in range(found.partners)]
        facts = {"stage": found.name, "alpha": found.alpha, "partners": partners}
        return mixing_matrix(found, partners, now.count), facts

    @property
    def mixes(self) -> bool:
        """Whether enough weight is the partner's."""
        return self.alpha < UNMIXED_ALPHA

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield what has no effect, too."""
        key = f"{use.key}.aggregation"
        if self.alpha == 1.0:
            yield (
                f"{key}.alpha = 1.0: the models are never mixed; the rule `independent` does "
                "the same."
            )
        if self.propeller_rounds and (self.propeller_alpha or 0) >= PROPELLER_ALPHA_MOST:
            yield (
                f"{key}.propeller_alpha = {self.propeller_alpha}: propellers with so little "
                "weight have no measurable effect. Omit the key for equal weights."
            )
        if self.normalise and self.similarity != "pairwise":
            yield f"{key}.normalise = true: it has an effect only with similarity 'pairwise'."
        yield from super().advice(use)

    def recentred(self, key: str) -> Iterator[str]:
        """Yield a warning for models that hardly mix."""
        if self.alpha > RECENTRE_ALPHA_MOST:
            yield (
                f"{key}.on_new_model = 'recentre': hurts fedcross with alpha above "
                f"{RECENTRE_ALPHA_MOST}, here {self.alpha}."
            )


@dataclass(frozen=True, slots=True)
class FedCrossStage:
    """Mixing in one round: the weight of the own model, and the number of partners that share the
    rest.

    Partners are chosen in order, or by similarity (`similar`) following the strategy.
    """

    name: str
    alpha: float
    partners: int
    similar: bool


def stage(settings: FedCross, r: int, count: int) -> FedCrossStage:
    """Return the stage of `count` models in round r (0-based, never reset), after any first
    stage.
    """
    similar = settings.strategy != "in_order"
    if r < settings.propeller_rounds:
        propellers = min(settings.propellers, count - 1)
        alpha = settings.propeller_alpha or 1 / (propellers + 1)
        return FedCrossStage("propellers", alpha, propellers, similar=False)
    position = r - settings.propeller_rounds
    length = settings.dynamic_alpha_rounds
    if position < length - 1:
        alpha = LEAST_ALPHA + (settings.alpha - LEAST_ALPHA) * position / (length - 1)
        return FedCrossStage("dynamic alpha", alpha, 1, similar)
    name = "dynamic alpha" if position < length else "plain"
    return FedCrossStage(name, settings.alpha, 1, similar)


def in_order(r: int, count: int, place: int = 0) -> list[int]:
    """Return co(j) = (j + ((r + place) mod (K-1)) + 1) mod K for each model j; K is 2 or more."""
    offset = (r + place) % (count - 1) + 1
    return [(j + offset) % count for j in range(count)]


def by_similarity(similarity_KK: Doubles, *, lowest: bool) -> list[int]:
    """Return each model's least or most similar other model.

    Ties are resolved as in the authors' code: (j+1) mod K first, then the lowest index.
    """
    values_KK = -similarity_KK if lowest else similarity_KK
    chosen = []
    for j, values_K in enumerate(values_KK):
        best = (j + 1) % len(values_K)
        for k in range(len(values_K)):
            if k != j and values_K[k] > values_K[best]:
                best = k
        chosen.append(best)
    return chosen


def similarity(settings: FedCross, now: MixingRound) -> Doubles:
    """Return sim(v_i, v_j), float64 [K, K], of whole models; of distances the negative."""
    products = now.products  # the spread needs them anyway
    match settings.similarity:
        case "cosine":
            return products.cosines_KK()
        case "sum_norm":
            return products.ratios_KK()
        case "euclidean":
            return -products.apart_KK()
        case "manhattan":
            return -now.manhattan_KK
    return pairwise(now.products_by_entry, normalise=settings.normalise)


def pairwise(entries: Sequence[Gram], *, normalise: bool) -> Doubles:
    """Return the similarity of the authors' code: the sum of the cosines of pairs of the state's
    entries.

    The last term counts twice: it is the leftover entry of an odd number, else the last pair.
    `normalise` divides by ceil(n/2) for odd n, n/2 + 1 for even n.
    """
    pairs = [one + other for one, other in zip(entries[:-1:2], entries[1::2], strict=True)]
    odd = len(entries) % 2
    last = entries[-1] if odd else pairs[-1]
    total_KK = sum((pair.cosines_KK() for pair in pairs), np.zeros_like(entries[0].offsets_KK))
    total_KK = total_KK + last.cosines_KK()
    if normalise:
        return total_KK / (len(pairs) + 1)
    return total_KK


def mixing_matrix(found: FedCrossStage, partners: Sequence[Sequence[int]], count: int) -> Doubles:
    """Return W, float64 [K, K], for the partners of each model, by their place."""
    weights_KK = np.eye(count)
    if partners:
        weights_KK *= found.alpha
    for others in partners:
        weights_KK[np.arange(count), others] += (1 - found.alpha) / len(partners)
    return weights_KK
