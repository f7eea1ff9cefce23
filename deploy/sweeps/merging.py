"""Trees of an experiment's keys, merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree updated by others, table by table; a table with a `name` key replaces the existing one."""
    tree = dict(base)
    for change in changes:
        for key, value in change.items():
            deeper = isinstance(value, Mapping) and isinstance(tree.get(key), Mapping) and "name" not in value
            tree[key] = merged(tree[key], value) if deeper else value
    return tree
