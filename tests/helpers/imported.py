"""Which test files import a module, or a module that imports it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("cloud", "common", "deploy", "device", "institution")
IMPORT: Final = re.compile(
    r"^ *(?:from ([\w.]+) import (?:\(([^)]*)\)|(.*))|import ([\w.]+))", re.MULTILINE
)
NAMED: Final = re.compile(r'"(\w+(?:\.\w+)+)(?::\w+)?"')


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports or names, and the names that it imports from them, as
    modules may be.
    """
    text = path.read_text(encoding="utf-8")
    yield from NAMED.findall(text)
    for module, several, names, plain in IMPORT.findall(text):
        yield module or plain
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", several or names))


def tests_of(path: str) -> tuple[list[str], list[str]]:
    """Return the test files that import a module, and those that import a module that imports it.

    Where there are none, those that are nearest. What a helper of tests imports counts for the
    tests that import the helper. Those that import the least come first: they are the quickest.
    """
    found, levels = _imports(), list[list[str]]()
    files, seen = {path}, {path}
    while files and len(levels) < 2:
        modules, next_ = {_module_of(file) for file in files}, set[str]()
        while (
            more := {file for file, names in found.items() if not names.isdisjoint(modules)} - seen
        ):
            seen |= more
            next_ |= more
            modules = {_module_of(file) for file in more if file.startswith("tests/")}
        if tests := sorted(filter(is_test, next_), key=lambda each: (len(found[each]), each)):
            levels.append(tests)
        files = {file for file in next_ if not file.startswith("tests/")}
    levels += [[], []]
    return levels[0], levels[1]


@cache
def _imports() -> dict[str, set[str]]:
    """Return what each file of the product and of its tests imports, without the benchmarks."""
    files = [
        file
        for room in (*PRODUCT, "tests")
        for file in (ROOT / room).rglob("*.py")
        if "bench" not in file.parts
    ]
    return {str(file.relative_to(ROOT)): set(imports(file)) for file in files}


def is_test(file: str) -> bool:
    return file.startswith("tests/test_")


def _module_of(file: str) -> str:
    return ("" if file.startswith("tests/") else "fedstrata.") + file.removesuffix(
        ".py"
    ).removesuffix("/__init__").replace("/", ".")
