"""Validation errors as messages with the key, the value, what is wrong with it, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.methods.attack import ATTACKS
from fedstrata.common.methods.settings import REFINING, RULES, SELECTORS, STEPS, WARMUPS
from fedstrata.common.model.codec_settings import CODEC_TABLES
from fedstrata.common.settings.tables import FORMS, proposal, stands_for
from fedstrata.common.settings.trainers import TRAINERS
from fedstrata.common.settings.training import AUGMENTATIONS, OBJECTIVES, OPTIMIZERS

# Keys of tables that are selected by `name`: what the name is of, and the tables.
SELECTED: Final[Mapping[str, tuple[str, Mapping[str, type[BaseModel]]]]] = {
    "aggregation": ("rule", RULES),
    "attack": ("attack", ATTACKS),
    "augmentation": ("augmentation", AUGMENTATIONS),
    "objective": ("objective", OBJECTIVES),
    "optimizer": ("optimizer", OPTIMIZERS),
    "refine": ("distillation", REFINING),
    "selection": ("selector", SELECTORS),
    "step": ("step of a server", STEPS),
    "trainer": ("trainer", TRAINERS),
    "up": ("codec", CODEC_TABLES),
    "warmup": ("rule of a warm-up", WARMUPS),
}
NOT_A_TABLE: Final = ("model_type", "model_attributes_type", "dict_type")
# By pydantic's type of error. {gt} and the like are the bound; `string_pattern_mismatch` and
# `literal_error` are below.
_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_from_float"),
        ("not a whole number", "Write for instance 5."),
    ),
    **dict.fromkeys(("float_type", "float_parsing"), ("not a number", "Write for instance 0.5.")),
    "finite_number": ("not a finite number", "Write for instance 0.5."),
    "bool_type": ("neither true nor false", "Write true or false, without quotes."),
    "string_type": ("not a text", "Write it in quotes."),
    "list_type": ("not a list", 'Write for instance ["a", "b"].'),
    **dict.fromkeys(
        NOT_A_TABLE, ("not a table", "Write {{ key = value }}, or the keys below [table].")
    ),
    "missing": ("missing", "Add this key."),
    "union_tag_not_found": ("has no name", 'Add name = "...".'),
    "none_required": ("not for this", "Omit it."),
    "saves_nothing": ("saves nothing", "Use fp32, or delta+fp32+zstd."),
    "greater_than": ("too small", "Write a number above {gt}."),
    "greater_than_equal": ("too small", "Write {ge} or more."),
    "less_than": ("too large", "Write a number below {lt}."),
    "less_than_equal": ("too large", "Write {le} or less."),
    "string_too_short": ("empty", "Write a text, or omit the key."),
    "too_short": ("too short", "Give at least {min_length}."),
    "too_long": ("too long", "Give at most {max_length}."),
}

_OF_COUNTS: Final = frozenset({"int_type", "int_from_float", "greater_than_equal"})
_OF_SHARES: Final = frozenset({"float_type", "greater_than", "less_than"})
_FORMS: Final = frozenset(  # pydantic's, not keys
    {"int", "float", "constrained-int", "constrained-float", "constrained-str", "[key]"}
)
_FORM_STARTS: Final = ("list[", "literal[")
# what may stand for a table, by the key for whose value it stands
_INSTEAD: Final = {"name": "a name, or ", "profile": "the name of a profile, or ", None: ""}


def explain(error: ValidationError, root: type[BaseModel]) -> InvalidExperiment:
    """Return the first error of a tree that `root` rejected."""
    errors = [(_path(details["loc"]), details) for details in error.errors(include_url=False)]
    top = errors[0][0]
    # If a key accepts two forms, the error that is nested deepest belongs to the form that was
    # meant.
    path, first = max((e for e in errors if e[0][: len(top)] == top), key=lambda e: len(e[0]))
    # if the table has an unknown key, that is the one, with another name
    if first["type"] == "missing":
        for place, details in errors:
            if details["type"] == "extra_forbidden" and place[:-1] == path[:-1]:
                path = place
                first = details
                break
    kind = first["type"]
    key = ".".join(path) or "experiment"
    if kind == "extra_forbidden":
        return _unknown(key, first["loc"], first["input"], root)
    if kind == "union_tag_invalid":
        name = first["ctx"]["tag"]
        what, tables = SELECTED[path[-1]]
        remedy = proposal(name, tables, what="There are")
        return InvalidExperiment(f"{key}.name", name, f"no {what} has this name", remedy)
    # else the table in which it is missing
    value = None if kind == "missing" else first["input"]
    problem, remedy = problem_of(first)
    shares = [
        details for place, details in errors if place == path and details["type"] in _OF_SHARES
    ]
    if kind in _OF_COUNTS and shares:  # it may be either
        _, other = problem_of(shares[0])
        remedy = f"{remedy.removesuffix('.')}, or {other[:1].lower()}{other[1:]}"
    keys = _known_keys(path, root)
    if kind in NOT_A_TABLE and keys:
        table = "a table"
        if len(keys) > 1:
            table = f"a table of {', '.join(keys)}"
        remedy = f"Write {_INSTEAD.get(stands_for(path), '')}{table}."
    elif kind == "list_type":
        inner = get_args(_at(path, root))
        if inner and _is_table(inner[0]):
            remedy = f"Write a table [[{key}]] for each."
    return InvalidExperiment(key, value, problem, remedy)


def problem_of(error: ErrorDetails) -> tuple[str, str]:
    """Return what is wrong with the value of one of pydantic's errors, and the remedy."""
    kind = error["type"]
    bound = error.get("ctx", {})
    value = error["input"]
    if kind == "string_pattern_mismatch":
        return "not of the form that is needed", f"Write {FORMS[bound['pattern']]}."
    if kind == "literal_error":
        known = _expected(bound["expected"])
        return "not one of its values", proposal(str(value), known, what="There are")
    if kind in _KINDS:
        problem, remedy = _KINDS[kind]
        for name, each in bound.items():
            if isinstance(each, float) and each.is_integer():
                bound = bound | {name: int(each)}
        return problem, remedy.format_map(bound)
    return error["msg"][:1].lower() + error["msg"][1:], "Correct the value."


