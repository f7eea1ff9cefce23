"""Oort (Lai et al., OSDI 2021, Algorithm 1): children with high losses that are quick, and some never selected.

    score_i = norm(n_i F_i) + sqrt(staleness ln(r + 1) / (last round + 1))
    score_i = score_i (T / t_i)^penalty        where t_i > T

n_i samples; F_i the mean loss of the last result, where the paper has the root of the mean square of the samples'
losses, which no child reports. norm: cut at the 95th percentile and scaled to 0 .. 1. t_i: seconds of the last result.
T: the `duration_share` quantile of t; the paper moves T along with the sum of the utilities. A share of K that falls
from round to round goes to children without a result, by chance; the paper prefers quick ones, by a hint that no child
gives. The others are drawn by their scores from those above cut_off times the K-th best score.

The choice depends on durations, so a run does not repeat bit for bit. Who was selected is in each round's plan.
"""

from __future__ import annotations

from math import log, sqrt

from common.experiment.selection import Oort
from common.lazy import np, npt
from common.methods.selection.situation import Choose, Situation

CLIP_QUANTILE = 0.95


def oort(settings: Oort) -> Choose:
    """Return the selector."""

    def choose(now: Situation) -> list[str]:
        chance = now.chance()
        seen = [child for child in now.children if now.last_result(child) is not None]
        unseen = [child for child in now.children if now.last_result(child) is None]
        share = max(settings.exploration_least, settings.exploration * settings.exploration_decay**now.r)
        explored = min(len(unseen), max(int(share * now.count + 0.5 + 1e-9), now.count - len(seen)))
        found = [unseen[place] for place in chance.choice(len(unseen), explored, replace=False)] if explored else []
        if best := now.count - explored:
            scores_S = scores(settings, now, seen)
            enough = settings.cut_off * np.sort(scores_S)[-best]
            above = np.flatnonzero(scores_S >= enough)
            weights = scores_S[above] + 1e-12  # a score may be zero
            found += [seen[place] for place in chance.choice(above, best, replace=False, p=weights / weights.sum())]
        return found

    return choose


def scores(settings: Oort, now: Situation, seen: list[str]) -> npt.NDArray[np.float64]:
    """Return the scores [S] of the children that have a result."""
    results = [last for child in seen if (last := now.last_result(child)) is not None]
    utilities_S = np.array([last.samples * last.loss for last in results], np.float64)
    utilities_S = np.minimum(utilities_S, np.quantile(utilities_S, CLIP_QUANTILE))
    low, high = float(utilities_S.min()), float(utilities_S.max())
    normal_S = (utilities_S - low) / (high - low) if high > low else np.ones_like(utilities_S)
    rounds = [now.history[child].last_round + 1 for child in seen]
    stale_S = np.array([sqrt(settings.staleness * log(now.r + 1) / last) for last in rounds])
    seconds_S = np.array([max(last.seconds, 1e-9) for last in results])
    preferred_s = np.quantile(seconds_S, settings.duration_share)
    slow_S = np.minimum(1.0, preferred_s / seconds_S) ** settings.penalty
    found: npt.NDArray[np.float64] = (normal_S + stale_S) * slow_S
    return found
