"""Text made safe for those who read it: terminals, logs, and readers of JSON."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, TypeAlias

TEXT_MOST: Final = 1000
# before a warning of a training process, which the command that started it shows
NOTE: Final = "note: "
JSON_MOST: Final = 4_000_000
NAMED: Final = 3  # of those that share a cause
_SAMPLES: Final = re.compile(r" on \d+ samples")
_PART: Final = 65_536  # characters that are escaped before the length is checked


@dataclass(frozen=True, slots=True)
class TextLimit:
    """Limit of a text from the network: its characters, once control characters are escaped.

    `cut`: a longer one is cut, because it is for people; else it is refused.
    """

    most: int
    cut: bool = False


NameText: TypeAlias = Annotated[str, TextLimit(64)]  # of nodes and runs, nonces, digests
ShortText: TypeAlias = Annotated[str, TextLimit(TEXT_MOST, cut=True)]  # for people, and addresses
JsonText: TypeAlias = Annotated[str, TextLimit(JSON_MOST)]

_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def counted(count: int, plural: str) -> str:
    """Return a number with what is counted, of one in the singular: `1 institution`, `2
    institutions`.
    """
    return f"{count:,} {plural.removesuffix('s') if count == 1 else plural}"


def noted(text: str) -> str:
    """Return a warning of a process that trains, as the command that started it recognises it."""
    return f"{NOTE}{text}"


def escaped(text: str) -> str:
    r"""Return text in one printable line: control characters, line breaks and direction marks as in
    JSON, `\u001b`.

    A terminal would obey them, a log would have lines that nobody wrote.
    """
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def escaped_within(text: str, limit: TextLimit) -> str | None:
    """Return the escaped text, None if it exceeds the limit. No more than the limit is looked
    at.
    """
    if limit.cut:
        return escaped(text[: limit.most])[: limit.most]
    if len(text) > limit.most:
        return None
    if text.isprintable():
        return text
    parts = []
    length = 0
    for begin in range(0, len(text), _PART):
        parts.append(escaped(text[begin : begin + _PART]))
        length += len(parts[-1])
        if length > limit.most:
            return None
    return "".join(parts)


def short(text: str) -> str:
    """Return the beginning of a text for people, as far as messages and logs take it."""
    return text[:TEXT_MOST]


@lru_cache(maxsize=1 << 16)  # a hostile text of megabytes must not hold up the event loop
def _escaped(letter: str) -> str:
    if letter.isprintable() or unicodedata.category(letter) == "Zs":  # a space of another width
        return letter
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    return _SHORT.get(letter) or "".join(
        f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4)
    )


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON, in which a number that is not finite is null: JSON has no NaN, nor
    have its readers.
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def by_cause(causes: Iterable[tuple[str, str]]) -> str:
    """Return names with their causes in one line; equal causes once, after the names, of which
    NAMED are named.

    Causes are equal if they differ by a number of samples alone, as devices do.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, cause in causes:
        groups.setdefault(_SAMPLES.sub("", cause), []).append((name, cause))
    parts = []
    for shared, found in groups.items():
        names, whole = zip(*found, strict=True)
        cause = whole[0] if len(found) == 1 else shared
        parts.append(f"{named(names)} {cause}")
    return "; ".join(parts)


def named(names: Sequence[str]) -> str:
    """Return names for people; of more than NAMED the first, and the number of the others."""
    if len(names) == 1:
        return names[0]
    if len(names) <= NAMED:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{', '.join(names[: NAMED - 1])} and {len(names) - NAMED + 1} others"
