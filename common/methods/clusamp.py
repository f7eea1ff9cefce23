"""CluSamp: client selection by clusters of similar steps (Fraboni et al. 2021), and FedAvg of the
draws.

    next = 1/m sum over the m draws of v_k                    a child that is drawn twice trains
    once, with weight 2/m

The node keeps the last step of each child, float32 [N, D], zeros for one without. From the
distances of the steps Ward's linkage makes a dendrogram, and that makes m distributions over the
children (Algorithm 2), one for each draw. As in the authors' code the rows of the distance matrix
are the points that are linked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from fedstrata.common.lazy import np
from fedstrata.common.methods.column_rule import MeanRule
from fedstrata.common.methods.mixing import BLOCK_COLUMNS, Floats, cut, over
from fedstrata.common.methods.rule import Aggregated, Rule, RuleContext, Uploads, WrappedRule
from fedstrata.common.methods.selection import Choose, Situation
from fedstrata.common.methods.settings import RuleSettings, RuleUse
from fedstrata.common.methods.single_model import SingleModelRule
from fedstrata.common.methods.statistics import Doubles, TrainingReport

STEPS_FILE: Final = "steps"
PAIRS_FILE: Final = "pairs"
NUMBERS: Final = 2**20  # of a block of all steps

Merges = Sequence[tuple[int, int]]
"""The nodes 0 .. N - 1 are the children; merge i makes node N + i of two nodes. Empty: nothing is
known of them.
"""


class CluSamp(RuleSettings):
    """One model: FedAvg over children that the rule draws from clusters of similar steps."""

    selects: ClassVar[bool] = True  # by its distributions
    remembers: ClassVar[bool] = True  # the last steps
    packages: ClassVar[Sequence[str]] = ("scipy",)

    name: Literal["clusamp"] = "clusamp"  # the rule
    # Of two children's last steps: the angle between them, the sum of the absolute differences, or
    # of their squares.
    distance: Literal["cosine", "l1", "l2"] = "cosine"

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return the bytes of all children's last steps."""
        return min(children * row_bytes, resident_bytes)

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield a warning for uploads that change few columns."""
        if use.sparse:
            yield (
                f"{use.key}.aggregation.name = 'clusamp': the codec of the uploads sends few "
                "columns, each child others, so steps of children that learn alike are compared "
                "in different columns."
            )

    def build(self, context: RuleContext) -> Rule:
        return ClusteredSampling(self, context)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A child's training statistics, with its draws in place of its samples: the mean weights by
    them.
    """

    samples: int
    loss: float | None
    path_steps: int
    start_loss: float | None = None


class ClusteredSampling(WrappedRule):
    """FedAvg of the draws, and the client selection that makes them."""

    def __init__(self, settings: CluSamp, context: RuleContext) -> None:
        super().__init__(SingleModelRule(context, MeanRule(), weights="data"))
        self._distance = settings.distance
        self._layout = context.layout
        self._rows = context.rows("steps", context.children)
        self._rows[:] = 0
        self._pairs_NN: Doubles = np.zeros((context.children, context.children))
        self._merges: Merges = ()
        self._places: Mapping[str, int] = {}
        self._draws: Mapping[str, int] = {}

    @property
    def choose(self) -> Choose | None:
        """Its own client selection."""
        return self._choose

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Keep the steps and link the children anew; then write the mean of the draws. Facts: each
        child's draws.
        """
        self._keep(uploads)
        draws = {child: self._draws.get(child, 1) for child in uploads.children}
        reports: list[TrainingReport | None] = []
        for child, report in zip(uploads.children, uploads.reports, strict=True):
            reports.append(report and Drawn(draws[child], report.loss, report.path_steps))
        done = self._rule.aggregate(r, replace(uploads, reports=tuple(reports)))
        return replace(done, facts={**done.facts, "draws": draws})

    def save(self, folder: Path) -> dict[str, object]:
        """Write the steps and what was computed of them."""
        with (folder / STEPS_FILE).open("wb") as file:
            for step_D in self._steps_ND:
                file.write(step_D.data)
        (folder / PAIRS_FILE).write_bytes(self._pairs_NN.data)
        return self._rule.save(folder)

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Read both."""
        steps = np.fromfile(folder / STEPS_FILE, np.float32)
        self._steps_ND[:] = steps.reshape(self._steps_ND.shape)
        self._pairs_NN[:] = np.fromfile(folder / PAIRS_FILE).reshape(self._pairs_NN.shape)
        self._rule.restore(folder, facts)
        self._merges = linked(self._distance, self._pairs_NN)

    @property
    def _steps_ND(self) -> Floats:
        return self._layout.floats(self._rows)[:, : self._layout.parameters]

    def _choose(self, now: Situation) -> list[str]:
        """Draw m = `now.count` times; return the children that were drawn, each once."""
        self._places = {child: place for place, child in enumerate(now.children)}
        samples_N = [max(now.samples.get(child, 1), 1) for child in now.children]
        drawn = draw(distributions(samples_N, now.count, self._merges), now.chance())
        self._draws = {now.children[place]: times for place, times in drawn.items()}
        return list(self._draws)

    def _keep(self, uploads: Uploads) -> None:
        """Keep the steps of a round, and link all children by the distances of their steps."""
        answered = [k for k in uploads.answered if uploads.children[k] in self._places]
        if not answered:
            return
        places = [self._places[uploads.children[k]] for k in answered]
        floats_K = self._layout.floats(uploads.rows_K)
        received = self._layout.floats(self._received[uploads.children[0]])
        steps_ND = self._steps_ND

        def block(columns: slice) -> Doubles:
            for k, place in zip(answered, places, strict=True):
                np.subtract(floats_K[k, columns], received[columns], out=steps_ND[place, columns])
            steps_NC = steps_ND[:, columns].astype(np.float64)
            if self._distance == "l1":
                apart = [np.abs(steps_NC - steps_NC[place]).sum(axis=1) for place in places]
                return np.stack(apart)
            found: Doubles = steps_NC[places] @ steps_NC.T
            return found

        blocks = list(cut(0, self._layout.parameters, _columns(len(steps_ND))))
        pairs_KN = np.sum(over(blocks, block, release=uploads.release), axis=0)
        self._pairs_NN[places] = pairs_KN
        self._pairs_NN[:, places] = pairs_KN.T
        self._merges = linked(self._distance, self._pairs_NN)


