"""Reading an experiment from a file, a tree or JSON, and writing it as TOML."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from common.errors import InvalidExperiment
from common.experiment.messages import explain
from common.experiment.schema import Experiment
from common.experiment.tables import write

RENAMED: Final = {"iterations": "rounds"}  # keys of earlier releases

log = logging.getLogger("fedstrata.experiment")


def load(path: Path, overrides: Iterable[str] = ()) -> Experiment:
    """Read a TOML file and apply `key=value` overrides. Raises InvalidExperiment."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidExperiment("experiment", str(path), error.strerror or str(error), "Name a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidExperiment("experiment", str(path), f"not TOML: {error}", "Fix that line.") from None
    for old in rename_keys(tree):
        log.warning("%s: the key %s is deprecated. Write %s.", path, old, RENAMED[old])
    for override in overrides:
        _override(tree, override)
    return parse(tree)


def parse(tree: Mapping[str, Any] | str | bytes) -> Experiment:
    """Check a tree, or its JSON text, and return the experiment. Raises InvalidExperiment."""
    try:
        if isinstance(tree, (str, bytes)):
            return Experiment.model_validate_json(tree)
        return Experiment.model_validate(tree)
    except ValidationError as error:
        raise explain(error, Experiment) from None


def to_toml(experiment: Experiment) -> str:
    """Return the experiment as TOML, every key that counts written out."""
    return write(experiment.model_dump(mode="json", exclude_none=True))


def rename_keys(tree: dict[str, Any]) -> list[str]:
    """Give keys of earlier releases their present names, in place, and return the old names found.

    Raises InvalidExperiment where both names stand.
    """
    found = [old for old in RENAMED if old in tree]
    for old in found:
        new = RENAMED[old]
        if new in tree:
            raise InvalidExperiment(old, tree[old], f"the old name of {new}, which is there too", f"Remove {old}.")
        tree[new] = tree.pop(old)
    return found


def _override(tree: dict[str, Any], text: str) -> None:
    given, equals, value = text.partition("=")
    if not equals or not given.strip():
        raise InvalidExperiment("--set", text, "not of the form key=value", "Write for instance seed=3.")
    key = RENAMED.get(given.strip(), given.strip())
    if key != given.strip():
        log.warning("--set %s: the key is deprecated. Write %s.", text, key)
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InvalidExperiment("--set", text, f"{'.'.join(parents[: depth + 1])} is no table", "Check the key.")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        read = {}
    # A bare word is a string, as in a shell; so is what would smuggle in further lines.
    tree[last] = read["value"] if read.keys() == {"value"} else value.strip()
