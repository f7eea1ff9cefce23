"""FedCDA (Wang et al., ICLR 2024): select cached uploads that are close together at a low loss.

    (5)  min  (1/n) sum F(x_c) + (L/2n) sum ||x_c - xbar||^2,   xbar = (1/n) sum x_c,   over one upload of each child

The round's participants are searched group by group, with all other selections fixed. A common shift changes no
distance, so with e = x - z, s0 = the sum of e over the fixed selections, G = e e^T, u = e.s0 and q = s0.s0:

    J = (1/n) sum F_c + (L/2) [ (1/n) sum G_cc - (q + 2 sum u_c + sum sum G_cc') / n^2 ]  + a constant of the group
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.lazy import np
from common.methods.statistics import Doubles, Gram

TIE: Final = 1e-12  # of the terms' scale


@dataclass(frozen=True, slots=True)
class Candidates:
    """The cached uploads of the round's participants: G, u and q, their losses, and their owners.

    `of[p]`: participant p's candidates as rows of G, newest first. `fixed`: the number of other children with uploads.
    """

    products: Gram
    losses_C: Doubles
    of: Sequence[Sequence[int]]
    fixed: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Each participant's selected candidate, and the products with the sum of all selected uploads."""

    chosen: tuple[int, ...]
    products: Gram

    def distances(self, rows: Sequence[int], n: int) -> list[float]:
        """Return ||x_c - xbar|| of candidates, for the mean xbar of all n selected uploads."""
        g, u, q = self.products.offsets_KK, self.products.along_K, self.products.square
        return [float(np.sqrt(max(g[c, c] - 2 * u[c] / n + q / n**2, 0.0))) for c in rows]


def group(participants: int, groups: int, draw: np.random.Generator) -> list[list[int]]:
    """Return the participants 0 .. P-1, shuffled, in groups of near-equal size; the first P mod B are larger by one."""
    return [part.tolist() for part in np.array_split(draw.permutation(participants), min(groups, participants))]


def plan(candidates: Candidates, groups: Sequence[Sequence[int]], *, smoothness: float) -> Choice:
    """Return each participant's selection: one group after another, without the groups that follow."""
    products, n = candidates.products, candidates.fixed
    chosen = [-1] * len(candidates.of)
    for members in groups:
        n += len(members)
        found = search(products, candidates.losses_C, [candidates.of[p] for p in members], n=n, smoothness=smoothness)
        for p, c in zip(members, found, strict=True):
            chosen[p] = c
        g_KK, u_K = products.offsets_KK, products.along_K
        square = products.square + float(2 * u_K[found].sum() + g_KK[np.ix_(found, found)].sum())
        products = Gram(g_KK, u_K + g_KK[:, found].sum(axis=1), square)
    return Choice(tuple(chosen), products)


def search(
    products: Gram, losses_C: Doubles, members: Sequence[Sequence[int]], *, n: int, smoothness: float
) -> list[int]:
    """Return the candidate of each member whose combination minimises J, n = fixed + members.

    Combinations run from all newest to all oldest. Of those within 1e-12 of the minimum the first one is returned.
    """
    g_CC, u_C = products.offsets_KK, products.along_K
    squares_C = np.diagonal(g_CC)
    pair = smoothness / n**2  # of each unordered pair
    spread_C = smoothness / 2 * (squares_C / n - (2 * u_C + squares_C) / n**2)
    values = np.zeros(1)
    pulls = np.zeros((1, len(losses_C)))  # [combinations, C]: sum of G over the candidates chosen so far
    scale = smoothness / 2 * products.square / n**2
    for own in map(list, members):
        step = losses_C[own] / n + spread_C[own] - pair * pulls[:, own]
        scale += float(
            np.abs(losses_C[own] / n).max() + np.abs(spread_C[own]).max() + pair * np.abs(pulls[:, own]).max()
        )
        values = (values[:, None] + step).ravel()
        pulls = (pulls[:, None, :] + g_CC[own]).reshape(len(values), -1)
    best = int(np.argmax(values <= values.min() + TIE * scale))
    chosen: list[int] = []
    for own in map(list, reversed(members)):
        best, place = divmod(best, len(own))
        chosen.append(own[place])
    return chosen[::-1]
