"""Choice of the nodes that a picture of limited height shows: lost and slow ones first, each below its parents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from common.protocol.messages import Step
from common.protocol.status import STEPS
from deploy.watching.lab import Node, is_gone


@dataclass(frozen=True, slots=True)
class HiddenNodes:
    """Children of a node that have no row of their own."""

    parent: Node
    children: tuple[Node, ...]


Row: TypeAlias = tuple[int, Node | HiddenNodes]  # with its depth


def rows_of(root: Node, *, room: int | None, openable: Callable[[Node], bool]) -> list[Row]:
    """Return the rows of a tree, at most `room`, or at least the root's; None: unlimited.

    A node has a row of its own if `openable` and if there is room. The other children of a shown node share one row.
    """
    nodes = list(below(root, openable))
    if room is not None:
        nodes = _fitting(root, nodes, room)
    return list(_rows(root, 0, {id(node) for node in nodes}))


def _rows(node: Node, depth: int, shown: set[int]) -> Iterator[Row]:
    yield depth, node
    hidden = []
    for child in node.children.values():
        if id(child) in shown:
            yield from _rows(child, depth + 1, shown)
        else:
            hidden.append(child)
    if hidden:
        yield depth + 1, HiddenNodes(node, tuple(hidden))


def below(node: Node, openable: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """Yield the nodes below a node, parents before their children; nothing below one that is not `openable`."""
    for child in filter(openable, node.children.values()):
        yield child
        yield from below(child, openable)


def _fitting(root: Node, nodes: list[Node], room: int) -> list[Node]:
    """Return the most urgent nodes, with their parents, that fit into `room` rows."""
    hidden = {id(root): len(root.children)}  # children without a row, of each node with one
    lines = 1 + bool(root.children)
    shown = []
    urgencies = _urgencies(root, nodes)
    for node in sorted(nodes, key=lambda node: urgencies[id(node)]):
        chain = []  # the node, and its parents without a row
        parent: Node | None = node
        while parent is not None and id(parent) not in hidden:
            chain.append(parent)
            parent = parent.parent
        if parent is None or not chain:
            continue
        left = {id(each): len(each.children) - bool(place) for place, each in enumerate(chain)}
        added = len(chain) + sum(count > 0 for count in left.values()) - (hidden[id(parent)] == 1)
        if lines + added <= room:
            lines += added
            hidden[id(parent)] -= 1
            hidden |= left
            shown += chain
    return shown


def _urgencies(root: Node, nodes: list[Node]) -> dict[int, tuple[bool, int, int, bool, int, float]]:
    """Return a sort key for each node, parents before children in `nodes`.

    Missing ones come first, one of each parent before the second ones. The others follow by depth, those of one depth
    by their progress in the round.
    """
    found: dict[int, tuple[bool, int, int, bool, int, float]] = {}
    depths, gone = {id(root): 0}, Counter[int]()
    for node in nodes:
        home = id(node.parent)
        depths[id(node)] = depths[home] + 1
        missing = is_gone(node.state) or node.state == "absent"
        gone[home] += missing
        rank = gone[home] if missing else 0
        step = STEPS.index(node.step or Step.IDLE)
        found[id(node)] = (not missing, rank, depths[id(node)], not node.works, step, round(node.done, 1))
    return found
