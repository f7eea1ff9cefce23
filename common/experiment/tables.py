"""What the experiment's tables share: strict values, proposals for mistyped words, and how they are written as TOML."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidExperiment

LISTED_MOST: Final = 20

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class SettingsTable(BaseModel):
    """A table whose keys are all known and whose values are not guessed from other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def proposal(word: str, known: Iterable[str], *, what: str) -> str:
    """Return the remedy for an unknown word: the known one that is like it, else what there is."""
    words = list(known)
    close = difflib.get_close_matches(word, words, 1) or difflib.get_close_matches(word, words, 1, 0.4)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"{what}: {', '.join(words[:LISTED_MOST])}{', ...' if len(words) > LISTED_MOST else ''}."


def named(key: str, said: Any, profiles: Mapping[str, Any]) -> Any:
    """Return a table with the values of the profile that it names, or that it is the name of; its own go before those.

    Values of a wrong type are left for the tables' own check. Raises InvalidExperiment where no profile has the name.
    """
    if isinstance(said, str):
        said = {"profile": said}
    name = said.get("profile") if isinstance(said, Mapping) else None
    if not isinstance(name, str):
        return said
    if name not in profiles:
        remedy = proposal(name, profiles, what="There are")
        raise InvalidExperiment(key, name, "no profile has this name", remedy)
    base = profiles[name] if isinstance(profiles[name], Mapping) else {}
    return {**base, **{part: value for part, value in said.items() if value is not None}}


def write(tree: Mapping[str, Any]) -> str:
    """Return a tree of tables as TOML."""
    lines: list[str] = []
    _write_table(tree, (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    if path:
        lines += ["", f"[{'.'.join(map(_toml_key, path))}]"]
    for key, value in table.items():
        if not isinstance(value, dict):
            # JSON's form is TOML's, but for DEL, and for surrogate pairs where it keeps to ASCII.
            written = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{_toml_key(key)} = {written}")
    for key, value in table.items():
        if isinstance(value, dict) and value:
            _write_table(value, (*path, key), lines)


def _toml_key(key: str) -> str:
    return json.dumps(key) if "." in key else key
