"""Who shares keys with whom in a secure sum: everybody with everybody, in a large round each child
with some.

The children stand in a ring, by digests of their names and of all keys, which nobody chooses alone.
Each has the next ones on both sides as neighbours, itself among them: a circle of degree k, as the
random graph of Bell et al. 2020 (SecAgg+).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from fedstrata.common.secure.records import SumMember


def neighbours(members: Sequence[SumMember], most: int) -> Mapping[str, tuple[str, ...]]:
    """Return the neighbours of each child, itself among them, in the order of the members."""
    names = [member.name for member in members]
    side = max(1, (most - 1) // 2)
    if len(names) <= 2 * side + 1:
        return dict.fromkeys(names, tuple(names))
    digest = hashlib.blake2b()
    for member in members:
        digest.update(member.masks + member.boxes)
    salt = digest.digest()

    def place(name: str) -> bytes:
        return hashlib.blake2b(name.encode(), key=salt).digest()

    circle = sorted(names, key=place)
    order = {name: number for number, name in enumerate(names)}
    found = {}
    for number, name in enumerate(circle):
        near = {circle[(number + step) % len(circle)] for step in range(-side, side + 1)}
        found[name] = tuple(sorted(near, key=order.__getitem__))
    return found
