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
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, Never, Self, TypeVar

from pydantic import ConfigDict

from common.errors import InvalidExperiment
from common.experiment.tables import SettingsTable, form, proposal

FORM: Final = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
Base = TypeVar("Base")
LOOSE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
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
    remedy = "Correct it."
    try:
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
        module = importlib.import_module(where)
        remedy = proposal(wanted, [each for each in vars(module) if not each.startswith("_")], what="It has")
        return getattr(module, wanted)
    except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name:
            remedy = f"Install {error.name} wherever it runs."
            if where == error.name or where.startswith(f"{error.name}."):
                remedy = "Start each command in its folder, or put that on PYTHONPATH."
        refuse(key, name, f"cannot be imported ({short(error)})", remedy)


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
    with guarded(key, name, remedy="Correct it, or its values."):
        return found(**keywords)


@contextmanager
def guarded(key: str, name: str, *, where: str = "", remedy: str = "Correct it.") -> Iterator[None]:
    """Raise InvalidExperiment for any error of own code; `where`: in which of its functions."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - own code may raise anything
        refuse(key, name, f"fails {where and f'in {where} '}with {short(error)}", remedy)


def build(key: str, settings: OwnSettings, base: type[Base]) -> Base:
    """Return an object of the class that settings name. Raises InvalidExperiment unless it is of the class `base`."""
    found = load(key, settings.name)
    if not (isinstance(found, type) and issubclass(found, base)):
        refuse(key, settings.name, f"is not a class of {base.__name__}", f"Let it inherit from {base.__module__}.")
    made: Base = call(key, settings.name, found, settings.keywords)
    return made


def short(error: Exception) -> str:
    """Return an error's type and message."""
    return f"{type(error).__name__}: {error}"


def refuse(key: str, name: str, problem: str, remedy: str) -> Never:
    """Raise InvalidExperiment for own code."""
    raise InvalidExperiment(key, name, problem, remedy) from None
