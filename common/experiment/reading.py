"""Experiments read from a file, a tree or JSON, and written as TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from common.errors import InvalidExperiment
from common.experiment.devices import with_availability
from common.experiment.links import with_traces
from common.experiment.messages import explain
from common.experiment.schema import Experiment
from common.experiment.tables import read_toml, stands_for, write
from common.experiment.topology import LAB

PARENTS_MOST: Final = 20  # of a key, in keywords of own code
ANNOUNCED_MOST: Final = 4096  # characters of a text in an announced experiment: a path may have as many
_JSON_TEXT: Final = re.compile(r'"(?:[^"\\]|\\.)*"')


def load(path: Path, overrides: Iterable[str] = ()) -> Experiment:
    """Return the experiment of a TOML file with `key=value` overrides. Raises InvalidExperiment."""
    return parse(read(path, overrides))


def read(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the tree of a TOML file with overrides, as `load` does, not validated. Raises InvalidExperiment."""
    tree = read_toml("experiment", path, remedy="Name a TOML file.")
    for each in overrides:
        override(tree, each)
    return with_availability(with_traces(tree, path.parent), path.parent)


def parse(tree: Mapping[str, Any] | str | bytes) -> Experiment:
    """Validate a tree, or its JSON text, and return the experiment. Raises InvalidExperiment."""
    if isinstance(tree, Mapping) and tree.get("topology") == LAB:
        problem = "only `fedstrata cloud` can ask which nodes are there"
        raise InvalidExperiment("topology", LAB, problem, "Give topology.institutions and topology.devices.")
    try:
        if isinstance(tree, (str, bytes)):
            return Experiment.model_validate_json(tree)
        return Experiment.model_validate(tree)
    except ValidationError as error:
        raise explain(error, Experiment) from None


@lru_cache(maxsize=2)
def announced(text: str) -> Experiment:
    """Return the experiment of an announcement, as `parse` does. The nodes of one process share it, and its tree.

    A text in it that is longer than any is refused, as errors would repeat it in logs and messages.
    """
    longest = max((found[0] for found in _JSON_TEXT.finditer(text)), key=len, default="")
    if len(longest) > ANNOUNCED_MOST:
        remedy = f"Use at most {ANNOUNCED_MOST}."
        raise InvalidExperiment("experiment", longest[:32], f"a text of {len(longest)} characters", remedy)
    experiment = parse(text)
    _ = experiment.tree  # before copies with another data root are made: they keep it
    return experiment


def to_toml(experiment: Experiment) -> str:
    """Return the experiment as TOML with all keys that apply, defaults included."""
    return write(experiment.model_dump(mode="json", exclude_none=True))


def override(tree: dict[str, Any], text: str) -> None:
    """Set one `key=value` in a tree. Raises InvalidExperiment."""
    key, equals, value = text.partition("=")
    key = key.strip()
    *parents, last = key.split(".")
    if not equals or not key.strip("."):
        raise InvalidExperiment("--set", text, "not of the form key=value", "Write for instance seed=3.")
    if len(parents) > PARENTS_MOST:
        raise InvalidExperiment("--set", text, "no key is that deep", "Write for instance training.epochs=2.")
    try:
        read = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        read = {}
    # A bare word is a string, as in a shell. So is a value that would add further lines.
    branch: dict[str, Any] = {last: read["value"] if read.keys() == {"value"} else value.strip()}
    for parent in reversed(parents):
        branch = {parent: branch}
    for depth in range(1, len(parents) + 1):
        ((parent, branch),) = branch.items()
        if isinstance(name := tree.get(parent), str) and (inner := stands_for(parents[:depth])):
            tree[parent] = {inner: name}
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InvalidExperiment("--set", text, f"{'.'.join(parents[:depth])} is not a table", "Check the key.")
    tree.update(branch)
