"""States on disk, one folder each, complete or absent: of a rule, and of a node after its tasks.

Tasks are counted over the run, from 1. Each task names the one that it `follows`: the node's last task whose result its
parent used. So a result that was not used, or a task that a restarted parent repeats, leaves no trace in the state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from common.host.files import PARTIAL, sync, writing

FACTS: Final = "facts.json"
GLOBAL_ROUND: Final = "global_round"
START: Final = "start"  # of its global round: the task that the first one in it followed


def write_state(folder: Path, name: str, save: Callable[[Path], Mapping[str, object]]) -> None:
    """Call `save` with a new folder, add the facts it returns, and rename the folder to `name` when it is complete.

    A power loss leaves it complete or absent, too. Raises StorageFailed.
    """
    partial = folder / f"{name}{PARTIAL}"
    with writing(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        facts = save(partial)
        (partial / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            sync(path)
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(partial, folder / name)
        sync(folder)


def read_state(state: Path, restore: Callable[[Path, Mapping[str, object]], None]) -> None:
    """Call `restore` with a state's folder and facts."""
    restore(state, json.loads((state / FACTS).read_text(encoding="utf-8")))


def keep_last(folder: Path, count: int) -> None:
    """Remove all states but the last `count`, by name."""
    whole = [facts.parent for facts in folder.glob(f"*/{FACTS}") if facts.parent.suffix != PARTIAL]
    for old in sorted(whole)[:-count]:
        shutil.rmtree(old, ignore_errors=True)


class TaskStates:
    """One node's states. `rounds_back`: the number of global rounds that a parent may return to."""

    def __init__(self, folder: Path, *, rounds_back: int) -> None:
        self._folder = folder
        self._rounds_back = rounds_back

    def write(
        self, task: int, save: Callable[[Path], Mapping[str, object]], *, follows: int, global_round: int
    ) -> None:
        """Save the state after a task of a global round, see `write_state`; remove what no task can follow.

        Raises StorageFailed.
        """
        earlier = self._facts(_name(follows))
        same = earlier.get(GLOBAL_ROUND) == global_round
        made = {GLOBAL_ROUND: global_round, START: earlier[START] if same else follows}
        write_state(self._folder, _name(task), lambda folder: {**save(folder), **made})
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
        file = self._folder / name / FACTS
        if name.endswith(PARTIAL) or not file.exists():
            return {}
        facts: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return facts


def _name(task: int) -> str:
    return f"after-{task:012d}"
