"""What is wrong with a value, and what to write instead, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic_core import ErrorDetails

from common.experiment.tables import FORMS, proposal

NOT_A_TABLE: Final = ("model_type", "model_attributes_type", "dict_type")
# By pydantic's type of error. {gt} and the like are the bound; `string_pattern_mismatch` and `literal_error` are below.
_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), ("not a whole number", "Write for instance 5.")),
    **dict.fromkeys(("float_type", "float_parsing"), ("not a number", "Write for instance 0.5.")),
    "finite_number": ("not a finite number", "Write for instance 0.5."),
    "bool_type": ("neither true nor false", "Write true or false, without quotes."),
    "string_type": ("not a text", "Write it in quotes."),
    "list_type": ("not a list", 'Write for instance ["a", "b"].'),
    **dict.fromkeys(NOT_A_TABLE, ("not a table", "Write {{ key = value }}, or the keys below [table].")),
    "missing": ("missing", "Add this key."),
    "union_tag_not_found": ("has no name", 'Add name = "...".'),
    "none_required": ("not for this", "Omit it."),
    "greater_than": ("too small", "Write a number above {gt}."),
    "greater_than_equal": ("too small", "Write {ge} or more."),
    "less_than": ("too large", "Write a number below {lt}."),
    "less_than_equal": ("too large", "Write {le} or less."),
    "too_short": ("too short", "Give at least {min_length}."),
    "too_long": ("too long", "Give at most {max_length}."),
}


def problem_of(error: ErrorDetails) -> tuple[str, str]:
    """Return what is wrong with the value of one of pydantic's errors, and the remedy."""
    kind, bound, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "string_pattern_mismatch":
        return "not of the form that is needed", f"Write {FORMS[bound['pattern']]}."
    if kind == "literal_error":
        return "not one of its values", proposal(str(value), _expected(bound["expected"]), what="There are")
    if kind in _KINDS:
        problem, remedy = _KINDS[kind]
        whole = {name: int(each) for name, each in bound.items() if isinstance(each, float) and each.is_integer()}
        return problem, remedy.format_map(bound | whole)
    return error["msg"][:1].lower() + error["msg"][1:], "Correct the value."


def _expected(text: str) -> list[str]:
    """Return the values of pydantic's list, `'a', 'b' or 'c'`."""
    return [part.strip("'") for part in text.replace(" or ", ", ").split(", ")]
