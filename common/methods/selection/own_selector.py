"""Selectors of the user's own: `selection.name = "package.module:Class"`, a class that inherits from `Selector`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from common.experiment import own
from common.experiment.selection import OwnSelection
from common.methods.selection.situation import Situation

KEY: Final = "selection.name"


class Selector(own.Kept):
    """A selector. Its keywords are the experiment's keys."""

    def select(self, now: Situation) -> Sequence[str]:
        """Return `now.count` different children. Random numbers come from `now.chance()`, so that a run repeats."""
        raise NotImplementedError


class OwnSelector:
    """The user's selector. An error in it ends the run as InvalidExperiment."""

    def __init__(self, settings: OwnSelection) -> None:
        self.selector = own.build(KEY, settings, Selector)
        self._name = settings.name

    @property
    def numbers(self) -> dict[str, Any]:
        """What the selector keeps. Raises InvalidExperiment unless JSON can hold it."""
        found: dict[str, Any] = own.kept(KEY, self._name, self.selector.numbers, "`numbers` are")
        return found

    def __call__(self, now: Situation) -> Sequence[str]:
        """Return its choice, checked. Raises InvalidExperiment."""
        with own.guarded({KEY: self._name}):
            chosen = list(self.selector.select(now))
        if len(chosen) != now.count or len(set(chosen)) != now.count or not set(chosen) <= set(now.children):
            problem = f"selects {chosen!r:.200} of {len(now.children)} children"
            own.refuse(KEY, self._name, problem, f"Return {now.count} different ones.")
        return chosen
