"""States on disk, one folder each, complete or absent: of a rule, and of a node after its tasks.

A state's facts have a digest of each of its files, and one of themselves. A damaged state is named,
and never used.

Tasks are counted over the run, from 1. Each task names the one that it `follows`: the node's last
task whose result its parent used. So a result that was not used, or a task that a restarted parent
repeats, leaves no trace in the state.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from xxhash import xxh3_64

from fedstrata.common.errors import StateLost
from fedstrata.common.host.files import PARTIAL, remove_folder, sync, writing

FACTS: Final = "facts.json"
GLOBAL_ROUND: Final = "global_round"
START: Final = "start"  # of its global round: the task that the first one in it followed
LINKED_MOST: Final = 65_536  # files whose digests are remembered
PIECE_BYTES: Final = 1 << 20  # read at once
REMEDY: Final = "with the same --spool DIR after a restart, or start a new run."

Facts: TypeAlias = Mapping[str, Any]
Save: TypeAlias = Callable[[Path], Mapping[str, object]]

log = logging.getLogger("fedstrata.states")
# digests of files with several names, which never change
_linked: dict[tuple[int, int, int, int], str] = {}


class DamagedState(ValueError):
    """A state that is not as it was written; names the file."""


def write_state(folder: Path, name: str, save: Save) -> None:
    """Call `save` with a new folder, add the facts it returns, and rename the folder to `name` when
    it is complete.

    A power loss leaves it complete or absent, too. Raises StorageFailed.
    """
    partial = folder / f"{name}{PARTIAL}"
    with writing(partial):
        remove_folder(partial)
        partial.mkdir(parents=True)
        facts = save(partial)
        kept: dict[str, Any] = {"facts": facts, "files": _digests(partial, _remembered)}
        (partial / FACTS).write_text(
            json.dumps({**kept, "digest": _digest(kept)}), encoding="utf-8"
        )
        for path in (*partial.rglob("*"), partial):
            if not path.is_symlink():
                sync(path)
        remove_folder(folder / name)
        os.replace(partial, folder / name)
        sync(folder)


def read_state(state: Path, restore: Callable[[Path, Facts], None]) -> None:
    """Call `restore` with a state's folder and facts. Raises DamagedState, OSError, and what
    `restore` raises.
    """
    kept = _read_facts(state / FACTS)
    found = _digests(state, file_digest)
    for name, digest in kept["files"].items():
        if found.get(name) != digest:
            raise DamagedState(f"{state / name} is damaged")
    if unknown := found.keys() - kept["files"].keys():
        raise DamagedState(f"{state / min(unknown)} is no file of this state")
    restore(state, kept["facts"])


def keep_last(folder: Path, count: int) -> None:
    """Remove all states but the last `count`, by name."""
    whole = [facts.parent for facts in folder.glob(f"*/{FACTS}") if facts.parent.suffix != PARTIAL]
    for old in sorted(whole)[:-count]:
        with suppress(OSError):
            remove_folder(old)


class TaskStates:
    """One node's states. `rounds_back`: the number of global rounds that a parent may return to.

    `what`: a state in errors, such as `what this device kept`; `who`: the nodes of its kind, such
    as `devices`.
    """

    def __init__(self, folder: Path, *, rounds_back: int, what: str, who: str) -> None:
        self._folder = folder
        self._rounds_back = rounds_back
        self._what = what
        self._who = who

    def write(self, task: int, save: Save, *, follows: int, global_round: int) -> None:
        """Save the state after a task of a global round, see `write_state`; remove what no task can
        follow.

        Raises StorageFailed.
        """
        earlier = self._facts(_name(follows))
        same = earlier.get(GLOBAL_ROUND) == global_round
        made = {GLOBAL_ROUND: global_round, START: earlier[START] if same else follows}
        write_state(self._folder, _name(task), lambda folder: {**save(folder), **made})
        self._prune(task, follows, global_round)

    def read(self, task: int, restore: Callable[[Path, Facts], None]) -> None:
        """Call `restore` with the state after a task. Raises StateLost if there is none, or if it
        is damaged.
        """
        state = self._folder / _name(task)
        try:
            read_state(state, restore)
        except (OSError, ValueError, KeyError, TypeError) as error:
            lost = f"{self._what} after its task {task} is lost"
            if not state.exists():
                raise StateLost(f"{lost}. Start {self._who} {REMEDY}") from None
            problem = str(error) if isinstance(error, DamagedState) else f"{state}: {error!r}"
            raise StateLost(f"{lost}: {problem}. Examine that disk, and start a new run.") from None

    def _prune(self, task: int, follows: int, global_round: int) -> None:
        """Remove all states but those that a task may follow.

        That is never a state between `follows` and `task`, whose result was not used, nor a later
        one, which precedes a parent's restart. A parent returns to the start of one of its own
        tasks: in this global round, or of a global round in reach.
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
            with suppress(OSError):
                remove_folder(self._folder / name)

    def _facts(self, name: str) -> Facts:
        """Return a state's facts, none if there is no complete one."""
        file = self._folder / name / FACTS
        if name.endswith(PARTIAL) or not file.exists():
            return {}
        try:
            found: Facts = _read_facts(file)["facts"]
        except (OSError, DamagedState) as error:
            log.warning("%s: this state is not used", error)
            return {}
        return found


def file_digest(path: Path) -> str:
    """Return 16 hexadecimal digits over a file's content. Raises OSError."""
    total = xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            total.update(piece)
    return total.hexdigest()


def _read_facts(file: Path) -> Facts:
    """Return what a file of facts has. Raises DamagedState, OSError."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        digest = kept.pop("digest")
    except FileNotFoundError:
        raise DamagedState(f"{file} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        digest = ""
        kept = None
    if kept is None or digest != _digest(kept):
        raise DamagedState(f"{file} is damaged")
    found: Facts = kept
    return found


def _digest(kept: Facts) -> str:
    return xxh3_64(json.dumps(kept).encode()).hexdigest()


def _digests(state: Path, digest_of: Callable[[Path], str]) -> dict[str, str]:
    """Return a digest of each file of a state but its facts, and of each link and folder in it, by
    name.
    """
    found = {}
    for path in sorted(state.rglob("*")):
        name = str(path.relative_to(state))
        if path.is_symlink():
            found[name] = f"link {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        elif name != FACTS:
            found[name] = digest_of(path)
    return found


def _remembered(path: Path) -> str:
    """Return a file's digest; of a file with several names it is remembered, as states of many
    models share them.
    """
    stat = path.stat()
    if stat.st_nlink == 1:
        return file_digest(path)
    key = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
    if key not in _linked:
        if len(_linked) == LINKED_MOST:
            _linked.clear()
        _linked[key] = file_digest(path)
    return _linked[key]


def _name(task: int) -> str:
    return f"after-{task:012d}"
