"""The nodes of a lab: a tree from the cloud down to the devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from fedstrata.common.errors import InvalidExperiment, LeftOut

CLOUD: Final = "cloud"
RESERVED: Final = frozenset({CLOUD, "all"})  # `all` is the broadcast stream


def joined(groups: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of all groups, in order."""
    return [*chain.from_iterable(groups)]


class Tree:
    """The nodes of a lab, whose names are unique."""

    def __init__(self, layers: Sequence[Mapping[str, Sequence[str]]]) -> None:
        """`layers`: the children of each parent, by layer from the cloud down."""
        self.children = {parent: list(names) for layer in layers for parent, names in layer.items()}
        self.layers = [[CLOUD], *(joined(layer.values()) for layer in layers)]
        self._parents = {
            child: parent for parent, names in self.children.items() for child in names
        }
        self._depths = {name: depth for depth, names in enumerate(self.layers) for name in names}
        self._below: dict[str, int] = {}
        for parent, names in reversed(self.children.items()):
            self._below[parent] = sum(1 + self.count_below(name) for name in names)

    def __contains__(self, node: object) -> bool:
        return node in self._depths

    @property
    def devices(self) -> list[str]:
        """The devices; a device's position is the number of its data partition."""
        return self.layers[-1]

    @property
    def parents(self) -> list[str]:
        """The parents of devices."""
        return self.layers[-2]

    @property
    def aggregators(self) -> list[str]:
        """The nodes between the cloud and the devices, from the top down."""
        return joined(self.layers[1:-1])

    @property
    def nodes(self) -> list[str]:
        """All nodes but the cloud, from the top down."""
        return joined(self.layers[1:])

    def parent(self, node: str) -> str:
        """Return a node's parent. Raises KeyError for the cloud and for unknown nodes."""
        return self._parents[node]

    def depth(self, node: str) -> int:
        """Return the number of links between a node and the cloud. Raises KeyError."""
        return self._depths[node]

    def path(self, node: str) -> str:
        """Return the names from the cloud down to a node, `/` between them. Raises KeyError."""
        names = [node]
        while names[-1] != CLOUD:
            names.append(self._parents[names[-1]])
        return "/".join(reversed(names))

    def below(self, node: str) -> Iterator[str]:
        """Yield all nodes below a node, children before grandchildren."""
        yield from self.children.get(node, ())
        for child in self.children.get(node, ()):
            yield from self.below(child)

    def count_below(self, node: str) -> int:
        """Return the number of nodes below a node."""
        return self._below.get(node, 0)

    def below_each(self, node: str) -> dict[str, tuple[str, ...]]:
        """Return for each child of a node all nodes below that child."""
        return {child: tuple(self.below(child)) for child in self.children[node]}


NUMBER: Final = re.compile(r"[0-9]+$")


def number_of(device: str) -> int | None:
    """Return the number at the end of a device's name, None if it has none."""
    found = NUMBER.search(device)
    if found is None:
        return None
    return int(found[0])


def check_parent(tree: Tree, node: str, parent: str, *, role: str, among: Sequence[str]) -> None:
    """Check the parent that a node was started with; `among`: the nodes of its role.

    Raises InvalidExperiment, LeftOut if the node has no parent there.
    """
    home = tree.parent(node) if node in among else None
    if home != parent:
        problem = f"it belongs to {home}" if home else f"no {role} of this experiment"
        there = [name for name in tree.children.get(parent, ()) if name in among]
        remedy = f"{parent} has {', '.join(there) or f'no {role}'}."
        refused = InvalidExperiment if home else LeftOut
        raise refused("--parent", parent, f"{node} is not there: {problem}", remedy)


def share_of(count: int, fraction: float) -> int:
    """Return floor(fraction * count + 1e-9): 0.29 of 100 is 29, and the floats' product less."""
    return int(fraction * count + 1e-9)


def participants(children: int, fraction: float) -> int:
    """Return K = max(1, floor(fraction * children)), the children that take part in a round."""
    return max(1, share_of(children, fraction))
