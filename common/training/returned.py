"""What own code returns, read as its writers mean it: numbers of any library, counts, logs with
anything in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NUMBERS_MOST: Final = 32  # of a result
NAME_MOST: Final = 64  # characters of a number's name
COUNT_MOST: Final = 2**53  # up to which a float is exact


def number(value: object) -> float | None:
    """Return a number of Python's, numpy's, or of a library whose arrays of no dimension have
    `item`; None for others.

    It may be NaN or infinite.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, float | int):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def count(value: object) -> int | None:
    """Return a whole number, None for others; a float such as 40.0 is one, a bool is not."""
    found = None if isinstance(value, bool | np.bool_) else number(value)
    if found is None or not isfinite(found) or found != int(found) or abs(found) > COUNT_MOST:
        return None
    return int(found)


def numbers(found: object) -> tuple[dict[str, float], list[str]]:
    """Return the finite numbers of a log, by name, at most `NUMBERS_MOST`; and why each of the
    others is left out.
    """
    if not isinstance(found, Mapping):
        return {}, [] if found is None else [f"it is {form(found)}, not a dict"]
    kept: dict[str, float] = {}
    left_out = []
    for name, value in found.items():
        read = number(value)
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MOST or not name.isprintable():
            left_out.append(f"{name!r:.40} is no printable name of at most {NAME_MOST} characters")
        elif read is None:
            left_out.append(f"{name} is {form(value)}, no number")
        elif not isfinite(read):
            left_out.append(f"{name} is {read}")
        elif len(kept) == NUMBERS_MOST:
            left_out.append(f"{name} is beyond the first {NUMBERS_MOST}")
        else:
            kept[name] = read
    return kept, left_out


def form(value: object) -> str:
    """Return what a value is, in a few words without its content, which may have many lines."""
    kind = type(value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value)[:40]
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"{kind.__name__} {value.dtype} {[*shape]}"
    if isinstance(value, list | tuple | set | dict):
        return f"a {kind.__name__} of {len(value)}"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return kind.__name__


def exchanged(array: npt.NDArray[Any]) -> npt.DTypeLike | None:
    """Return the type as which an array is exchanged, None if it cannot be: int64 for whole
    numbers, else float32.
    """
    if array.dtype.kind == "f":
        return np.float32
    fits = array.dtype.kind in "bi" or (
        array.dtype.kind == "u" and (array <= np.iinfo(np.int64).max).all()
    )
    if fits:
        return np.int64
    return None
