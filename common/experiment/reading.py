"""Experiments read from a file, a tree or JSON, and written as TOML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.messages import explain
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.short_form import LAB, ShortForm, as_written, short_key
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
        raise InvalidExperiment(
            "topology", LAB, problem, "Give topology.institutions and topology.devices."
        )
    try:
        if "tiers" not in tree:
            return ShortForm.model_validate(tree).experiment()
        _check_one_form(tree)
        return Experiment.model_validate(tree)
    except ValidationError as error:
        raise _named(explain(error, Experiment if "tiers" in tree else ShortForm), tree) from None


def recorded(tree: Mapping[str, Any] | str | bytes) -> Experiment:
    """Return the experiment of a run's folder or of a message, as `parse` does, and import none of
    its own code.
    """
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
        remedy = f"Use at most {ANNOUNCED_MOST}."
        raise InvalidExperiment(
            "experiment", longest[:32], f"a text of {len(longest)} characters", remedy
        )
    experiment = recorded(text)
    _ = experiment.tree  # before copies with another data root are made: they keep it
    return experiment


def _undeclared(tree: Any) -> Any:
    """Return a tree without the tables `declared` of own rules."""
    if isinstance(tree, list):
        return [_undeclared(each) for each in tree]
    if not isinstance(tree, Mapping):
        return tree
    of_own = "declared" in tree and own.is_own(str(tree.get("name", "")))
    return {
        key: _undeclared(value) for key, value in tree.items() if not (of_own and key == "declared")
    }


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
        raise InvalidExperiment(
            "--set", text, "not of the form key=value", "Write for instance seed=3."
        )
    if len(path) > PARENTS_MOST + 1:
        raise InvalidExperiment(
            "--set", text, "no key is that deep", "Write for instance training.epochs=2."
        )
    try:
        read = parsed(f"value = {value}")
    except (ValueError, RecursionError, OverflowError):
        read = {}
    begin = 0
    if path[0] == "tiers" and len(path) > 2:
        if isinstance(tiers := tree.get("tiers"), list):
            tree = _tier(tiers, path[1], text)
            begin = 2
        else:
            path = short_key(path)
    for depth in range(begin, len(path) - 1):
        parent = path[depth]
        if isinstance(name := tree.get(parent), str) and (inner := stands_for(path[: depth + 1])):
            tree[parent] = {inner: name}
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InvalidExperiment(
                "--set", text, f"{'.'.join(path[: depth + 1])} is not a table", "Check the key."
            )
    # A bare word is a string, as in a shell. So is a value that would add further lines.
    tree[path[-1]] = read["value"] if read.keys() == {"value"} else value.strip()


def _tier(tiers: list[Any], name: str, text: str) -> dict[str, Any]:
    names = {
        each["name"]: each
        for each in tiers
        if isinstance(each, dict) and isinstance(each.get("name"), str)
    }
    if name not in names:
        raise InvalidExperiment(
            "--set", text, "no tier has this name", proposal(name, names, what="There are")
        )
    return names[name]


def _check_one_form(tree: Mapping[str, Any]) -> None:
    """Check that a tree with `[[tiers]]` has no key of the short form."""
    for key, field in ShortForm.model_fields.items():
        found = tree.get(key)
        general = Experiment.model_fields.get(key)
        if found is not None and general is None:
            raise InvalidExperiment(key, found, "[[tiers]] has these settings", f"Remove {key}.")
        short = getattr(field.annotation, "model_fields", {}).keys()
        for below in short - getattr(general and general.annotation, "model_fields", {}).keys():
            if isinstance(found, Mapping) and below in found:
                at = f"{key}.{below}"
                raise InvalidExperiment(
                    at, found[below], "[[tiers]] has these settings", f"Remove {at}."
                )


def _of_json(text: str | bytes) -> Mapping[str, Any]:
    try:
        tree = from_json(text)
    except ValueError as error:
        raise InvalidExperiment(
            "experiment", "...", str(error), "Start all roles from one release."
        ) from None
    if not isinstance(tree, dict):
        raise InvalidExperiment(
            "experiment", "...", "not a table", "Start all roles from one release."
        )
    return tree


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
