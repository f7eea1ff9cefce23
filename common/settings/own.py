"""A user's own code, named in an experiment: `package.module:Name`.

Models, data sets, losses, scores, objectives and rules may be so named. The module must be
importable wherever the code runs: from the folder in which the command was started, or as any other
module. The cloud gets its experiment from its user. The other nodes get it from a broker: they
import only what their own user has allowed by `--allow PACKAGE`, and nothing of Python's standard
library. `fedstrata run` allows its nodes what its user's experiment names.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, Final, NamedTuple, Never, TypeVar, cast

from pydantic import ConfigDict

from fedstrata.common.errors import FedstrataError, InvalidExperiment, described
from fedstrata.common.host.accelerators import is_lost, out_of_memory
from fedstrata.common.settings.tables import PACKAGE, SettingsTable, form, proposal

FORM: Final = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
Base = TypeVar("Base")
LOOSE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NOBODYS: Final = "a_keyword_of_nobody"
_ABSENT: Final = object()
_IMPORTS: Final = ContextVar("imports", default=True)
OwnName = Annotated[str, form(FORM, "package.module:Name")]


class OwnSettings(SettingsTable):
    """Settings of a class of the user's own: the keys besides those listed here are its
    keywords.
    """

    model_config = ConfigDict(extra="allow")

    name: OwnName  # the class, `package.module:Name`

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The keywords for the class."""
        return self.model_extra or {}

    def made(self, key: str) -> object:
        """Return what they name, built. Raises InvalidExperiment."""
        return build(key, self, object)


class Kept:
    """Base of own code with state: `numbers`, of what JSON can hold, persists if the node is killed
    and resumed.
    """

    # not in `__new__`: one that takes all keywords hides that a class without `__init__` takes none
    @cached_property
    def numbers(self) -> dict[str, Any]:
        """None at first; the constructor may add some."""
        return {}


def is_own(name: str) -> bool:
    """Return whether a name is not one of fedstrata's."""
    return ":" in name


def permit(names: Mapping[str, str], allowed: Collection[str]) -> None:
    """Check that this host allows the own code among names, by key; `allowed`: packages, modules
    and single names.

    Raises InvalidExperiment.
    """
    for key, name in names.items():
        if not is_own(name) or any(_is_of(name, prefix) for prefix in allowed):
            continue
        package = name.partition(":")[0].partition(".")[0]
        problem = "this host does not import such code without its user's permission"
        remedy = f"Start its nodes with --allow {package}, or set FEDSTRATA_ALLOW."
        raise InvalidExperiment(key, name, problem, remedy)


@contextmanager
def without_imports() -> Iterator[None]:
    """Refuse to import own code in the `with` block: nobody has allowed it."""
    token = _IMPORTS.set(False)
    try:
        yield
    finally:
        _IMPORTS.reset(token)


def look_in(folder: str) -> None:
    """Find modules in a folder, too, after all others."""
    if folder not in sys.path:
        sys.path.append(folder)


def load(key: str, name: str) -> Any:
    """Import what a key names, also from the current folder, after all others. Raises
    InvalidExperiment.
    """
    if not _IMPORTS.get():
        permit({key: name}, ())
    where, _, wanted = name.partition(":")
    check_form(key, name, "package.module:Name", "Write for instance mine:Rule.")
    # some modules of Python have side effects when imported
    if where.partition(".")[0] in sys.stdlib_module_names:
        refuse(key, name, "is in Python's standard library", "Name one of your own modules.")
    look_in(os.getcwd())
    with guarded({key: name}, problem="cannot be imported ({})"):
        try:
            module = importlib.import_module(where)
            # a module may import what it needs when it is asked for a name
            found = getattr(module, wanted, _ABSENT)
        except ModuleNotFoundError as error:
            remedy = f"Install {error.name} wherever it runs."
            if where == error.name or where.startswith(f"{error.name}."):
                remedy = "Start each command in its folder, or put that on PYTHONPATH."
            refuse(key, name, f"cannot be imported ({described(error)})", remedy)
        if found is _ABSENT:
            public = [each for each in vars(module) if not each.startswith("_")]
            problem = f"cannot be imported (AttributeError: {where} has no {wanted})"
            refuse(key, name, problem, proposal(wanted, public, what="It has"))
        return found


def check_form(key: str, name: str, form: str, remedy: str) -> None:
    """Check that a name has the form of own code, `form` for people. Raises InvalidExperiment."""
    if not re.fullmatch(FORM, name):
        refuse(key, name, f"not of the form {form}", remedy)


def code(key: str, name: str) -> Callable[..., Any]:
    """Import the class or function that a key names. Raises InvalidExperiment."""
    found = load(key, name)
    if not callable(found):
        problem = f"is neither a class nor a function but {type(found).__name__}"
        refuse(key, name, problem, "Name one of these.")
    return cast(Callable[..., Any], found)


