"""The state of a Flower client, `context.state`, as a file: what persists from task to task.

A file is data: reading it makes numbers, texts, arrays and Flower's own records, and calls nothing
else.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np

from fedstrata.common.errors import described
from fedstrata.common.training.array_trainer import Array

LIBRARY: Final = "flwr"
FILE: Final = "context.state"
UNKEPT: Final = (
    "Put numbers, texts, bytes, numpy arrays, lists and dicts of them, or Flower's records there."
)
UNREAD: Final = "Start a new run."


def read_state(state: MutableMapping[str, Any], folder: Path) -> None:
    """Put what the last task left in the folder of a task into a state. Raises ValueError."""
    file = folder / FILE
    if not file.exists():
        return
    try:
        found = unpacked(msgpack.unpackb(file.read_bytes(), strict_map_key=False))
        for name, value in found.items():
            state[name] = value
    except Exception as error:  # noqa: BLE001 - whatever a file has
        raise ValueError(f"the state in {file} cannot be read ({described(error)})") from None


def write_state(state: Mapping[str, Any], folder: Path) -> None:
    """Write a state into the folder of a task. Raises TypeError if it has what does not persist."""
    content = msgpack.packb(packed(dict(state), FILE))
    if state or (folder / FILE).exists():
        (folder / FILE).write_bytes(content)


def to_file(array: Any) -> bytes:
    """Return an array as a file of numpy's."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def from_file(data: bytes) -> Array:
    """Return the array of `to_file`. Raises ValueError."""
    found: Array = np.load(io.BytesIO(data), allow_pickle=False)
    return found


def packed(value: Any, name: str) -> Any:
    """Return a value as msgpack has it; `name`: its own, for the error. Raises TypeError.

    A list is the list of a tag and its contents, so that each type is read as it was written.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return ["array" if isinstance(value, np.ndarray) else "number", to_file(value)]
    if type(value) in (list, tuple):
        return [
            type(value).__name__,
            [packed(one, f"{name}[{place}]") for place, one in enumerate(value)],
        ]
    its = f"{type(value).__module__}:{type(value).__qualname__}"
    flowers = its.startswith(f"{LIBRARY}.")
    if isinstance(value, Mapping) and (flowers or type(value) is dict):
        items = [[packed(key, name), packed(one, f"{name}[{key!r}]")] for key, one in value.items()]
        return ["dict" if type(value) is dict else its, items]
    if flowers and is_dataclass(value):
        each = fields(value)
        return [
            its,
            {
                one.name: packed(getattr(value, one.name), f"{name}.{one.name}")
                for one in each
                if one.init
            },
        ]
    raise TypeError(f"{name} is {type(value).__name__}, which does not persist")


def unpacked(value: Any) -> Any:
    """Return the value of `packed`. Raises ValueError."""
    if not isinstance(value, list):
        return value
    its, content = value
    if its in ("array", "number"):
        if its == "array":
            return from_file(content)
        return from_file(content)[()]
    if its in ("list", "tuple"):
        if its == "list":
            return [*map(unpacked, content)]
        return tuple(map(unpacked, content))
    if isinstance(content, dict):
        return _record(its, is_dataclass)(**{key: unpacked(one) for key, one in content.items()})
    found = {} if its == "dict" else _record(its, lambda kind: issubclass(kind, MutableMapping))()
    for key, one in content:
        found[unpacked(key)] = unpacked(one)
    return found


def _record(its: object, fits: Callable[[type], bool]) -> Any:
    """Return a class of Flower's records. Raises ValueError for any other name: it comes from a
    file.
    """
    module, _, name = str(its).partition(":")
    if module.startswith(f"{LIBRARY}."):
        found = getattr(import_module(module), name, None)
        if isinstance(found, type) and found.__module__.startswith(f"{LIBRARY}.") and fits(found):
            return found
    raise ValueError(f"{its!r:.80} is not one of Flower's records")
