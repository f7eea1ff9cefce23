"""FedCluster (Chen et al. 2020): clusters of children take turns, so that one cycle has several aggregations.

    round r visits cluster order_c[r mod G], c = r div G        order_c: a permutation of the G clusters, for each cycle

The clusters are drawn once, of equal size but for one child. K children of the cluster take part; they start from the
model that the cluster before has made. One cluster is `fraction`.
"""

from __future__ import annotations

from common.experiment.selection import FedCluster
from common.lazy import np
from common.methods.selection.situation import Choose, Situation
from common.randomness import Purpose, generator


def fedcluster(settings: FedCluster) -> Choose:
    """Return the selector."""

    def choose(now: Situation) -> list[str]:
        size = len(now.children)
        clusters = min(settings.clusters or size // now.count, size // now.count)
        members = np.arange(size)
        if clusters > 1:
            members = generator(now.seed, Purpose.CYCLES, now.node).permutation(size)
        cycle, place = divmod(now.r, clusters)
        order = generator(now.seed, Purpose.CYCLES, now.node, 1 + cycle).permutation(clusters)
        cluster = np.array_split(members, clusters)[order[place]]
        chosen = now.chance().choice(len(cluster), now.count, replace=False)
        return [now.children[cluster[k]] for k in chosen]

    return choose
