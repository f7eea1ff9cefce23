"""The state of an institution's rule and client selection between its tasks.

A task names the one whose state it follows: the parent may repeat a task after a restart, or not use a result, and a
killed institution starts its task again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from common.errors import StateLost
from common.methods.rule import Rule
from common.methods.selection import ClientSelection
from common.storage.spool import Spool
from common.storage.task_states import TaskStates

SELECTION: Final = "selection"  # among the facts of a rule's state


class Memory:
    """One institution's rule and client selection.

    `build` and `select` create new ones. `remembers`: their state persists between tasks, in the spool. `rounds_back`:
    the global rounds that the cloud may return. Tasks are counted over the run, from 1.
    """

    def __init__(
        self,
        build: Callable[[], Rule],
        select: Callable[[Rule], ClientSelection],
        *,
        remembers: bool,
        spool: Spool,
        rounds_back: int,
    ) -> None:
        self._build = build
        self._select = select
        self._states = TaskStates(spool.states(), rounds_back=rounds_back) if remembers else None
        self._made: tuple[Rule, ClientSelection] | None = None
        self._stands: int | None = None  # the task after which the state is; None: within a task
        self._follows = 0

    def before(self, follows: int) -> tuple[Rule, ClientSelection]:
        """Return the rule and the selection with their state after task `follows`, 0: new ones, about to do another.

        Raises StateLost if their state is lost.
        """
        if self._made is None or (self._states is not None and self._stands != follows):
            rule = self._build()
            self._made = rule, self._select(rule)
            if self._states is not None and follows:
                _restore(self._states, follows, *self._made)
        self._stands, self._follows = None, follows
        return self._made

    def after(self, task: int, *, global_round: int) -> None:
        """Save the state after a task. Raises StorageFailed."""
        if self._states is not None and self._made is not None:
            self._states.write(task, partial(_save, *self._made), follows=self._follows, global_round=global_round)
        self._stands = task


def _restore(states: TaskStates, task: int, rule: Rule, selection: ClientSelection) -> None:
    if not states.read(task, partial(_load, rule, selection)):
        raise StateLost(
            f"the state of this institution's rule after its task {task} is lost. Start institutions "
            "with the same --spool DIR after a restart, or start a new run."
        )


def _save(rule: Rule, selection: ClientSelection, folder: Path) -> dict[str, object]:
    return rule.save(folder) | {SELECTION: selection.save()}


def _load(rule: Rule, selection: ClientSelection, folder: Path, facts: Mapping[str, Any]) -> None:
    rule.restore(folder, facts)
    selection.restore(facts[SELECTION])
