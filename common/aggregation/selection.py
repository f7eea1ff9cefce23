"""Client selection: the children that take part in a round."""

from __future__ import annotations

from collections.abc import Sequence

from common.experiment.rounds import participants
from common.randomness import Purpose, generator


def select(children: Sequence[str], fraction: float, *, seed: int, node: str, r: int) -> list[str]:
    """Return K = max(1, floor(fraction * children)) of a node's children, in their order, for its round r.

    The selection is without replacement, by a generator for this node and round.
    """
    count = participants(len(children), fraction)
    if count == len(children):
        return list(children)
    places = generator(seed, Purpose.SELECTION, node, r).choice(len(children), count, replace=False)
    return [children[place] for place in sorted(places)]
