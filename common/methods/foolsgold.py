"""FoolsGold (Fung et al. 2020, algorithm 1): children whose steps resemble each other over all
rounds count less.

    h_k: the sum of child k's steps so far        c_kj = cos(h_k, h_j), k != j        m_k = max_j
    c_kj
    c_kj <- c_kj m_k / m_j  where m_j > m_k       a_k = 1 - max_j c_kj, of the largest one, in 0 to
    1
    a_k <- ln(a_k / (1 - a_k)) + 1/2, in 0 to 1

The next model is the mean of the uploads with the weights a_k / sum a; the paper adds the sum of
a_k times the steps. Over all trainable columns. If all weights are zero, the model stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import MeanRule, RoundFacts
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.rule import Aggregated, Rule, RuleContext, Uploads
from fedstrata.common.methods.settings import CombiningSettings
from fedstrata.common.methods.single_model import SingleModelRule, read_vectors, write_vectors
from fedstrata.common.methods.statistics import Doubles, Gram

SURE = 0.99  # the largest a_k before its logarithm, as in the authors' code


class FoolsGold(CombiningSettings):
    """One model: the mean of the uploads, in which children that always agree count less."""

    remembers: ClassVar[bool] = True

    name: Literal["foolsgold"] = "foolsgold"  # the rule

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return those of a vector for each child, too."""
        rest = super().held_bytes(
            row_bytes, children=children, taking_part=taking_part, resident_bytes=resident_bytes
        )
        return rest + children * row_bytes

    def build(self, context: RuleContext) -> Rule:
        return FoolsGoldRule(context)


class ByHistory(MeanRule):
    """A mean with weights that are known before."""

    weights_K: Doubles

    def weights(self, facts: RoundFacts) -> Doubles:
        return self.weights_K


class FoolsGoldRule(SingleModelRule):
    """FoolsGold at a node. Its state is the sum of each child's steps."""

    def __init__(self, context: RuleContext) -> None:
        self._mean = ByHistory()
        super().__init__(context, self._mean, weights="uniform")
        self._sums: dict[str, Floats] = {}

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Add the steps, then take the mean."""
        received_D = self._trainable(self.current)
        children = uploads.senders
        for k, child in zip(uploads.answered, children, strict=True):
            total_D = self._sums.setdefault(child, np.zeros_like(received_D))
            total_D += self._trainable(uploads.rows_K[k]) - received_D
        products = Gram.of([self._sums[child] for child in children], np.zeros_like(received_D))
        weights_K = trust(products.cosines_KK())
        if not weights_K.any():
            return self._keep(
                children, uploads.statistics, "all children resemble each other: the model is kept"
            )
        self._mean.weights_K = weights_K / weights_K.sum()
        return super().aggregate(r, uploads)

    def save(self, folder: Path) -> dict[str, object]:
        """Write the sums; return whose they are."""
        write_vectors({f"steps_{child}": values for child, values in self._sums.items()}, folder)
        return super().save(folder) | {"children": list(self._sums)}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        super().restore(folder, facts)
        size = self.context.layout.parameters
        self._sums = {child: np.zeros(size, np.float32) for child in facts["children"]}
        read_vectors({f"steps_{child}": values for child, values in self._sums.items()}, folder)


def trust(cosines_KK: Doubles) -> Doubles:
    """Return a_k of children whose sums of steps have these cosines, float64 [K]."""
    if len(cosines_KK) < 2:
        return np.ones_like(cosines_KK[0])
    alike_KK = cosines_KK.copy()
    np.fill_diagonal(alike_KK, -np.inf)
    most_K = alike_KK.max(axis=1)
    pardon_KK = np.where(
        most_K[None, :] > most_K[:, None], most_K[:, None] / _nonzero(most_K)[None, :], 1.0
    )
    trust_K = np.clip(
        1 - (alike_KK * np.where(np.isfinite(alike_KK), pardon_KK, 1.0)).max(axis=1), 0.0, 1.0
    )
    trust_K = np.minimum(trust_K / max(trust_K.max(), 1e-300), SURE)
    with np.errstate(divide="ignore"):
        found: Doubles = np.clip(np.log(trust_K / (1 - trust_K)) + 0.5, 0.0, 1.0)
    return found


def _nonzero(values_K: Doubles) -> Doubles:
    found: Doubles = np.where(values_K == 0, 1.0, values_K)
    return found
