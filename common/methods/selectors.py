"""The selectors: K = `now.count` of a node's N children take part in its round r.

    fraction         K by chance, without replacement
    round_robin      in turn, in an order drawn once for the node: each takes part once in N / K
    rounds
    fedcluster       (Chen et al. 2020) round r visits cluster order_c[r mod G], c = r div G;
                     order_c: a permutation of the G clusters, for each cycle c
    power_of_choice  (Cho et al. 2020) of d candidates, drawn with probabilities p_k = n_k / sum of
                     n, the K with the highest last loss
    oort             (Lai et al., OSDI 2021, Algorithm 1) high losses that are quick, and some never
    selected

FedCluster's clusters are drawn once, of equal size but for one child. K children of the cluster
take part; they start from the model that the cluster before has made, so that one cycle has several
aggregations. One cluster is `fraction`.

Power-of-choice goes by the last known losses, without another exchange: the authors' rpow-d. A
child without a result has an infinite loss. Equal losses are decided by the order of the draw.

    Oort: score_i = norm(n_i F_i) + sqrt(staleness ln(r + 1) / (last round + 1))
          score_i = score_i (T / t_i)^penalty        where t_i > T

n_i samples; F_i the mean loss of the last result, where the paper has the root of the mean square
of the samples' losses, which no child reports. norm: cut at the 95th percentile and scaled to 0 ..
1. t_i: seconds of the last result. T: the `duration_share` quantile of t; the paper moves T along
with the sum of the utilities. A share of K that falls from round to round goes to children without
a result, by chance; the paper prefers quick ones, by a hint that no child gives. The others are
drawn by their scores from those above cut_off times the K-th best score. The choice depends on
durations, so a run does not repeat bit for bit. Who was selected is in each round's plan.
"""

from __future__ import annotations

from math import inf, log, sqrt
from typing import Annotated, Final, Literal

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.lazy import np, npt
from fedstrata.common.methods.selection import ResultFacts, Selector, Situation
from fedstrata.common.methods.settings import SelectionSettings
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.tables import Count, Fraction, Positive

CLIP_QUANTILE: Final = 0.95


class FractionSelection(SelectionSettings):
    """K children by chance, each with the same probability."""

    remembers = False

    name: Literal["fraction"] = "fraction"  # the selector

    def build(self) -> Selector:
        return UniformSelector()


class UniformSelector(Selector):
    """Children by chance."""

    def select(self, now: Situation) -> list[str]:
        places = now.chance().choice(len(now.children), now.count, replace=False)
        return [now.children[place] for place in places]


class RoundRobin(SelectionSettings):
    """K children in turn, in an order drawn once for the run."""

    remembers = False

    name: Literal["round_robin"] = "round_robin"  # the selector

    def build(self) -> Selector:
        return TurnSelector()


class TurnSelector(Selector):
    """Children in turn."""

    def select(self, now: Situation) -> list[str]:
        size = len(now.children)
        order = generator(now.seed, Purpose.SELECTION, now.node).permutation(size)
        return [now.children[order[(now.r * now.count + i) % size]] for i in range(now.count)]


