"""A node's states after its tasks, on disk: what its next tasks continue from.

Tasks are counted over the run, from 1. Each task names the one that it `follows`: the node's last task whose result its
parent used. So a result that was not used, or a task that a restarted parent repeats, leaves no trace in the state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from common.host.files import PARTIAL
from common.storage import rule_states

GLOBAL_ROUND: Final = "global_round"
START: Final = "start"  # of its global round: the task that the first one in it followed


class TaskStates:
    """One node's states. `rounds_back`: the number of global rounds that a parent may return to."""

    def __init__(self, folder: Path, *, rounds_back: int) -> None:
        self._folder = folder
        self._rounds_back = rounds_back

    def write(
        self, task: int, save: Callable[[Path], Mapping[str, object]], *, follows: int, global_round: int
    ) -> None:
        """Save the state after a task of a global round, see `rule_states.write`; remove what no task can follow.

        Raises StorageFailed.
        """
        earlier = self._facts(_name(follows))
        same = earlier.get(GLOBAL_ROUND) == global_round
        made = {GLOBAL_ROUND: global_round, START: earlier[START] if same else follows}
        rule_states.write(self._folder, _name(task), lambda folder: {**save(folder), **made})
        self._prune(task, follows, global_round)

    def read(self, task: int, restore: Callable[[Path, Mapping[str, Any]], None]) -> bool:
        """Call `restore` with the state after a task; return False if there is none."""
        facts = self._facts(_name(task))
        if facts:
            restore(self._folder / _name(task), facts)
        return bool(facts)

    def _prune(self, task: int, follows: int, global_round: int) -> None:
        """Remove all states but those that a task may follow.

        That is never a state between `follows` and `task`, whose result was not used, nor a later one, which precedes a
        parent's restart. A parent returns to the start of one of its own tasks: in this global round, or of a global
        round in reach.
        """
        states = {state.name for state in self._folder.glob("after-*")}
        kept = {_name(task)}
        for name in states:
            made = self._facts(name)
            if made and (name <= _name(follows) or name == _name(task)):
                if made[GLOBAL_ROUND] == global_round:
                    kept.add(name)
                if made[GLOBAL_ROUND] >= global_round - self._rounds_back:
                    kept.add(_name(made[START]))
        for name in states - kept:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _facts(self, name: str) -> Mapping[str, Any]:
        """Return a state's facts, none if there is no complete one."""
        file = self._folder / name / rule_states.FACTS
        if name.endswith(PARTIAL) or not file.exists():
            return {}
        facts: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return facts


def _name(task: int) -> str:
    return f"after-{task:012d}"
