"""Shared parts of the experiment's tables: strict validation, proposals for names, and TOML."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)  # fmt: skip
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticKnownError, core_schema

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.files import read_text

LISTED_MOST: Final = 20
DEPTH_MOST: Final = 100  # of tables in each other, in a file
# More parts of one key, `a.b.c`, than that. tomllib keeps each beginning of a key: 20,000 parts
# take 1.2 GB.
_PART: Final = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY: Final = re.compile(
    rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{DEPTH_MOST}}}"
)
PARTS_MOST: Final = 50_000  # of all headers and keys with dots: tomllib takes 1 kB for each
_PARTS: Final = re.compile(
    rf"^[ \t]*+(?:\[{{1,2}}+[ \t]*+{_PART}(?:[ \t]*+\.[ \t]*+{_PART})*+[ \t]*+\]{{1,2}}+[ "
    r"\t\r]*+(?:#|$)"
    rf"|{_PART}(?:[ \t]*+\.[ \t]*+{_PART})++[ \t]*+=)",
    re.MULTILINE,
)
NAMED_MOST: Final = 3  # names elsewhere
SIMILAR: Final = 0.6  # of difflib, from which a name may be a mistyped one
ALIKE: Final = 0.8  # from which it surely is

FORMS: Final[dict[str, str]] = {}  # of texts: by pattern, what to write
# Tables of an experiment for which their `name` stands: `objective = "fedprox"`.
NAMED: Final = (
    "score",
    "model",
    "aggregation",
    "selection",
    "objective",
    "augmentation",
    "trainer",
    "optimizer",
    "schedule",
    "epoch_control",
    "up",
)


def form(pattern: str, instead: str) -> Any:
    """Return the field of a text that has a form; `instead`: what to write in place of another."""
    FORMS[pattern] = instead
    return Field(pattern=pattern)


PACKAGE: Final = "fedstrata"
OWN: Final = "own"  # stands for the names of own code
NAME_FORM: Final = "letters, digits, _ . and -, at most {}, a letter or digit first"
Name = Annotated[str, form(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", NAME_FORM.format(64))]
AcceleratorName = Annotated[
    str, form(r"^(auto|cpu|cuda(:\d+)?)$", "auto, cpu, cuda or for instance cuda:0")
]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class SettingsTable(BaseModel):
    """A table that rejects unknown keys and does not convert values between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class EffectiveTable(SettingsTable):
    """A table that is written without the keys that have no effect beside others."""

    @property
    def unused(self) -> Set[str]:
        """Those keys."""
        raise NotImplementedError

    @model_serializer(mode="wrap")
    def _in_effect(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = self.unused
        return {key: value for key, value in dump(self).items() if key not in unused}


# The refused keys of a table, in the order of their checks: the key, the problem, the remedy.
Refused: TypeAlias = Iterator[tuple[str, str, str]]


def check_table(at: str, table: SettingsTable, refused: Refused) -> None:
    """Raise InvalidExperiment for the first refused key of the table at a key, with its value."""
    for key, problem, remedy in refused:
        raise InvalidExperiment(f"{at}.{key}", attrgetter(key)(table), problem, remedy)


Table = TypeVar("Table", bound=SettingsTable)


class NamedTables(Mapping[str, type[Table]]):
    """Tables by name, each imported when it is needed: `module:Class`."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> type[Table]:
        """Return a table. Raises KeyError."""
        found: type[Table] = named_in_module(self._places[name])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __hash__(self) -> int:  # of an annotation beside another type
        return hash(frozenset(self._places.items()))


def named_in_module(place: str) -> Any:
    """Import and return what a `module:Name` names. Raises ImportError, AttributeError."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def installed(group: str) -> dict[str, str]:
    """Return what installed packages bring by entry points of a group, `module:Class` by name."""
    return {each.name: each.value for each in entry_points(group=f"{PACKAGE}.{group}")}


def place_of(group: str, name: Any) -> Any:
    """Return the `package.module:Class` for which a name of an installed package stands; another
    name as it is.
    """
    if not isinstance(name, str) or ":" in name:
        return name
    return installed(group).get(name, name)


@dataclass(frozen=True)
class Selected:
    """Makes a field one of several tables: that of its `name`, the first one without it, and `own`
    for `package:Name`.

    It annotates the tables' common base. Without `own` there is none of the user's own.
    """

    tables: Mapping[str, type[SettingsTable]]
    own: str = ""  # `module:Class`, or a function that returns the table of a tree
    group: str = ""  # of entry points by which installed packages bring names for their own code

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return pydantic's schema."""
        return core_schema.no_info_plain_validator_function(self._table)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema of any table."""
        return {"type": "object"}

    def _table(self, tree: Any) -> Any:
        """Return the table of a tree; the name stands behind the key in the place of an error."""
        if isinstance(tree, SettingsTable):
            return tree
        if not isinstance(tree, Mapping):
            raise PydanticKnownError("dict_type")
        name = tree.get("name", next(iter(self.tables)))
        if self.group and name not in self.tables:
            name = place_of(self.group, name)
            tree = {**tree, "name": name}
        kind = name
        table: Any
        if self.own and isinstance(name, str) and ":" in name:
            kind = OWN
            table = named_in_module(self.own)
        elif name in self.tables:
            table = self.tables[name]
        else:
            context = {"discriminator": "name", "tag": str(name)}
            context["expected_tags"] = ", ".join(self.tables)
            raise PydanticKnownError("union_tag_invalid", context)
        try:
            return getattr(table, "model_validate", table)({"name": name, **tree})
        except ValidationError as error:
            details = [
                InitErrorDetails(
                    type=e["type"], loc=(kind, *e["loc"]), input=e["input"], ctx=e.get("ctx", {})
                )
                for e in error.errors(include_url=False)
            ]
            raise ValidationError.from_exception_data(error.title, details) from None


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{path}{key}.")
        else:
            leaves[f"{path}{key}"] = value
    return leaves


def with_tables(tree: Any, path: Sequence[str] = ()) -> Any:
    """Return an experiment's tree, or the part at a path, in which each name that stands for a
    table is that table.
    """
    if isinstance(tree, Mapping):
        return {key: with_tables(value, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list) and path in (("tiers",), ("adversaries",)):
        return [with_tables(each, (*path, str(place))) for place, each in enumerate(tree)]
    if isinstance(tree, str) and path and stands_for(path) == "name":
        return {"name": tree}
    return tree


def stands_for(path: Sequence[str]) -> str | None:
    """Return the key of the table at a path of keys whose value a text there is, None if no text
    stands for it.
    """
    match path:
        case [key] | ["training" | "cloud" | "institution", key] | ["tiers", _, key] if (
            key in NAMED
        ):
            return "name"
        case ["adversaries", _, "attack"]:
            return "name"
        case ["transfer", "wan" | "lan", key] | ["tiers", _, "transfer", key] if key in NAMED:
            return "name"
        case (
            ["links", "wan" | "lan"]
            | ["hardware", "default"]
            | ["links" | "hardware", "of", _]
            | ["tiers", _, "link"]
        ):
            return "profile"
    return None


def proposal(name: str, known: Iterable[str], *, what: str, elsewhere: Sequence[str] = ()) -> str:
    """Return the remedy for an unknown name: the known name that was meant, else the known names.

    `elsewhere`: names that count unless a known one is almost the same.
    """
    names = list(known)
    if meant := _meant(name, names, ALIKE):
        return f"Did you mean {meant!r}?"
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere[:NAMED_MOST])}?"
    if meant := _meant(name, names, SIMILAR):
        return f"Did you mean {meant!r}?"
    if not names:
        return f"{what} none."
    listed = ", ".join(names[:LISTED_MOST])
    more = ", ..." if len(names) > LISTED_MOST else ""
    return f"{what}: {listed}{more}."


def _meant(name: str, known: Sequence[str], similarity: float) -> str | None:
    """Return the most similar name, else one that begins with this one or has its initials: `lr`,
    `learning_rate`.
    """
    lower = {each.lower(): each for each in reversed(known)}
    word = name.lower()
    if close := difflib.get_close_matches(word, lower, 1, similarity):
        return lower[close[0]]
    for each in known:
        if word and (each.lower().startswith(word) or word == _initials(each)):
            return each
    return None


def _initials(name: str) -> str:
    if "_" in name or "-" in name:
        return "".join(part[:1] for part in re.split("[_-]", name))
    return ""


def named(key: str, given: Any, profiles: Mapping[str, Any]) -> Any:
    """Return a table with the values of the profile that it names; the table's own values take
    precedence.

    A string is the name of a profile. Values of a wrong type are left for the tables' own checks.
    Raises InvalidExperiment if the profile is unknown.
    """
    if isinstance(given, str):
        given = {"profile": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("profile"), str):
        return given
    name = given["profile"]
    if name not in profiles:
        remedy = proposal(name, profiles, what="There are")
        raise InvalidExperiment(key, name, "no profile has this name", remedy)
    set_here = {part: value for part, value in given.items() if value is not None}
    if not isinstance(profiles[name], Mapping):
        return set_here
    return {**profiles[name], **set_here}


def with_own(shipped: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the profiles that ship and those of a tree, which take precedence."""
    own = tree.get("profiles")
    if isinstance(own, Mapping):
        return {**shipped, **own}
    return dict(shipped)


CURLY: Final = tuple("\u201c\u201d\u201e\u2018\u2019\u201a\u00ab\u00bb")
STRAIGHT: Final = "Write straight ones."
_LINE: Final = re.compile(r"at line (\d+)")


def read_toml(key: str, path: Path, *, remedy: str) -> dict[str, Any]:
    """Return the tree of a TOML file; `remedy`: if it is missing. Raises InvalidExperiment."""
    text = ""
    try:
        text = read_text(path)
        return parsed(text)
    except OSError as error:
        raise InvalidExperiment(key, str(path), error.strerror or str(error), remedy) from None
    except tomllib.TOMLDecodeError as error:
        problem = str(error)
        at = _LINE.search(problem)
        if at and set(CURLY) & set(text.split("\n")[int(at[1]) - 1]):
            where = f"curly quotes in line {at[1]}"
            raise InvalidExperiment(key, str(path), where, STRAIGHT) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = f"byte 0x{error.object[error.start]:02x} in line {line} is not {error.encoding}"
    except RecursionError:
        problem = "nested too deeply"
    except OverflowError as error:
        raise InvalidExperiment(key, str(path), str(error), "Write fewer tables.") from None
    except ValueError:
        problem = "a number has too many digits"
    raise InvalidExperiment(key, str(path), f"not TOML: {problem}", "Fix that line.")


def parsed(text: str) -> dict[str, Any]:
    """Return the tree of a TOML text.

    Raises ValueError, RecursionError if it is nested too deeply, and OverflowError if it has too
    many tables.
    """
    if _DEEP_KEY.search(text):
        raise RecursionError
    if sum(1 + found[0].count(".") for found in _PARTS.finditer(text)) > PARTS_MOST:
        raise OverflowError(f"its headers and keys have more than {PARTS_MOST:,} parts")
    tree = tomllib.loads(text)
    if _is_deep(tree):
        raise RecursionError
    return tree


def check_quotes(text: str) -> None:
    """Raise InvalidExperiment if a part of a `key=value` has a text processor's curly quotes."""
    for part in text.split("="):
        if part.strip()[:1] in CURLY or part.strip()[-1:] in CURLY:
            raise InvalidExperiment("--set", text, "curly quotes", STRAIGHT)


def _is_deep(tree: dict[str, Any]) -> bool:
    """Return whether tables and lists are nested deeper than recursive functions can follow."""
    level: list[Any] = [tree]
    for _ in range(DEPTH_MOST):
        inner: list[Any] = []
        for found in level:
            if isinstance(found, dict):
                inner += found.values()
            else:
                inner += found
        level = [each for each in inner if isinstance(each, (dict, list))]
        if not level:
            return False
    return True


def write(tree: Mapping[str, Any]) -> str:
    """Return a tree of tables as TOML."""
    lines: list[str] = []
    _write_table(tree, (), lines)
    return "\n".join(lines).strip() + "\n"


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(each, dict) for each in value)


def _write_table(
    table: Mapping[str, Any], path: tuple[str, ...], lines: list[str], *, headed: bool = False
) -> None:
    if path and not headed:
        lines += ["", f"[{'.'.join(map(_toml_key, path))}]"]
    for key, value in table.items():
        if not isinstance(value, dict) and not _is_tables(value):
            # JSON strings are TOML strings, except for DEL, and for surrogate pairs with
            # ensure_ascii.
            written = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{_toml_key(key)} = {written}")
    for key, value in table.items():
        if isinstance(value, dict) and value:
            _write_table(value, (*path, key), lines)
        for each in value if _is_tables(value) else ():
            lines += ["", f"[[{'.'.join(map(_toml_key, (*path, key)))}]]"]
            _write_table(each, (*path, key), lines, headed=True)


def _toml_key(key: str) -> str:
    if "." in key:
        return json.dumps(key)
    return key
