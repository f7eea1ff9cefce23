"""One idea a line, as far as a machine can tell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.test_house import ROOT, SOURCES

COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CALLS: Final = (ast.Call, *COMPREHENSIONS)


def ideas(path: Path) -> Iterator[str]:
    """Yield the lines of a file that hold more than one idea, and why."""
    inside: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node):
            inside[child] = node
    for node, parent in inside.items():
        around: list[ast.AST] = []  # the expressions around it, the nearest first
        above = parent
        while not isinstance(above, ast.stmt) and above in inside:
            around.append(above)
            above = inside[above]
        within = any(isinstance(each, COMPREHENSIONS) for each in around)
        why = ""
        if isinstance(node, ast.IfExp) and any(isinstance(each, CALLS) for each in around):
            why = "a conditional expression inside a call or a comprehension"
        elif isinstance(node, COMPREHENSIONS) and (within or len(node.generators) > 2):
            why = "a comprehension within another, or over three levels"
        elif isinstance(node, ast.NamedExpr) and any(
            isinstance(each, ast.BoolOp) and len(each.values) > 2 for each in around
        ):
            why = "a walrus in a condition of three parts"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            targets = node.targets[0]
            swapped = isinstance(targets, ast.Tuple) and {*map(ast.dump, node.value.elts)} == {
                ast.dump(each).replace("Store()", "Load()") for each in targets.elts
            }
            if isinstance(targets, ast.Tuple) and not swapped:
                why = "an assignment to a tuple that is neither unpacking nor swapping"
        if why:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {why}"  # type: ignore[attr-defined]


def test_a_line_holds_one_idea() -> None:
    assert [line for path in SOURCES for line in ideas(path)] == []
