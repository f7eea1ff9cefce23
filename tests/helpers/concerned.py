"""Which lines show what a line of Python does: those that a test must execute to notice a change of
it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.helpers.imported import PRODUCT, ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef
Places = dict[str, set[int]]


def concerned(path: str, text: str, line: int) -> Places:
    """Return them, from 1 on, by path.

    A line inside a function is its statement. A default stands for the body of its function. What
    is executed as a module is imported stands for the lines that name what it defines: a constant
    anywhere, a field in its own file, and its class anywhere. If there are none, it stands for the
    functions of its class or module.
    """
    around = _around(text, line)
    functions = [node for node in around if isinstance(node, Function)]
    if functions:
        inner = functions[-1]
        if line >= inner.body[0].lineno:
            return {path: _header(around[-1])}
        return {path: _span(inner)}
    names = {name for node in around[-1:] for name in _bound(node)}
    classes = [node for node in around if isinstance(node, ast.ClassDef)]
    if classes:
        found = _places({classes[-1].name}, "")
        for place, lines in _places(names, path).items():
            found.setdefault(place, set()).update(lines)
    else:
        found = _places(names, "")
    if not found:
        holder: ast.AST = classes[-1] if classes else _tree(text)
        lines = {each for node in ast.walk(holder) for each in _body(node)}
        found = {path: lines}
    return found


def _places(names: set[str], only: str) -> Places:
    """Return the lines that name any of these as a function runs, of all files or one."""
    found: Places = {}
    for name in names:
        for path in [only] if only else _naming(name):
            source = (ROOT / path).read_text(encoding="utf-8")
            lines = {each for each in _lines_with(name, source) if _is_executed(source, each)}
            if lines:
                found.setdefault(path, set()).update(lines)
    return found


@cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _around(text: str, line: int) -> list[ast.stmt]:
    """Return the statements around a line, from the outermost inwards."""
    found: list[ast.stmt] = []
    todo: list[ast.AST] = [_tree(text)]
    while todo:
        node = todo.pop()
        for child in ast.iter_child_nodes(node):
            first = getattr(child, "lineno", None)
            for decorator in getattr(child, "decorator_list", []):
                first = min(first or decorator.lineno, decorator.lineno)
            last = getattr(child, "end_lineno", None)
            inside = first is None or last is None or first <= line <= last
            if inside:
                todo.append(child)
                if isinstance(child, ast.stmt):
                    found.append(child)
    return found


def _header(node: ast.stmt) -> set[int]:
    """Return the lines of a statement, without the statements in it."""
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return set(range(node.lineno, max(end, node.lineno) + 1))


def _span(function: Function) -> set[int]:
    return set(range(function.body[0].lineno, (function.end_lineno or 0) + 1))


def _body(node: ast.AST) -> set[int]:
    return _span(node) if isinstance(node, Function) else set()


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module or a class defines."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
    if isinstance(node, ast.ClassDef):
        yield node.name


def _lines_with(name: str, source: str) -> list[int]:
    word = re.compile(rf"\b{re.escape(name)}\b")
    return [each for each, line in enumerate(source.splitlines(), 1) if word.search(line)]


def _is_executed(source: str, line: int) -> bool:
    """Return whether a line is executed after its module is imported."""
    around = [node for node in _around(source, line) if isinstance(node, Function)]
    return bool(around) and line >= around[-1].body[0].lineno


@cache
def _naming(name: str) -> list[str]:
    return [path for path, words in _words().items() if name in words]


@cache
def _words() -> dict[str, set[str]]:
    """Return the words of each file of the product."""
    return {
        str(file.relative_to(ROOT)): set(re.findall(r"\w+", file.read_text(encoding="utf-8")))
        for room in PRODUCT
        for file in sorted((ROOT / room).rglob("*.py"))
    }
