"""The product's errors: each crosses a process boundary, and keeps what it knows."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

from common.errors import FedstrataError, InvalidExperiment, LeftOut, StorageFailed
from common.experiment.devices import Move
from common.host.subprocess_channel import ProcessEnded
from common.protocol.messages import Announcement
from common.runtime.discovery import Found, Moved
from common.runtime.lifecycle import Away, MovesAway
from deploy.links.kernel import CommandRefused
from deploy.sweeps.running import CellFailed

ROOT: Final = Path(__file__).parents[1]
CLASS: Final = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)
BUILT_IN: Final = {"BaseException", "Exception", "RuntimeError", "ValueError", "OSError"}
INVALID: Final = ("key", {"a": [1, 2]}, "a problem", "A remedy.", ("mine.py:3, in f: 1 / 0",))
# One of each that takes another argument than a text.
MADE: Final[Mapping[str, Callable[[], BaseException]]] = {
    "InvalidExperiment": lambda: InvalidExperiment(*INVALID),
    "LeftOut": lambda: LeftOut(*INVALID),
    "StorageFailed": lambda: StorageFailed("file", "/x", "a problem", "A remedy."),
    "ProcessEnded": lambda: ProcessEnded("the peer", -9),
    "CellFailed": lambda: CellFailed("a reason", 4, ["a frame"]),
    "CommandRefused": lambda: CommandRefused("a problem", "A remedy."),
    "Away": lambda: Away(1.5, for_s=2.0),
    "MovesAway": lambda: MovesAway(Move(at_s=1.0, parent="institution-0")),
    "Moved": lambda: Moved(Found("run", "session", Announcement("{}", "[]"))),
}


def _errors() -> list[type[BaseException]]:
    """Return all exceptions that the product defines, by its source: importing all of it would have effects."""
    found: list[tuple[str, str, set[str]]] = []
    for package in ("cloud", "institution", "device", "common", "deploy"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name, bases in CLASS.findall(path.read_text(encoding="utf-8")):
                found.append((module, name, {base.strip() for base in bases.split(",")}))
    known = set(BUILT_IN)
    while more := {name for _, name, bases in found if bases & known and name not in known}:
        known |= more
    return [getattr(import_module(module), name) for module, name, bases in found if bases & known]


def test_every_error_pickles_and_copies_with_all_that_it_knows() -> None:
    kinds = _errors()
    for kind in kinds:
        error = MADE.get(kind.__name__, partial(kind, "a reason"))()
        error.add_note("a note")
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(other) is kind and str(other) == str(error) != ""
            assert (other.args, vars(other)) == (error.args, vars(error)), kind
            assert getattr(other, "exit_code", None) == getattr(error, "exit_code", None), kind
    names = {kind.__name__ for kind in kinds}
    assert {"InvalidExperiment", "ProcessEnded", "Moved", "CellFailed", "Cancelled", "NotMqtt"} <= names
    assert MADE.keys() <= names and issubclass(InvalidExperiment, FedstrataError)
