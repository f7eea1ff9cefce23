"""Bugs put back on purpose: each removes one promise of the protocol, and drawn labs should find
it.

    python -m tests.simulation --mutation session_check_dropped --seeds 500

runs labs until one violates an invariant. A mutation replaces a method of a class, which is looked
for by its name in `common.protocol`, or is ArrayTraining: it fails loudly if the class or the
method is no longer there.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

from fedstrata.common import protocol
from fedstrata.common.protocol.messages import Acknowledgement, Key, Presence, Result, Task
from fedstrata.device.training.arrays import ArrayTraining

Method = Callable[..., Any]
Change = Callable[[Method], Method]


def _speaks(original: Method) -> Method:
    """Believe any session that sends under a peer's name."""

    def speaks(self: Any, peer: str, session: str, now: float) -> bool:
        original(self, peer, session, now)
        return True

    return speaks


def _announced(original: Method) -> Method:
    """Acknowledge a result when it is announced, not when its model has arrived and is valid.

    No model and no ending changes: a child does nothing on an acceptance but stop repeating the
    result. It still serves the model; if that is gone, or the child restarts, the task is sent
    again and answered anew; a refusal may follow an acceptance, as when one is taken back. So the
    order of the two messages is checked: `Evidence.misled`.
    """

    def receive(self: Any, name: str, message: Any, *, now: float) -> str:
        wrong: str = original(self, name, message, now=now)
        if isinstance(message, Result) and not wrong and self.is_announced(name, message.key):
            self._acknowledgements.append((name, Acknowledgement(message.key, "")))
        return wrong

    return receive


def _cleared(original: Method) -> Method:
    """Ignore that a peer has cleared its presence: of a child only the end is late, by the time for
    its farewell.
    """

    def _presence(self: Any, *proof: Any, **settings: Any) -> None:
        if _presence_of(*proof) is not None:
            original(self, *proof, **settings)

    return _presence


def _same_attempt(original: Method) -> Method:
    """Open an earlier round again in the same attempt, so that keys do not only grow."""

    def open_(self: Any, *, global_round: int, local_round: int, **settings: Any) -> Key:
        if self.key is not None and (global_round, local_round) <= self.key[1:]:
            self.key = Key(self.key.attempt, -1, -1)
        key: Key = original(self, global_round=global_round, local_round=local_round, **settings)
        return key

    return open_


def _same_order(original: Method) -> Method:
    """Compare the keys of a parent's new session with those of its last one."""

    def parent_restarted(self: Any, now: float, **known: Any) -> None:
        self.reconnected(now)

    return parent_restarted


def _same_blob(original: Method) -> Method:
    """Take a task with the blob of the present one for the same task."""

    def _take(self: Any, task: Task, now: float) -> None:
        mine: Task | None = self._task
        if mine is not None and mine.model.blob == task.model.blob:
            self._task = replace(
                task, key=mine.key._replace(global_round=task.key[1], local_round=task.key[2])
            )
        original(self, task, now)

    return _take


def _late_will(original: Method) -> Method:
    """Count the last message of any session under a peer's name."""

    def receive(
        self: Any, peer: str, session: str, presence: Presence, *, retained: bool, now: float
    ) -> bool:
        counts: bool = original(self, peer, session, presence, retained=retained, now=now)
        return counts or not retained

    return receive


def _in_place(original: Method) -> Method:
    """Train on the folder that a trainer keeps, not on a copy of what it kept before."""

    @contextmanager
    def _attempt(self: Any, kept: Any) -> Iterator[Any]:
        if kept.before is None:
            kept.after.mkdir(parents=True, exist_ok=True)
        elif not kept.after.exists():
            shutil.copytree(kept.before, kept.after)
        yield kept.after

    return _attempt


def _presence_of(first: Any, *others: Any) -> Presence | None:
    """Return the presence among the arguments of a session's handler: a field of the first, or the
    second next.
    """
    found: Presence | None = others[1] if isinstance(first, str) else first.presence
    return found


MUTATIONS: Final[Mapping[str, Mapping[tuple[str, str], Change]]] = {
    "session_check_dropped": {("PeerProofs", "speaks"): _speaks},
    "acknowledged_when_announced": {("Coordinator", "receive"): _announced},
    "cleared_presence_ignored": {
        ("ParentSession", "_presence"): _cleared,
        ("ChildSession", "_presence"): _cleared,
    },
    "attempt_never_grows": {("Coordinator", "open"): _same_attempt},
    "new_session_keeps_order": {("Participant", "parent_restarted"): _same_order},
    "task_is_its_blob": {("Participant", "_take"): _same_blob},
    "late_will_believed": {("PeerProofs", "receive"): _late_will},
    "retried_on_what_it_changed": {("ArrayTraining", "_attempt"): _in_place},
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Run with one bug."""
    patches = [
        patch.object(owner := _class(kind), method, change(getattr(owner, method)))
        for (kind, method), change in MUTATIONS[name].items()
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _class(name: str) -> Any:
    """Return the class of this name: ArrayTraining, or one in `common.protocol`, in whichever file
    it is.
    """
    if name == ArrayTraining.__name__:
        return ArrayTraining
    for module in pkgutil.iter_modules(protocol.__path__, "fedstrata.common.protocol."):
        found = getattr(importlib.import_module(module.name), name, None)
        if isinstance(found, type):
            return found
    raise LookupError(f"fedstrata.common.protocol has no class {name}")