def linked(distance: str, pairs_NN: Doubles) -> Merges:
    """Return Ward's dendrogram of the children, from the products of their steps, of `l1` from
    their distances.
    """
    if len(pairs_NN) < 2:
        return ()
    from scipy.cluster.hierarchy import ward  # of an extra, and slow to import
    from scipy.spatial.distance import pdist

    return [(int(a), int(b)) for a, b, *_ in ward(pdist(distances(distance, pairs_NN)))]


def distances(distance: str, pairs_NN: Doubles) -> Doubles:
    """Return the distances [N, N] of the steps; by cosine a step of zeros is at distance 0 from
    every other.
    """
    if distance == "l1":
        return pairs_NN
    squares_N = np.diagonal(pairs_NN)
    if distance == "l2":
        return np.maximum(squares_N[:, None] + squares_N[None, :] - 2 * pairs_NN, 0.0)
    lengths_NN = np.sqrt(np.outer(squares_N, squares_N))
    cosines_NN = np.divide(pairs_NN, lengths_NN, out=np.ones_like(pairs_NN), where=lengths_NN > 0)
    found: Doubles = np.arccos(np.clip(cosines_NN, -1.0, 1.0))
    return found


def _columns(children: int) -> int:
    """Return how many columns of all steps a block has, in float64 some megabytes."""
    return max(256, min(BLOCK_COLUMNS, NUMBERS // children))


def distributions(samples_N: Sequence[int], draws: int, merges: Merges) -> list[dict[int, int]]:
    """Return `draws` distributions: children with their masses, which sum to sum(samples_N). All
    samples are positive.

    Each distribution r_k sums to 1, and sum_k r_k[i] = m p_i, so that the expected weight of child
    i in a mean of the m draws is p_i. Masses are whole numbers, in units of 1 / (sum of n): both
    hold exactly.

    A child with a share of 1 / m or more has distributions of its own first. Of the clusters the
    heaviest ones begin a distribution each, and the members of the others take the room that is
    left.
    """
    whole = sum(samples_N)
    own = []
    left = [0] * len(samples_N)
    for k, samples in enumerate(samples_N):
        times, left[k] = divmod(draws * samples, whole)
        own += [{k: whole}] * times
    clusters = clusters_below(merges, left, whole)
    clusters.sort(key=lambda cluster: (sum(map(left.__getitem__, cluster)), cluster))
    others = len(clusters) - (draws - len(own))
    found = []
    for cluster in clusters[others:]:
        found.append({k: left[k] for k in cluster if left[k]})
    room = [whole - sum(masses.values()) for masses in found]
    at = 0
    for k in chain.from_iterable(clusters[:others]):
        while left[k]:
            while not room[at]:
                at += 1
            taken = min(room[at], left[k])
            found[at][k] = taken
            room[at] -= taken
            left[k] -= taken
    return own + found


def clusters_below(merges: Merges, masses_N: Sequence[int], most: int) -> list[list[int]]:
    """Return the largest clusters of a dendrogram whose mass is at most `most`, which no child
    alone exceeds.
    """
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
