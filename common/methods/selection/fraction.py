"""Uniform client selection without replacement."""

from __future__ import annotations

from common.experiment.selection import FractionSelection
from common.methods.selection.situation import Choose, Situation


def fraction(settings: FractionSelection) -> Choose:
    """Return the selector."""

    def choose(now: Situation) -> list[str]:
        places = now.chance().choice(len(now.children), now.count, replace=False)
        return [now.children[place] for place in places]

    return choose
