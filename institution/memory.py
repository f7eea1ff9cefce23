"""The state of an institution's rule between global rounds, on disk if there is a folder.

The cloud may repeat a global round: after a restart it continues from its last checkpoint, and a killed institution
starts its global round again. The rule must then have the state it had before that global round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from common.aggregation.aggregator import Aggregator
from common.errors import RunFailed
from common.storage import rule_states

log = logging.getLogger("fedstrata.institution")


class Memory:
    """One institution's rule. `build` creates a new one; `remembers`: its state persists between global rounds.

    `folder`: None if there is no persistent state, or only in this process. `kept`: the number of global rounds that
    the cloud may return to. `must_remember`: whether this institution took part in a global round before the given one.
    """

    def __init__(
        self,
        build: Callable[[], Aggregator],
        *,
        remembers: bool,
        folder: Path | None,
        kept: int,
        must_remember: Callable[[int], bool],
    ) -> None:
        self._build = build
        self._remembers = remembers
        self._folder = folder
        self._kept = kept
        self._must_remember = must_remember
        self._rule = build()
        self._stands: int | None = None  # the state precedes this global round; None: unknown, or within a round

    def before(self, global_round: int) -> Aggregator:
        """Return the rule with its state before a global round, about to run it. Raises RunFailed."""
        if self._remembers and (self._stands is None or self._stands > global_round):
            self._rule = self._build()
            if global_round > 0:
                self._restore(global_round)
        self._stands = None
        return self._rule

    def after(self, global_round: int) -> None:
        """Save the rule's state after a global round."""
        self._stands = global_round + 1
        if self._remembers and self._folder is not None:
            rule_states.write(self._folder, _name(global_round + 1), self._rule.save)
            rule_states.prune(self._folder, keep=self._kept)

    def _restore(self, global_round: int) -> None:
        found = rule_states.latest(self._folder, _name(global_round)) if self._folder is not None else None
        if found is not None:
            rule_states.read(found, self._rule.restore)
        elif self._must_remember(global_round):
            raise RunFailed(
                f"the state of this institution's rule before global round {global_round} is lost. Start institutions "
                "with the same --spool DIR after a restart, or start a new run."
            )
        else:
            log.warning(
                "no state of the rule from before global round %d: this institution took no part yet, or lost it",
                global_round + 1,
            )


def _name(global_round: int) -> str:
    return f"before-{global_round:06d}"
