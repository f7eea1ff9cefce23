"""A user's own code, named in an experiment: `package.module:Name`.

Models, data sets, losses, scores, objectives and rules may be so named. The module must be importable wherever the code
runs: from the folder in which the command was started, or as any other module. The cloud
gets its experiment from its user. The other nodes get it from a broker: they import only what their own user has
allowed by `--allow PACKAGE`, and nothing of Python's standard library. `fedstrata run` allows its nodes what its user's
experiment names.
"""

from __future__ import annotations

import importlib
import inspect
import json
import linecache
import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, Final, NamedTuple, Never, Self, TypeVar

from pydantic import ConfigDict

from common.errors import FedstrataError, InvalidExperiment, described
from common.experiment.tables import SettingsTable, form, proposal
from common.host.accelerators import is_lost, out_of_memory

FORM: Final = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
Base = TypeVar("Base")
LOOSE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
PACKAGES: Final = ("cloud", "common", "deploy", "device", "institution")  # fedstrata's
_ABSENT: Final = object()
OwnName = Annotated[str, form(FORM, "package.module:Name")]


class OwnSettings(SettingsTable):
    """Settings of a class of the user's own: the keys besides those listed here are its keywords."""

    model_config = ConfigDict(extra="allow")

    name: OwnName  # the class, `package.module:Name`

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The keywords for the class."""
        return self.model_extra or {}


class Kept:
    """Base of own code with state: `numbers`, of what JSON can hold, persists if the node is killed and resumed."""

    numbers: dict[str, Any]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make an object without numbers, which its own constructor may add."""
        made = super().__new__(cls)
        made.numbers = {}
        return made


def is_own(name: str) -> bool:
    """Return whether a name is not one of fedstrata's."""
    return ":" in name


def permit(names: Mapping[str, str], allowed: Collection[str]) -> None:
    """Check that this host allows the own code among names, by key; `allowed`: packages, modules and single names.

    Raises InvalidExperiment.
    """
    for key, name in names.items():
        allows = any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}:")) for prefix in allowed)
        if allows or not is_own(name):
            continue
        package = name.partition(":")[0].partition(".")[0]
        problem = "this host does not import such code without its user's permission"
        remedy = f"Start its nodes with --allow {package}, or set FEDSTRATA_ALLOW."
        raise InvalidExperiment(key, name, problem, remedy)


