"""Small changes of the product, drawn by a seed, and kept so that they survive other edits.

A mutant names lines of a file by their text, and the function that they are in. Those of Python
change an operator, a number or a condition, or leave a statement out; those of other files change
a number or a word.
"""

from __future__ import annotations

import ast
import csv
import io
import random
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from tests.helpers.imported import PRODUCT, ROOT

OPERATORS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
NUMBER: Final = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.])")
SHELL: Final = {
    " && ": " || ",
    " || ": " && ",
    "[ -n ": "[ -z ",
    "[ -z ": "[ -n ",
    "[ -e ": "[ ! -e ",
    " = ": " != ",
    " != ": " = ",
    "exit 0": "exit 1",
    "exit 2": "exit 0",
    "set -eu": "set -u",
}
SWITCHES: Final = {"true": "false", "false": "true"}
QUERIES: Final = {
    " < ": " > ",
    " > ": " < ",
    " == ": " != ",
    " / ": " * ",
    "rate(": "increase(",
    "sum by": "max by",
    "max by": "min by",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Files that are not Python, by patterns; how many mutants a list has of them; and the words
    that change, beside numbers.
    """

    name: str
    files: tuple[str, ...]
    count: int
    words: Mapping[str, str]
    lines: str = ""  # what matches the lines that change
    numbers: bool = True


KINDS: Final = (
    Kind("experiments", ("deploy/experiments/**/*.toml",), 12, SWITCHES, r"[\w-]+ = [^\"\[]"),
    Kind("profiles", ("common/settings/*.toml",), 6, SWITCHES),
    Kind("shell", ("deploy/**/*.sh", "deploy/slurm/*.sbatch"), 10, SHELL, numbers=False),
    Kind("Prometheus", ("deploy/prometheus/alerts.yml", "deploy/prometheus/rules.yml"), 6, QUERIES),
    Kind("Grafana", ("deploy/grafana/dashboards/*.json",), 5, QUERIES, ' *"expr"'),
    Kind("broker", ("deploy/containers/mosquitto.conf",), 3, SWITCHES),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change: lines of a file, without their indentation, are others now.

    `where` is the function or class that has them, "" for the file; `nth` counts the places there
    with the same lines. One that changes nothing that can be seen has the reason.
    """

    path: str
    where: str
    nth: int
    before: str
    after: str
    equivalent: str = ""

    @property
    def room(self) -> str:
        """The folder, two deep in common and deploy; the kind of what is not Python."""
        for kind in KINDS:
            # here * matches several folders
            if any(fnmatch(self.path, pattern.replace("**/", "")) for pattern in kind.files):
                return kind.name
        parts = self.path.split("/")[:-1]
        return "/".join(parts[:2] if parts[0] in ("common", "deploy") else parts[:1])

    @property
    def key(self) -> tuple[str, ...]:
        """What is the same in two lists."""
        return self.path, self.where, str(self.nth), self.before, self.after

    def __str__(self) -> str:
        """Return the place and the change, in one line."""
        place = ": ".join(each for each in (self.path, self.where) if each)
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{place}: {before} -> {after}"

    def line(self, text: str) -> int | None:
        """Return the first of its lines in a file's text, from 1 on, None if it is gone."""
        lines, wanted = text.splitlines(), self.before.splitlines()
        left = self.nth
        for start in sorted(_inside(text, self.where) if self.where else range(len(lines))):
            if bare(lines[start : start + len(wanted)]) == wanted:
                if left == 0:
                    return start + 1
                left -= 1
        return None

    def applied(self, text: str) -> str:
        """Return the text with the change. Raises LookupError if it is gone."""
        line = self.line(text)
        if line is None:
            raise LookupError(str(self))
        lines = text.splitlines()
        first = lines[line - 1]
        indent = first[: len(first) - len(first.lstrip())]
        new = [indent + each for each in self.after.splitlines()]
        end = line - 1 + len(self.before.splitlines())
        return "\n".join([*lines[: line - 1], *new, *lines[end:], ""])


def bare(lines: list[str]) -> list[str]:
    """Return lines without the indentation of the first."""
    if not lines:
        return []
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [line.removeprefix(indent) for line in lines]


def _inside(text: str, where: str) -> set[int]:
    """Return the lines, from 0 on, of the functions and classes of a qualified name."""
    found = set[int]()
    for name, node in _definitions(ast.parse(text)):
        if name == where:
            found.update(range(node.lineno - 1, node.end_lineno or 0))
    return found


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            yield name, node
            yield from _definitions(node, f"{name}.")
        else:
            yield from _definitions(node, prefix)


def made(path: str, text: str, start: int, end: int, new: str) -> Mutant:
    """Return the mutant that has new text between two offsets of a file's text."""
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", end)
    if last < 0:
        last = len(text)
    line = text.count("\n", 0, first)
    before = bare(text[first:last].splitlines())
    after = bare((text[first:start] + new + text[end:last]).splitlines())
    around = [""]
    if path.endswith(".py"):
        for name, node in _definitions(ast.parse(text)):
            if node.lineno - 1 <= line < (node.end_lineno or 0):
                around.append(name)
    found = Mutant(path, around[-1], 0, "\n".join(before), "\n".join(after))
    while found.line(text) != line + 1:
        found = Mutant(path, found.where, found.nth + 1, found.before, found.after)
    return found


def changed(node: ast.AST) -> str | None:
    """Return the source of a node with one change, None if this kind has none."""
    match node:
        case ast.Compare(left, [operator, *others], operands) if type(operator) in OPERATORS:
            text = ast.unparse(ast.Compare(left, [other(operator), *others], operands))
        case ast.BoolOp(operator, values):
            text = f"({ast.unparse(ast.BoolOp(other(operator), values))})"
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            text = f"({ast.unparse(ast.BinOp(left, other(operator), right))})"
        case ast.UnaryOp(ast.Not(), operand):
            text = f"bool({ast.unparse(operand)})"
        case ast.Constant(value) if type(value) in (int, float):
            text = f"({value!r} + 1)"
        case ast.AugAssign() | ast.Raise() | ast.Expr(ast.Call()):
            text = "pass"
        case _:
            return None
    return text


def other(operator: ast.AST) -> Any:
    """Return the operator in place of one."""
    return OPERATORS[type(operator)]()


Change = tuple[str, str, int, int, str]  # a file, its text, two offsets, the text in their place


def of_python(path: str, text: str) -> Iterator[Change]:
    """Yield the possible changes of a source, without those of annotations."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines()

    def offset(line: int, column: int) -> int:
        """Return the offset in characters of a column in bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                children = value if isinstance(value, list) else [value]
                todo.extend(each for each in children if isinstance(each, ast.AST))
        if isinstance(node, ast.expr | ast.stmt) and (new := changed(node)) is not None:
            end = offset(node.end_lineno or 0, node.end_col_offset or 0)
            yield path, text, offset(node.lineno, node.col_offset), end, new


def of_kind(kind: Kind, path: str, text: str) -> Iterator[Change]:
    """Yield the possible changes of a file that is not Python, without those of comments."""
    start = 0
    for line in text.splitlines(keepends=True):
        code = line.partition("#")[0] if not line.lstrip().startswith('"') else line
        if re.match(kind.lines, code):
            for found in NUMBER.finditer(code if kind.numbers else ""):
                value = found.group()
                more = str(2 * float(value) or 1.0) if "." in value else str(int(value) + 1)
                yield path, text, start + found.start(), start + found.end(), more
            for word, new in kind.words.items():
                for found in re.finditer(re.escape(word), code):
                    yield path, text, start + found.start(), start + found.end(), new
        start += len(line)


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw mutants: of Python, by room in proportion to its tokens, then those of other kinds, a
    seventh as many.
    """
    drawing = random.Random(seed)
    rooms: dict[str, list[Change]] = {}
    tokens: dict[str, int] = {}
    for path, text in _sources(f"{room}/**/*.py" for room in PRODUCT):
        room = Mutant(path, "", 0, "", "").room
        rooms.setdefault(room, []).extend(of_python(path, text))
        size = sum(1 for _ in tokenize.generate_tokens(io.StringIO(text).readline))
        tokens[room] = tokens.get(room, 0) + size
    wanted: dict[str, int] = {}
    before = 0
    for room in sorted(rooms):
        after = before + tokens[room]
        total = sum(tokens.values())
        wanted[room] = round(count * after / total) - round(count * before / total)
        before = after
    for kind in KINDS:
        rooms[kind.name] = [
            change for path, text in _sources(kind.files) for change in of_kind(kind, path, text)
        ]
        wanted[kind.name] = round(count * kind.count / 300)
    found: list[Mutant] = []
    for room, most in wanted.items():
        drawn = drawing.sample(rooms[room], min(most, len(rooms[room])))
        found.extend(made(*change) for change in drawn)
    return found


def _sources(patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        for file in sorted(ROOT.glob(pattern)):
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


COLUMNS: Final = ("path", "where", "nth", "before", "after", "equivalent", "by")


def read(path: Path) -> list[tuple[Mutant, str]]:
    """Return the mutants of a list, each with the test that found it last, "" for none."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_mutant(**row) for row in csv.DictReader(file)]


def _mutant(*, nth: str, by: str, **words: str) -> tuple[Mutant, str]:
    return Mutant(nth=int(nth), **words), by


def writer(file: io.TextIOBase) -> Callable[[Mutant, str], None]:
    """Return what adds mutants to a list, which begins with its columns."""
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(COLUMNS)

    def write(mutant: Mutant, by: str) -> None:
        lines.writerow([*mutant.key, mutant.equivalent, by])
        file.flush()

    return write