class FedCluster(SelectionSettings):
    """K children of one cluster: the clusters take turns, in another order in each cycle."""

    remembers = False

    name: Literal["fedcluster"] = "fedcluster"  # the selector
    # clusters of a parent's children (G), each of at least K; not set: N / K
    clusters: Count | None = None

    def check(self, key: str, children: int, taking_part: int) -> None:
        """Check that each cluster has enough children. Raises InvalidExperiment."""
        if self.clusters is not None and self.clusters > (most := children // taking_part):
            problem = f"{taking_part} of {children} children take part, all of one cluster"
            raise InvalidExperiment(f"{key}.clusters", self.clusters, problem, f"Use 1 to {most}.")

    def build(self) -> Selector:
        return ClusterSelector(clusters=self.clusters)


class ClusterSelector(Selector):
    """Children of the cluster whose turn it is."""

    def __init__(self, *, clusters: int | None) -> None:
        self._clusters = clusters

    def select(self, now: Situation) -> list[str]:
        size = len(now.children)
        clusters = min(self._clusters or size // now.count, size // now.count)
        members = np.arange(size)
        if clusters > 1:
            members = generator(now.seed, Purpose.CYCLES, now.node).permutation(size)
        cycle, place = divmod(now.r, clusters)
        order = generator(now.seed, Purpose.CYCLES, now.node, 1 + cycle).permutation(clusters)
        cluster = np.array_split(members, clusters)[order[place]]
        chosen = now.chance().choice(len(cluster), now.count, replace=False)
        return [now.children[cluster[k]] for k in chosen]


class PowerOfChoice(SelectionSettings):
    """Candidates by their samples, and of these the K with the highest last training loss."""

    compares_losses = True

    name: Literal["power_of_choice"] = "power_of_choice"  # the selector
    # children among which the losses decide (d), at least K; not set: 2 K
    candidates: Count | None = None

    def check(self, key: str, children: int, taking_part: int) -> None:
        """Check that as many candidates as take part exist, and not more than children. Raises
        InvalidExperiment.
        """
        d = self.candidates
        if d is not None and not taking_part <= d <= children:
            problem = (
                f"{taking_part} of {children} children take part, and are chosen among the "
                "candidates"
            )
            remedy = f"Use {taking_part} to {children}."
            raise InvalidExperiment(f"{key}.candidates", d, problem, remedy)

    def build(self) -> Selector:
        return LossSelector(candidates=self.candidates)


class LossSelector(Selector):
    """The candidates with the highest last losses."""

    def __init__(self, *, candidates: int | None) -> None:
        self._candidates = candidates

    def select(self, now: Situation) -> list[str]:
        """Draw candidates, and return the best of them."""

        def loss(child: str) -> float:
            last = now.last_result(child)
            if last is None:
                return inf
            return _loss(last)

        d = min(self._candidates or 2 * now.count, len(now.children))
        samples_N = np.array(
            [max(now.samples.get(child, 1), 1) for child in now.children], np.float64
        )
        places = now.chance().choice(
            len(now.children), d, replace=False, p=samples_N / samples_N.sum()
        )
        return sorted((now.children[place] for place in places), key=loss, reverse=True)[
            : now.count
        ]


class Oort(SelectionSettings):
    """Children whose losses are high and who are quick, and some that were never selected."""

    compares_losses = True

    name: Literal["oort"] = "oort"  # the selector
    # share of unseen children in the first round
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.9
    exploration_decay: Fraction = 0.98  # factor of that share from round to round
    exploration_least: Annotated[float, Field(ge=0, le=1)] = 0.2  # it does not fall below
    # share of the children seen that are quick enough: the others pay the penalty
    duration_share: Fraction = 0.8
    # exponent of (T / t) for a child that takes t > T seconds
    penalty: Annotated[float, Field(ge=0)] = 2.0
    cut_off: Fraction = 0.95  # of the K-th best score: children above it are drawn by their scores
    staleness: Positive = 0.1  # weight of the bonus for children that were not selected for long

    def build(self) -> Selector:
        return OortSelector(self)


class OortSelector(Selector):
    """Children by their scores, and some without a result."""

    def __init__(self, settings: Oort) -> None:
        self._settings = settings

    def select(self, now: Situation) -> list[str]:
        """Draw some without a result, and the others by their scores."""
        settings = self._settings
        chance = now.chance()
        seen = [child for child in now.children if now.last_result(child) is not None]
        unseen = [child for child in now.children if now.last_result(child) is None]
        share = max(
            settings.exploration_least, settings.exploration * settings.exploration_decay**now.r
        )
        explored = min(len(unseen), max(int(share * now.count + 0.5 + 1e-9), now.count - len(seen)))
        if explored:
            found = [unseen[place] for place in chance.choice(len(unseen), explored, replace=False)]
        else:
            found = []
        if best := now.count - explored:
            scores_S = scores(settings, now, seen)
            enough = settings.cut_off * np.sort(scores_S)[-best]
            above = np.flatnonzero(scores_S >= enough)
            weights = scores_S[above] + 1e-12  # a score may be zero
            found += [
                seen[place]
                for place in chance.choice(above, best, replace=False, p=weights / weights.sum())
            ]
        return found


def scores(settings: Oort, now: Situation, seen: list[str]) -> npt.NDArray[np.float64]:
    """Return Oort's scores [S] of the children that have a result."""
    results = [last for child in seen if (last := now.last_result(child)) is not None]
    utilities_S = np.array([last.samples * _loss(last) for last in results], np.float64)
    utilities_S = np.minimum(utilities_S, np.quantile(utilities_S, CLIP_QUANTILE))
    low = float(utilities_S.min())
    high = float(utilities_S.max())
    normal_S = (utilities_S - low) / (high - low) if high > low else np.ones_like(utilities_S)
    rounds = [now.history[child].last_round + 1 for child in seen]
    stale_S = np.array([sqrt(settings.staleness * log(now.r + 1) / last) for last in rounds])
    seconds_S = np.array([max(last.seconds, 1e-9) for last in results])
    preferred_s = np.quantile(seconds_S, settings.duration_share)
    slow_S = np.minimum(1.0, preferred_s / seconds_S) ** settings.penalty
    found: npt.NDArray[np.float64] = (normal_S + stale_S) * slow_S
    return found


def _loss(result: ResultFacts) -> float:
    assert result.loss is not None  # `compares_losses`: one without it was refused
    return result.loss
