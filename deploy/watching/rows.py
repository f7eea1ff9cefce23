"""The rows that a picture of limited height shows: lost and slow nodes first, each below its
parents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from fedstrata.common.protocol.messages import Step
from fedstrata.common.protocol.status import STEPS
from fedstrata.deploy.watching.nodes import Node, is_gone


@dataclass(frozen=True, slots=True)
class HiddenNodes:
    """Children of a node that have no row of their own."""

    parent: Node
    children: tuple[Node, ...]


Row: TypeAlias = tuple[int, Node | HiddenNodes]  # with its depth


def rows_of(root: Node, *, room: int, openable: Callable[[Node], bool]) -> list[Row]:
    """Return the rows of a tree, at most `room`, or at least the root's.

    A node has a row of its own if `openable` and if there is room. The other children of a shown
    node share one row.
    """
    nodes = _by_urgency(root, openable)

    def rows(count: int) -> list[Row]:
        return list(_rows(root, 0, _with_parents(nodes[:count])))

    fitting = bisect_right(range(len(nodes) + 1), room, key=lambda count: len(rows(count)))
    return rows(max(0, fitting - 1))


def below(node: Node, openable: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """Yield the nodes below a node, parents before their children; nothing below one that is not
    `openable`.
    """
    for child in filter(openable, node.children.values()):
        yield child
        yield from below(child, openable)


def _rows(node: Node, depth: int, shown: set[str]) -> Iterator[Row]:
    yield depth, node
    hidden = []
    for child in node.children.values():
        if child.name in shown:
            yield from _rows(child, depth + 1, shown)
        else:
            hidden.append(child)
    if hidden:
        yield depth + 1, HiddenNodes(node, tuple(hidden))


def _with_parents(nodes: Iterable[Node]) -> set[str]:
    shown = set[str]()
    for node in nodes:
        each: Node | None = node
        while each is not None and each.name not in shown:
            shown.add(each.name)
            each = each.parent
    return shown


def _by_urgency(root: Node, openable: Callable[[Node], bool]) -> list[Node]:
    """Return the nodes below: missing ones first, one of each parent before the second ones.

    The others follow, parents first, by their progress in the round.
    """
    missing = Counter[str]()

    def urgency(node: Node) -> tuple[float, bool, bool, int, float]:
        rank: float = inf
        if node.parent is not None and (is_gone(node.state) or node.state == "absent"):
            missing[node.parent.name] += 1
            rank = missing[node.parent.name]
        return (
            rank,
            not node.children,
            not node.works,
            STEPS.index(node.step or Step.IDLE),
            round(node.done, 1),
        )

    return sorted(below(root, openable), key=urgency)