def build(key: str, settings: OwnSettings, base: type[Base]) -> Base:
    """Return an object of the class that settings name, made with their keywords.

    Raises InvalidExperiment unless it is of the class `base` and takes each keyword: its signature
    names it, or passes it on by a `**` that does not take any keyword.
    """
    name = settings.name
    found = code(key, name)
    if base is not object and not (isinstance(found, type) and issubclass(found, base)):
        remedy = f"Let it inherit from fedstrata.{base.__name__}."
        refuse(key, name, f"is not a class of {base.__name__}", remedy)
    table = key.rpartition(".")[0]
    parameters = _parameters(key, name, found)
    hidden = sorted(parameters.named & type(settings).model_fields.keys() - {"name"})
    if hidden:
        problem = f"takes {hidden[0]}, which is a key of the table itself"
        refuse(key, name, f"{problem}, so that the class does not get it", "Rename that keyword.")
    unnamed = [each for each in settings.keywords if each not in parameters.named]
    if unnamed and not (parameters.rest and _refuses_others(key, name, found, settings.keywords)):
        keyword = unnamed[0]
        problem, remedy = parameters.refusal(keyword)
        refuse(f"{table}.{keyword}", settings.keywords[keyword], f"{name} {problem}", remedy)
    if missing := [each for each in parameters.needed if each not in settings.keywords]:
        remedy = f"Set {table}.{missing[0]}, or give it a default."
        refuse(key, name, f"needs {missing[0]}, which has no default", remedy)
    made = _called(key, name, found, settings.keywords)
    if not isinstance(made, base):
        problem = f"makes {type(made).__name__}, not {base.__name__}"
        refuse(key, name, problem, "Return the object itself.")
    return made


def call(key: str, name: str, offered: Mapping[str, Any]) -> Any:
    """Call the function or class that a key names with those of the offered keywords that its
    signature names.

    A signature with `**` gets all of them. Raises InvalidExperiment.
    """
    found = code(key, name)
    parameters = _parameters(key, name, found)
    if missing := [each for each in parameters.needed if each not in offered]:
        known = ", ".join(offered)
        refuse(key, name, f"needs {missing[0]}, which is none of {known}", "Give it a default.")
    names = offered.keys() - parameters.by_place
    if not parameters.rest:
        names &= parameters.named
    taken = {each: value for each, value in offered.items() if each in names}
    return _called(key, name, found, taken)


class _Parameters(NamedTuple):
    """The parameters of own code."""

    named: set[str]  # those that a keyword may name
    needed: Sequence[str]  # those without a default, in their order
    by_place: set[str]  # those before a `/`
    rest: str  # the one with `**`, "" for none
    has: Collection[str]  # the names of the attributes

    def refusal(self, keyword: str) -> tuple[str, str]:
        """Return why no parameter takes a keyword, and the remedy."""
        if keyword in self.by_place:
            return f"takes {keyword} by its place alone", "Omit the / of its signature."
        if self.rest:
            problem = f"collects any keyword in **{self.rest}, used or not"
            return problem, f"Name {keyword} in its signature."
        if self.named:
            problem = f"takes {', '.join(sorted(self.named))}, and not this keyword"
            return problem, "Correct its name, or omit it."
        remedy = f"rite an __init__ that takes {keyword}."
        if keyword in self.has:
            return "takes no keywords; an attribute is none", f"W{remedy}"
        return "takes no keywords", f"Omit it, or w{remedy}"


