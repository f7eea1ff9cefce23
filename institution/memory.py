"""The state of an institution's rule and client selection between its tasks, on disk if there is a folder.

The parent may repeat a task: after a restart the cloud continues from its last checkpoint, and a killed institution
starts its task again. The rule must then have the state it had before that task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from common.aggregation.aggregator import Aggregator
from common.aggregation.selection.client_selection import ClientSelection
from common.errors import RunFailed
from common.storage import rule_states

SELECTION: Final = "selection"  # among the facts of a rule's state

log = logging.getLogger("fedstrata.institution")


class Memory:
    """One institution's rule and client selection.

    `build` and `select` create new ones. `remembers`: their state persists between tasks. `folder`: None if there is no
    persistent state, or only in this process. `kept`: the number of tasks that the parent may return to.
    `must_remember`: whether this institution was selected for a task before the given one. Tasks are counted over the
    run.
    """

    def __init__(
        self,
        build: Callable[[], Aggregator],
        select: Callable[[], ClientSelection],
        *,
        remembers: bool,
        folder: Path | None,
        kept: int,
        must_remember: Callable[[int], bool],
    ) -> None:
        self._build = build
        self._select = select
        self._remembers = remembers
        self._folder = folder
        self._kept = kept
        self._must_remember = must_remember
        self._made: tuple[Aggregator, ClientSelection] | None = None
        self._stands: int | None = None  # the state precedes this task; None: unknown, or within a task

    def before(self, task: int, *, had_tasks: bool = False) -> tuple[Aggregator, ClientSelection]:
        """Return the rule and the selection with their state before a task, about to do it.

        `had_tasks`: whether the parent has reported earlier ones. Raises RunFailed if their state is lost.
        """
        if self._made is None or (self._remembers and (self._stands is None or self._stands > task)):
            self._made = self._build(), self._select()
            if self._remembers and task > 0:
                self._restore(task, *self._made, had_tasks=had_tasks)
        self._stands = None
        return self._made

    def after(self, task: int) -> None:
        """Save the state after a task."""
        self._stands = task + 1
        if self._remembers and self._folder is not None and self._made is not None:
            rule_states.write(self._folder, _name(task + 1), partial(_save, *self._made))
            rule_states.prune(self._folder, keep=self._kept)

    def _restore(self, task: int, rule: Aggregator, selection: ClientSelection, *, had_tasks: bool) -> None:
        found = rule_states.latest(self._folder, _name(task)) if self._folder is not None else None
        if found is not None:
            rule_states.read(found, partial(_load, rule, selection))
        elif had_tasks or self._must_remember(task):
            raise RunFailed(
                f"the state of this institution's rule before its task {task} is lost. Start institutions "
                "with the same --spool DIR after a restart, or start a new run."
            )
        else:
            log.warning("no state of the rule from before task %d: this institution took no part yet, or lost it", task)


def _name(task: int) -> str:
    return f"before-{task:06d}"


def _save(rule: Aggregator, selection: ClientSelection, folder: Path) -> dict[str, object]:
    return rule.save(folder) | {SELECTION: selection.save()}


def _load(rule: Aggregator, selection: ClientSelection, folder: Path, facts: Mapping[str, Any]) -> None:
    rule.restore(folder, facts)
    selection.restore(facts.get(SELECTION, {}))  # a state of an earlier release has none
