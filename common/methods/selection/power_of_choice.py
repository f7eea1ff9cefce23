"""Power-of-choice (Cho et al. 2020) by the last known losses, without another exchange: their rpow-d.

d candidates are drawn without replacement with probabilities p_k = n_k / sum of n; the K with the highest last loss
take part. A child without a result has an infinite loss. Equal losses are decided by the order of the draw.
"""

from __future__ import annotations

from math import inf

from common.experiment.selection import PowerOfChoice
from common.lazy import np
from common.methods.selection.situation import Choose, Situation


def power_of_choice(settings: PowerOfChoice) -> Choose:
    """Return the selector."""

    def choose(now: Situation) -> list[str]:
        def loss(child: str) -> float:
            last = now.last_result(child)
            return inf if last is None else last.loss

        d = min(settings.candidates or 2 * now.count, len(now.children))
        samples_N = np.array([max(now.samples.get(child, 1), 1) for child in now.children], np.float64)
        places = now.chance().choice(len(now.children), d, replace=False, p=samples_N / samples_N.sum())
        return sorted((now.children[place] for place in places), key=loss, reverse=True)[: now.count]

    return choose