def _parameters(key: str, name: str, found: Callable[..., Any]) -> _Parameters:
    """Return what own code takes. Raises InvalidExperiment."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        problem = f"has no signature that can be read ({error})"
        refuse(key, name, problem, "Name a class or function of Python's.")
    named = set[str]()
    by_place = set[str]()
    needed: list[str] = []
    rest = ""
    for each in parameters:
        if each.kind is each.VAR_KEYWORD:
            rest = each.name
        elif each.kind is each.POSITIONAL_ONLY:
            by_place.add(each.name)
        elif each.kind is not each.VAR_POSITIONAL:
            named.add(each.name)
        if each.default is each.empty and each.kind not in LOOSE:
            needed.append(each.name)
    if unnamed := [each for each in needed if each in by_place]:
        refuse(key, name, f"takes {unnamed[0]} by its place alone", "Omit the / of its signature.")
    return _Parameters(named, needed, by_place, rest, dir(found))


def _refuses_others(
    key: str, name: str, found: Callable[..., Any], keywords: Mapping[str, Any]
) -> bool:
    """Return whether a signature with `**` passes on what it collects, to one that refuses what
    nobody takes.
    """
    try:
        _called(key, name, found, {**keywords, NOBODYS: None})
    except InvalidExperiment:
        return True
    return False


def _called(key: str, name: str, found: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    with guarded({key: name}, remedy="Correct it, or its values."):
        return found(**keywords)


@contextmanager
def guarded(
    names: Mapping[str, str],
    *,
    problem: str = "fails with {}",
    remedy: str = "Correct it.",
    everything: bool = False,
) -> Iterator[None]:
    """Raise InvalidExperiment, with file, line and function, for whatever own code raises,
    SystemExit too.

    `names`: of what the `with` block may call, by key; fedstrata's own among them are ignored. The
    error is attributed to the innermost frame of their packages, or to the first of `names` if a
    library raised it without such a frame. Passed on: fedstrata's errors, an interruption, failures
    of an accelerator, and errors of fedstrata's code, unless `everything` in the block is known to
    work with fedstrata's own of the names.
    """
    own = {key: name for key, name in names.items() if is_own(name)}
    try:
        yield
    except BaseException as error:
        known = isinstance(error, FedstrataError) or out_of_memory(error) or is_lost(error)
        if not own or known or _is_interruption(error):
            raise
        theirs, whose = _frames(error, own)
        if not theirs and not everything and whose == PACKAGE:
            raise
        key = _key_of(theirs, own)
        text = problem.format(described(error)) + _place(error, theirs)
        # it references what was computed with, tensors of an accelerator too
        error.__traceback__ = None
        raise InvalidExperiment(key, own[key], text, remedy, list(map(str, theirs))) from None


def kept(key: str, name: str, found: Any, what: str, *, at: str = "") -> Any:
    """Return what own code leaves to be kept or published. Raises InvalidExperiment unless it is a
    table for JSON.

    `at`: where it was made, as `place` returns it.
    """
    if not isinstance(found, Mapping):
        refuse(key, name, f"{what} {type(found).__name__}, not a table{at}", "Use a dict.")
    try:
        json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "Convert it, numpy's numbers by float()."
        refuse(key, name, f"{what} what JSON cannot hold ({described(error)}){at}", remedy)
    return found


def place(function: Any) -> str:
    """Return where own code has a function, `, in Focal.losses (focal.py:9)`; "" for fedstrata's
    and for C's.
    """
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    module = str(getattr(plain, "__module__", ""))
    if code is None or _package(module) == PACKAGE:
        return ""
    frame = _CodePlace(module, code.co_filename, code.co_firstlineno, code.co_qualname)
    return f", in {frame.function} ({frame.where})"


def refuse(key: str, name: object, problem: str, remedy: str) -> Never:
    """Raise InvalidExperiment for own code."""
    raise InvalidExperiment(key, name, problem, remedy) from None


class _CodePlace(NamedTuple):
    """A place in own code: its module, file, line, and function, such as `Focal.losses`."""

    module: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        line = linecache.getline(self.file, self.line).strip()
        return f"{self.where}, in {self.function}: {line}"

    @property
    def where(self) -> str:
        """The file, from the current folder if it is there, and the line."""
        path = Path(self.file)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"


def _frames(error: BaseException, own: Mapping[str, str]) -> tuple[list[_CodePlace], str]:
    """Return the frames of own code, the innermost last, and the package of the innermost frame of
    all.

    That is "" for an error of the `with` block itself: it called what has no frame, such as a
    function in C.
    """
    found = []
    for frame, line in walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        code = frame.f_code
        found.append(_CodePlace(module, code.co_filename, line, code.co_qualname))
    packages = {_package(name) for name in own.values()}
    theirs = [each for each in found if _package(each.module) in packages]
    _, _, *below = found  # of `guarded`, and of the block
    if not below:
        return theirs, ""
    return theirs, _package(below[-1].module)


def _place(error: BaseException, theirs: Sequence[_CodePlace]) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f", in {error.filename}:{error.lineno}"
    if theirs:
        return f", in {theirs[-1].function} ({theirs[-1].where})"
    return ""


def _is_of(name: str, part: str) -> bool:
    """Return whether own code is that of a name, or in a package or module of that name."""
    return name == part or name.startswith((f"{part}.", f"{part}:"))


def _package(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _key_of(theirs: Sequence[_CodePlace], own: Mapping[str, str]) -> str:
    """Return the key of what failed; several names may be in one file."""
    for found in (
        [f"{each.module}:{each.function.partition('.')[0]}" for each in theirs],
        [each.module for each in theirs],
        [_package(each.module) for each in theirs],
    ):
        for part in reversed(found):
            for key, name in own.items():
                if _is_of(name, part):
                    return key
    return next(iter(own))


def _is_interruption(error: BaseException) -> bool:
    """Return whether a signal raised the error: it does in the main thread alone, by a handler;
    workers have none.
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # it leaves no trace
        return True
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_code is getattr(getattr(handler, "func", handler), "__code__", None)