def places(key: str, root: type[BaseModel]) -> list[str]:
    """Return where an experiment has a key of this name, the outermost places first, as
    `cloud.aggregation`.
    """
    found: list[str] = []
    level: list[tuple[str, type[BaseModel]]] = [("", root)]
    while level:
        below = []
        for path, table in level:
            for name, field in table.model_fields.items():
                if name == key:
                    found.append(path + name)
                kind = field.annotation
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    below.append((f"{path}{name}.", kind))
        level = below
    return found


def _unknown(
    key: str, loc: tuple[int | str, ...], value: object, root: type[BaseModel]
) -> InvalidExperiment:
    *parents, last = map(str, loc)
    _, tables = SELECTED.get(".".join(parents[-2:-1]), ("", {}))
    owners = [name for name, table in tables.items() if last in table.model_fields]
    if owners:
        remedy = f"It belongs to {' and '.join(owners)}; this is {parents[-1]}."
    else:
        known = _known_keys(parents, root)
        remedy = proposal(last, known, what="Known keys", elsewhere=places(last, root))
    return InvalidExperiment(key, value, "unknown key", remedy)


def _path(loc: tuple[int | str, ...]) -> list[str]:
    """Return the key as in the file: without pydantic's forms and names that selected tables."""
    found = []
    for i, part in enumerate(loc):
        named = i > 1 and loc[i - 1] in SELECTED
        if not named and not _is_form(part):
            found.append(str(part))
    return found


def _is_form(part: int | str) -> bool:
    return part in _FORMS or str(part).startswith(_FORM_STARTS)


def _known_keys(path: list[str], root: type[BaseModel]) -> list[str]:
    table = _at(path, root)
    if _is_table(table):
        return list(table.model_fields)
    return []


def _at(path: list[str], root: type[BaseModel]) -> Any:
    """Return the annotation of a key, None if it is not known."""
    found: Any = root
    for part in path:
        if not _is_form(part):
            found = _below(found, part)
        if get_origin(found) not in (dict, list, UnionType) and not _is_table(found):
            return None
    return found


def _is_table(annotation: Any) -> bool:
    return (
        isinstance(annotation, type)
        and get_origin(annotation) is None
        and issubclass(annotation, BaseModel)
    )


def _below(table: Any, part: str) -> Any:
    if get_origin(table) in (dict, list):
        return get_args(table)[-1]
    if get_origin(table) is UnionType:
        return None
    for _, tables in SELECTED.values():
        if part in tables and issubclass(tables[part], table):
            return tables[part]
    if part in table.model_fields:
        return table.model_fields[part].annotation
    return None


def _expected(text: str) -> list[str]:
    """Return the values of pydantic's list, `'a', 'b' or True`, as in a file."""
    found = []
    for part in text.replace(" or ", ", ").split(", "):
        if part.startswith("'"):
            found.append(part.strip("'"))
        else:
            found.append(part.lower())
    return found
