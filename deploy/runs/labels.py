"""Labels of experiments by the keys in which they differ, such as `fedcross, alpha 0.9`. Pure functions.

An experiment is a mapping of its leaves by dotted keys (`flat`). A key that follows from another difference is not in a
label: with `fedcross` beside `fedavg`, the other keys of that table are those of the rule. They are named where they
are not the defaults, or where two experiments of that rule differ in them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

NAMES: Final = ("name", "profile", "dataset", "partition")  # keys whose value is clear without the key
WHOLE: Final = ("nodes", "network")  # leaves that are no keys: their values are texts of their own
PARTS_MOST: Final = 4  # of a label, and more where these do not distinguish; the others are counted
_PROFILE: Final = ".profile"
_CLEAR: Final = ("cloud", "model", "training", "data")  # tables whose names need no qualifier


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return leaves


def differing(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which experiments differ, in the order of their tables' first appearance."""
    keys = dict.fromkeys(key for leaves in every for key in leaves)
    tables = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    apart = [key for key in keys if any(leaves.get(key) != every[0].get(key) for leaves in every)]
    return sorted(apart, key=lambda key: tables.index(key.rpartition(".")[0]))


def labels(every: Sequence[Mapping[str, Any]], chosen: Sequence[Collection[str]] = ()) -> list[str]:
    """Return a label for each experiment; they differ if the experiments do.

    `chosen`: of each experiment, the keys that are not at their defaults. The experiment's `name` is in a label only
    where nothing else distinguishes two.
    """
    keys = differing(every)
    own = chosen or [()] * len(every)
    apart = len({repr([leaves.get(key) for key in keys]) for leaves in every})
    for considered in ([key for key in keys if key != "name"], keys):
        parts = [_parts(considered, leaves, every, kept) for leaves, kept in zip(every, own, strict=True)]
        for most in range(PARTS_MOST, max(map(len, parts), default=0) + PARTS_MOST):
            found = [_joined(each, most) for each in parts]
            if considered and len(set(found)) == apart:
                return found
    return [str(leaves.get("name", "")) for leaves in every]


def shown(value: object) -> str:
    """Return a value as it stands in a label."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _parts(
    keys: Sequence[str], leaves: Mapping[str, Any], every: Sequence[Mapping[str, Any]], chosen: Collection[str]
) -> list[str]:
    every_key = {key for each in every for key in each}
    parts = []
    for key in keys:
        reason = _reason(key, keys, every)
        if key.endswith(_PROFILE) and key not in leaves:
            continue  # its own numbers are named
        if reason and not (reason.endswith(_PROFILE) and reason not in leaves):
            peers = [each for each in every if each.get(reason) == leaves.get(reason)]
            alike = all(each.get(key) == leaves.get(key) for each in peers)
            if alike and not (key in chosen and key in leaves and _is_choice(reason)):
                continue
        parts.append(_part(key, leaves.get(key), every_key))
    return parts


def _reason(key: str, keys: Sequence[str], every: Sequence[Mapping[str, Any]]) -> str:
    """Return another key of `keys` whose difference explains this one's, or ""."""
    *tables, last = key.split(".")
    for depth in range(len(tables), 0, -1) if last not in NAMES else ():
        for name in NAMES:
            if (other := ".".join([*tables[:depth], name])) in keys:
                return other
    return "nodes" if "nodes" in keys and key != "nodes" and any(key not in leaves for leaves in every) else ""


def _is_choice(reason: str) -> bool:
    """Return whether further keys say more than this one: a profile gives them, and nodes have none."""
    return reason.rpartition(".")[2] in NAMES and not reason.endswith(_PROFILE)


def _part(key: str, value: object, every_key: Collection[str]) -> str:
    table, _, last = key.rpartition(".")
    if key in WHOLE:
        return shown(value)
    if table and last in NAMES:
        return f"{_qualifier(table)} {shown(value)}".strip()
    unlimited = value is None and last.endswith("_mbit")
    return f"{_short(key, every_key)} {'unlimited' if unlimited else shown(value)}"


def _qualifier(table: str) -> str:
    first, *below = table.split(".")
    if first in _CLEAR:
        return ""
    return below[-1] if first == "links" and below else first


def _short(key: str, every_key: Collection[str]) -> str:
    """Return the shortest end of a key that is no other key's end; a link's has its tier or node."""
    words = key.split(".")
    least = 2 if words[0] in ("links", "transfer") and len(words) > 2 else 1
    ends = (".".join(words[start:]) for start in range(len(words) - least, 0, -1))
    return next((end for end in ends if not any(o != key and f".{o}".endswith(f".{end}") for o in every_key)), key)


def _joined(parts: Sequence[str], most: int) -> str:
    more = len(parts) - most
    return ", ".join([*parts[:most], *([f"{more} more"] if more > 0 else [])]) or "defaults"
