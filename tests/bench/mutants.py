"""`make bench NAME=mutants`: small changes of the product, drawn by a seed: which do the tests
notice?

A change is an operator, a number, a condition that is turned round, or a statement that is left
out. Each is made in a copy of the sources, where the quick tests run that import its module; if
they pass, some run that import a module that imports it. A change that neither finds has survived:
some change nothing that can be seen, slow tests find others.

python -m tests.bench.mutants [--count 120] [--seed 1] [--only PREFIX] [--jobs 2]
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tests.helpers.touched import PRODUCT, ROOT, tests_of

LIMIT_S: Final = 1800  # of all tests of a change, which take 700 s one after the other on 2 cores
SECOND_MOST: Final = 20  # test files that import a module which imports the changed one
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


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change: the node at `start` to `end` of a file, as offsets of UTF-8, is `text` now."""

    path: str
    line: int
    start: int
    end: int
    text: str
    before: str

    @property
    def room(self) -> str:
        """The folder, two deep in common and deploy."""
        parts = self.path.split("/")[:-1]
        return "/".join(parts[:2] if parts[0] in ("common", "deploy") else parts[:1])


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


def mutants(path: str) -> Iterator[Mutant]:
    """Yield the possible changes of a file, without those of annotations."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for each in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(each))
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                todo.extend(
                    each
                    for each in (value if isinstance(value, list) else [value])
                    if isinstance(each, ast.AST)
                )
        if isinstance(node, ast.expr | ast.stmt) and (text := changed(node)) is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            yield Mutant(path, node.lineno, start, end, text, source[start:end].decode())


def found_by(folder: Path, tests: Sequence[str]) -> str:
    """Return which of the tests fails in a copy of the sources, "" if none does."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--no-header",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # pytest's own limit for one test is lower: it hangs where that cannot end it
        return "the time limit"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if done.returncode == 0 else (failed or ["a process that ended"])[-1].split(" - ")[0]


def play(mutant: Mutant, folder: Path) -> str:
    """Make a change in a copy, run the tests, and take it back; return by what it was found, "" if
    by nothing.
    """
    file = folder / mutant.path
    source = file.read_bytes()
    file.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    try:
        direct, second = tests_of(mutant.path)
        return found_by(folder, direct) or (
            found_by(folder, second[:SECOND_MOST]) if second else ""
        )
    finally:
        file.write_bytes(source)


def copy_to(folder: Path) -> Path:
    """Copy the sources that Git knows."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for path in listed.stdout.splitlines():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    return folder


def main() -> None:
    """Draw, play and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="paths that begin so")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    files = sorted(
        str(file.relative_to(ROOT)) for room in PRODUCT for file in (ROOT / room).rglob("*.py")
    )
    every = [mutant for path in files if path.startswith(asked.only) for mutant in mutants(path)]
    drawn = random.Random(asked.seed).sample(every, min(asked.count, len(every)))
    console, free = Console(soft_wrap=True), Queue[Path]()
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(asked.jobs) as threads:
        for number in range(asked.jobs):
            free.put(copy_to(Path(root) / str(number)))

        def played(mutant: Mutant) -> tuple[Mutant, str]:
            folder = free.get()
            try:
                return mutant, play(mutant, folder)
            finally:
                free.put(folder)

        killed, counts = Counter[str](), Counter(mutant.room for mutant in drawn)
        for done in as_completed(threads.submit(played, mutant) for mutant in drawn):
            mutant, by = done.result()
            killed[mutant.room] += bool(by)
            change = f"{mutant.path}:{mutant.line}: {mutant.before} -> {mutant.text}"
            console.print(
                f"found by {by}: {change}" if by else f"SURVIVED: {change}",
                markup=False,
                highlight=False,
            )
    table = Table(
        "room", "changes", "found", title=f"{killed.total()} of {counts.total()} changes were found"
    )
    for room, count in sorted(counts.items()):
        table.add_row(room, str(count), str(killed[room]))
    console.print(table)


if __name__ == "__main__":
    main()
