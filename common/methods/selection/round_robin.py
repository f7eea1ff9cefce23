"""Children in turn: N children take part once each in N / K rounds. The order is drawn once, for the node."""

from __future__ import annotations

from common.experiment.selection import RoundRobin
from common.methods.selection.situation import Choose, Situation
from common.randomness import Purpose, generator


def round_robin(settings: RoundRobin) -> Choose:
    """Return the selector."""

    def choose(now: Situation) -> list[str]:
        size = len(now.children)
        order = generator(now.seed, Purpose.SELECTION, now.node).permutation(size)
        return [now.children[order[(now.r * now.count + i) % size]] for i in range(now.count)]

    return choose