def load(key: str, name: str) -> Any:
    """Import what a key names, also from the current folder, after all others. Raises InvalidExperiment."""
    where, _, wanted = name.partition(":")
    if not re.fullmatch(FORM, name):
        refuse(key, name, "not of the form package.module:Name", "Write for instance mine:Rule.")
    if where.partition(".")[0] in sys.stdlib_module_names:  # some modules of Python have side effects when imported
        refuse(key, name, "is in Python's standard library", "Name one of your own modules.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    with guarded({key: name}, problem="cannot be imported ({})"):
        try:
            module = importlib.import_module(where)
            found = getattr(module, wanted, _ABSENT)  # a module may import what it needs when it is asked for a name
        except ModuleNotFoundError as error:
            remedy = f"Install {error.name} wherever it runs."
            if where == error.name or where.startswith(f"{error.name}."):
                remedy = "Start each command in its folder, or put that on PYTHONPATH."
            refuse(key, name, f"cannot be imported ({described(error)})", remedy)
        if found is _ABSENT:
            remedy = proposal(wanted, [each for each in vars(module) if not each.startswith("_")], what="It has")
            refuse(key, name, f"cannot be imported (AttributeError: {where} has no {wanted})", remedy)
        return found


def accepted(found: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keywords that a function or a class accepts; all if it needs others, which `call` refuses."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # `call` refuses it
        return dict(keywords)
    kinds = {each.kind for each in parameters}
    needed = {each.name for each in parameters if each.default is each.empty and each.kind not in LOOSE}
    if inspect.Parameter.VAR_KEYWORD in kinds or needed - keywords.keys():
        return dict(keywords)
    names = {each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY}
    return {name: value for name, value in keywords.items() if name in names}


def call(key: str, name: str, found: Any, keywords: Mapping[str, Any]) -> Any:
    """Call what was imported with keywords. Raises InvalidExperiment."""
    if not callable(found):
        refuse(key, name, f"is neither a class nor a function but {type(found).__name__}", "Name one of these.")
    try:
        inspect.signature(found).bind(**keywords)
    except (TypeError, ValueError) as error:
        given = f"the keywords {', '.join(keywords)}" if keywords else "a call without keywords"
        refuse(key, name, f"does not accept {given} ({error})", "Let it accept these, and no others without default.")
    with guarded({key: name}, remedy="Correct it, or its values."):
        return found(**keywords)


@contextmanager
def guarded(
    names: Mapping[str, str], *, problem: str = "fails with {}", remedy: str = "Correct it.", everything: bool = False
) -> Iterator[None]:
    """Raise InvalidExperiment, with file, line and function, for whatever own code raises, SystemExit too.

    `names`: of what the `with` block may call, by key; fedstrata's own among them are ignored. The error is attributed
    to the innermost frame of their packages, or to the first of `names` if a library raised it without such a frame.
    Passed on: fedstrata's errors, an interruption, failures of an accelerator, and errors of fedstrata's code, unless
    `everything` in the block is known to work with fedstrata's own of the names.
    """
    own = {key: name for key, name in names.items() if is_own(name)}
    try:
        yield
    except BaseException as error:
        known = isinstance(error, FedstrataError) or out_of_memory(error) or is_lost(error)
        if not own or known or _is_interruption(error):
            raise
        theirs, whose = _frames(error, own)
        if not theirs and not everything and whose in PACKAGES:
            raise
        key = _key_of(theirs, own)
        text = problem.format(described(error)) + _place(error, theirs)
        error.__traceback__ = None  # it references what was computed with, tensors of an accelerator too
        raise InvalidExperiment(key, own[key], text, remedy, list(map(str, theirs))) from None


def kept(key: str, name: str, found: Any, what: str) -> Any:
    """Return what own code leaves to be kept or published. Raises InvalidExperiment unless it is a table for JSON."""
    if not isinstance(found, Mapping):
        refuse(key, name, f"{what} {type(found).__name__}, not a table", "Use a dict.")
    try:
        json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "Convert it, numpy's numbers by float()."
        refuse(key, name, f"{what} what JSON cannot hold ({described(error)})", remedy)
    return found


def build(key: str, settings: OwnSettings, base: type[Base]) -> Base:
    """Return an object of the class that settings name. Raises InvalidExperiment unless it is of the class `base`."""
    found = load(key, settings.name)
    if not (isinstance(found, type) and issubclass(found, base)):
        refuse(key, settings.name, f"is not a class of {base.__name__}", f"Let it inherit from {base.__module__}.")
    made: Base = call(key, settings.name, found, settings.keywords)
    return made


def refuse(key: str, name: str, problem: str, remedy: str) -> Never:
    """Raise InvalidExperiment for own code."""
    raise InvalidExperiment(key, name, problem, remedy) from None


class _Frame(NamedTuple):
    """A place in own code: its module, file, line, and function, such as `Focal.losses`."""

    module: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.where}, in {self.function}: {linecache.getline(self.file, self.line).strip()}"

    @property
    def where(self) -> str:
        """The file, from the current folder if it is there, and the line."""
        path = Path(self.file)
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{self.line}"


def _frames(error: BaseException, own: Mapping[str, str]) -> tuple[list[_Frame], str]:
    """Return the frames of own code, the innermost last, and the package of the innermost frame of all.

    That is "" for an error of the `with` block itself: it called what has no frame, such as a function in C.
    """
    found = [
        _Frame(frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line, frame.f_code.co_qualname)
        for frame, line in walk_tb(error.__traceback__)
    ]
    packages = {_package(name) for name in own.values()}
    _, _, *below = found  # of `guarded`, and of the block
    return [each for each in found if _package(each.module) in packages], _package(below[-1].module) if below else ""


def _place(error: BaseException, theirs: Sequence[_Frame]) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f", in {error.filename}:{error.lineno}"
    return f", in {theirs[-1].function} ({theirs[-1].where})" if theirs else ""


def _package(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _key_of(theirs: Sequence[_Frame], own: Mapping[str, str]) -> str:
    """Return the key of what failed; several names may be in one file."""
    for found in (
        [f"{each.module}:{each.function.partition('.')[0]}" for each in theirs],
        [each.module for each in theirs],
        [_package(each.module) for each in theirs],
    ):
        for part in reversed(found):
            for key, name in own.items():
                if name == part or name.startswith((f"{part}:", f"{part}.")):
                    return key
    return next(iter(own))


def _is_interruption(error: BaseException) -> bool:
    """Return whether a signal raised the error: it does in the main thread alone, by a handler; workers have none."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # it leaves no trace
        return True
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_code is getattr(getattr(handler, "func", handler), "__code__", None)
