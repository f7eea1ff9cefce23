"""The state of an institution between its tasks: of its rule, its client selection, and its codec towards its parent.

A task names the one whose state it follows: the parent may repeat a task after a restart, or not use a result, and a
killed institution starts its task again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.errors import StateLost
from common.methods.rule import Rule
from common.methods.selection import ClientSelection
from common.storage.spool import Spool
from common.storage.task_states import TaskStates

SELECTION: Final = "selection"  # among the facts of a rule's state
LEFT_OUT: Final = "left-out"  # file of what the codec left out


class Memory:
    """One institution's rule and client selection, and `left_out`, float32 [left_out_columns], which encoding changes.

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
        left_out_columns: int = 0,
    ) -> None:
        self.left_out = np.zeros(left_out_columns, np.float32)
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
            self.left_out[:] = 0
            if self._states is not None and follows:
                self._restore(self._states, follows)
        self._stands, self._follows = None, follows
        return self._made

    def after(self, task: int, *, global_round: int) -> None:
        """Save the state after a task. Raises StorageFailed."""
        if self._states is not None and self._made is not None:
            save = partial(self._save, *self._made)
            self._states.write(task, save, follows=self._follows, global_round=global_round)
        self._stands = task

    def _restore(self, states: TaskStates, task: int) -> None:
        if not states.read(task, self._load):
            raise StateLost(
                f"the state of this institution's rule after its task {task} is lost. Start institutions "
                "with the same --spool DIR after a restart, or start a new run."
            )

    def _save(self, rule: Rule, selection: ClientSelection, folder: Path) -> dict[str, object]:
        if self.left_out.size:
            (folder / LEFT_OUT).write_bytes(self.left_out.data)
        return rule.save(folder) | {SELECTION: selection.save()}

    def _load(self, folder: Path, facts: Mapping[str, Any]) -> None:
        assert self._made is not None
        rule, selection = self._made
        rule.restore(folder, facts)
        selection.restore(facts[SELECTION])
        if self.left_out.size:
            self.left_out[:] = np.fromfile(folder / LEFT_OUT, np.float32)
