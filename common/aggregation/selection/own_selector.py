"""Selectors of the user's own: `selection.name = "package.module:Class"`, a class that inherits from `Selector`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from common.aggregation.selection.situation import Situation
from common.errors import InvalidExperiment
from common.experiment import own
from common.experiment.selection import OwnSelection

KEY: Final = "selection.name"


class Selector:
    """A selector. Its keywords are the experiment's keys.

    `numbers`: state, of what JSON can hold; it persists, also if the node is killed and resumed.
    """

    numbers: dict[str, Any]

    def select(self, now: Situation) -> Sequence[str]:
        """Return `now.count` different children. Random numbers come from `now.chance()`, so that a run repeats."""
        raise NotImplementedError


class OwnSelector:
    """The user's selector. An error in it ends the run as InvalidExperiment."""

    def __init__(self, settings: OwnSelection) -> None:
        found = own.build(KEY, settings, Selector)
        assert isinstance(found, Selector)
        if not hasattr(found, "numbers"):
            found.numbers = {}
        self.selector = found
        self._name = settings.name

    def __call__(self, now: Situation) -> Sequence[str]:
        """Return its choice, checked. Raises InvalidExperiment."""
        try:
            chosen = list(self.selector.select(now))
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            raise InvalidExperiment(KEY, self._name, f"fails with {own.short(error)}", "Correct it.") from None
        if len(chosen) != now.count or len(set(chosen)) != now.count or not set(chosen) <= set(now.children):
            problem = f"selects {chosen!r:.200} of {len(now.children)} children"
            raise InvalidExperiment(KEY, self._name, problem, f"Return {now.count} different ones.")
        return chosen
