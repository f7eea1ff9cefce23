"""Experiments read from a file, a tree or JSON, and written as TOML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Never

from pydantic import ValidationError
from pydantic_core import from_json

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.schema import Experiment, ExperimentSettings
from fedstrata.common.experiment.short_form import LAB, ShortForm, as_written, short_key
from fedstrata.common.experiment.validation_messages import explain
from fedstrata.common.settings import own
from fedstrata.common.settings.devices import with_availability
from fedstrata.common.settings.links import with_traces
from fedstrata.common.settings.tables import (
    check_quotes,
    parsed,
    proposal,
    read_toml,
    stands_for,
    write,
)

PARENTS_MOST: Final = 20  # of a key, in keywords of own code
# characters of a text in an announced experiment: a path may have as many
ANNOUNCED_MOST: Final = 4096
_JSON_TEXT: Final = re.compile(r'"(?:[^"\\]|\\.)*"')


def load(path: Path, overrides: Iterable[str] = ()) -> Experiment:
    """Return the experiment of a TOML file with `key=value` overrides. Raises InvalidExperiment.

    What the classes of own rules declare is asked again: the file may be that of a run, with keys
    that were changed.
    """
    return parse(_undeclared(read(path, overrides)))


def read(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the tree of a TOML file with overrides, as `load` does, not validated. Raises
    InvalidExperiment.
    """
    tree = read_toml("experiment", path, remedy="Name a TOML file.")
    for each in overrides:
        override(tree, each)
    return with_availability(with_traces(tree, path.parent), path.parent)


def parse(tree: Mapping[str, Any] | str | bytes) -> Experiment:
    """Validate a tree, or its JSON text, and return the experiment. Raises InvalidExperiment."""
    if isinstance(tree, (str, bytes)):
        tree = _of_json(tree)
    if tree.get("topology") == LAB:
        problem = "only `fedstrata cloud` can ask which nodes are there"
        remedy = "Give topology.institutions and topology.devices."
        raise InvalidExperiment("topology", LAB, problem, remedy)
    form: type[ExperimentSettings] = ShortForm
    try:
        if "tiers" not in tree:
            return ShortForm.model_validate(tree).experiment()
        form = Experiment
        _check_one_form(tree)
        return Experiment.model_validate(tree)
    except ValidationError as error:
        raise _named(explain(error, form), tree) from None


def recorded(tree: Mapping[str, Any] | str | bytes) -> Experiment:
    """Return the experiment of a run's folder or of a message, and import none of its own code."""
    with own.without_imports():
        return parse(tree)


@lru_cache(maxsize=2)
def announced(text: str) -> Experiment:
    """Return the experiment of an announcement, as `parse` does. The nodes of one process share it,
    and its tree.

    A text in it that is longer than any is refused, as errors would repeat it in logs and messages.
    """
    longest = max((found[0] for found in _JSON_TEXT.finditer(text)), key=len, default="")
    if len(longest) > ANNOUNCED_MOST:
        problem = f"a text of {len(longest)} characters"
        remedy = f"Use at most {ANNOUNCED_MOST}."
        raise InvalidExperiment("experiment", longest[:32], problem, remedy)
    experiment = recorded(text)
    _ = experiment.tree  # before copies with another data root are made: they keep it
    return experiment


def _undeclared(tree: Any) -> Any:
    """Return a tree without the tables `declared` of own rules."""
    if isinstance(tree, list):
        return [_undeclared(each) for each in tree]
    if not isinstance(tree, Mapping):
        return tree
    found = {key: _undeclared(value) for key, value in tree.items()}
    if own.is_own(str(tree.get("name", ""))):
        found.pop("declared", None)
    return found


def to_toml(experiment: Experiment) -> str:
    """Return the experiment as TOML with all keys that apply, defaults included."""
    return write(as_written(experiment))


def override(tree: dict[str, Any], text: str) -> None:
    """Set one `key=value` in a tree; `tiers.NAME.KEY` is a key of the tier of that name. Raises
    InvalidExperiment.
    """
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    check_quotes(text)
    if not equals or not any(path):
        _refuse(text, "not of the form key=value", "Write for instance seed=3.")
    if len(path) > PARENTS_MOST + 1:
        _refuse(text, "no key is that deep", "Write for instance training.epochs=2.")
    try:
        read = parsed(f"value = {value}")
    except (ValueError, RecursionError, OverflowError):
        read = {}
    begin = 0
    if path[0] == "tiers" and len(path) > 2:
        tiers = tree.get("tiers")
        if isinstance(tiers, list):
            tree = _tier(tiers, path[1], text)
            begin = 2
        else:
            path = short_key(path)
    for depth in range(begin, len(path) - 1):
        parent = path[depth]
        name = tree.get(parent)
        inner = stands_for(path[: depth + 1])
        if isinstance(name, str) and inner:
            tree[parent] = {inner: name}
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            _refuse(text, f"{'.'.join(path[: depth + 1])} is not a table", "Check the key.")
    # A bare word is a string, as in a shell. So is a value that would add further lines.
    tree[path[-1]] = value.strip()
    if read.keys() == {"value"}:
        tree[path[-1]] = read["value"]


def _refuse(text: str, problem: str, remedy: str) -> Never:
    raise InvalidExperiment("--set", text, problem, remedy)


def _tier(tiers: list[Any], name: str, text: str) -> dict[str, Any]:
    names = []
    for each in tiers:
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            names.append(each["name"])
            if each["name"] == name:
                return each
    _refuse(text, "no tier has this name", proposal(name, names, what="There are"))


def _check_one_form(tree: Mapping[str, Any]) -> None:
    """Check that a tree with `[[tiers]]` has no key of the short form."""
    problem = "[[tiers]] has these settings"
    for key, field in ShortForm.model_fields.items():
        found = tree.get(key)
        general = Experiment.model_fields.get(key)
        if general is None and found is not None:
            raise InvalidExperiment(key, found, problem, f"Remove {key}.")
        if general is None or not isinstance(found, Mapping):
            continue
        for below in _keys(field.annotation) - _keys(general.annotation):
            if below in found:
                at = f"{key}.{below}"
                raise InvalidExperiment(at, found[below], problem, f"Remove {at}.")


def _keys(table: Any) -> Set[str]:
    return {*getattr(table, "model_fields", ())}


def _of_json(text: str | bytes) -> Mapping[str, Any]:
    problem = "not a table"
    try:
        tree = from_json(text)
    except ValueError as error:
        tree = None
        problem = str(error)
    if isinstance(tree, dict):
        return tree
    raise InvalidExperiment("experiment", "...", problem, "Start all roles from one release.")


def _named(error: InvalidExperiment, tree: Mapping[str, Any]) -> InvalidExperiment:
    """Return an error whose key has the name of its tier, not its number."""
    key, value, problem, remedy = error.parts
    first, _, below = key.partition(".")
    number, _, last = below.partition(".")
    if first != "tiers" or not number.isdigit():
        return error
    tier = tree["tiers"][int(number)]
    name = tier.get("name") if isinstance(tier, Mapping) else None
    if not isinstance(name, str) or last == "name":
        return error
    return InvalidExperiment(f"tiers.{name}.{last}", value, problem, remedy)
