"""Clustered sampling (Fraboni et al. 2021, Algorithm 2): m distributions over the N children, one draw from each.

Each distribution r_k sums to 1, and sum_k r_k[i] = m p_i, so that the expected weight of child i in a mean of the m
draws is p_i. Masses are whole numbers, in units of 1 / (sum of n): both hold exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from common.lazy import np

Merges = Sequence[tuple[int, int]]
"""The nodes 0 .. N - 1 are the children; merge i makes node N + i of two nodes. Empty: nothing is known of them."""


def distributions(samples_N: Sequence[int], draws: int, merges: Merges) -> list[dict[int, int]]:
    """Return `draws` distributions: children with their masses, which sum to sum(samples_N). All samples are positive.

    A child with a share of 1 / m or more has distributions of its own first. Of the clusters the heaviest ones begin a
    distribution each, and the members of the others take the room that is left.
    """
    whole = sum(samples_N)
    own, left = [], [0] * len(samples_N)
    for k, samples in enumerate(samples_N):
        times, left[k] = divmod(draws * samples, whole)
        own += [{k: whole}] * times
    clusters = cut(merges, left, whole)
    clusters.sort(key=lambda cluster: (sum(left[k] for k in cluster), cluster))
    others = len(clusters) - (draws - len(own))
    found = [{k: left[k] for k in cluster if left[k]} for cluster in clusters[others:]]
    room = [whole - sum(masses.values()) for masses in found]
    at = 0
    for k in (k for cluster in clusters[:others] for k in cluster):
        while left[k]:
            while not room[at]:
                at += 1
            taken = min(room[at], left[k])
            found[at][k] = taken
            room[at] -= taken
            left[k] -= taken
    return own + found


def cut(merges: Merges, masses_N: Sequence[int], most: int) -> list[list[int]]:
    """Return the largest clusters of a dendrogram whose mass is at most `most`, which no child alone exceeds."""
    members = [[k] for k in range(len(masses_N))]
    masses = list(masses_N)
    tops = set(range(len(masses_N)))
    for a, b in merges:
        members.append(sorted(members[a] + members[b]))
        masses.append(masses[a] + masses[b])
        if masses[-1] <= most:
            tops -= {a, b}
            tops.add(len(masses) - 1)
    return [members[node] for node in sorted(tops)]


def draw(found: Sequence[Mapping[int, int]], chance: np.random.Generator) -> Counter[int]:
    """Return how often each child is drawn: once from each distribution."""
    drawn: Counter[int] = Counter()
    for masses in found:
        left = chance.random() * sum(masses.values())
        for k in sorted(masses):
            left -= masses[k]
            if left < 0:
                break
        drawn[k] += 1  # the last one, if rounding has left anything
    return drawn
