"""What a session is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum

import numpy as np


def snapshot(thing: object) -> object:
    """Return all that an object holds, as plain values that can be compared."""
    seen: set[int] = set()

    def look(value: object) -> object:
        if value is None or isinstance(value, (bool, int, float, str, bytes, Enum)):
            return value
        if isinstance(value, (bytearray, memoryview, np.ndarray)):
            return bytes(value)
        if callable(value):
            return "callable"
        if isinstance(value, Mapping):
            return [(look(key), look(each)) for key, each in value.items()]
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        if isinstance(value, (list, tuple, deque)):
            return [look(each) for each in value]
        if id(value) in seen:
            return "seen"
        seen.add(id(value))
        return {name: look(each) for name, each in attributes(value).items()}

    return look(thing)


def attributes(value: object) -> dict[str, object]:
    """Return an object's attributes."""
    names = [*getattr(value, "__dict__", ())]
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return {name: getattr(value, name) for name in dict.fromkeys(names) if hasattr(value, name)}


def sizes(thing: object) -> dict[str, int]:
    """Return the length of every container that an object holds, by its path."""
    found: dict[str, int] = {}

    def look(value: object, path: str) -> None:
        if isinstance(value, dict):  # an object's attributes
            for name, each in value.items():
                look(each, f"{path}.{name}")
        elif isinstance(value, (list, tuple)):
            found[path] = max(found.get(path, 0), len(value))
            for each in value:
                look(each, f"{path}[]")

    look(snapshot(thing), "")
    return found
