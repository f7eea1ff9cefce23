"""`python -m tests.helpers.touched [COMMIT]`: the test files that a change touches, for `make
test-fast`.

They are changed themselves, or import a changed module or helper, and if none does, a module that
imports it. Where pages change, they are those that read pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
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


def changed(commit: str) -> list[str]:
    """Return the paths that differ from a commit, and those that Git does not know."""
    lines = [["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"]]
    found = [
        subprocess.run(["git", *line], cwd=ROOT, capture_output=True, text=True, check=True)
        for line in lines
    ]
    return sorted({path for done in found for path in done.stdout.splitlines()})


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
        if tests := sorted(filter(_is_test, next_), key=lambda each: (len(found[each]), each)):
            levels.append(tests)
        files = {file for file in next_ if not file.startswith("tests/")}
    direct, second, *_ = *levels, [], []
    return direct, second


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


def _is_test(file: str) -> bool:
    return file.startswith("tests/test_")


def _module_of(file: str) -> str:
    return ("" if file.startswith("tests/") else "fedstrata.") + file.removesuffix(
        ".py"
    ).removesuffix("/__init__").replace("/", ".")


def touched(paths: list[str]) -> list[str]:
    """Return the test files that change with these paths."""
    found = {"tests/test_house.py"}  # it reads every file, and is quick
    if any(path.startswith("docs/") or path.endswith(".md") for path in paths):
        found.add("tests/test_docs.py")
    for path in paths:
        direct, _ = tests_of(path) if path.endswith(".py") else ([], [])
        found.update([path] if _is_test(path) else direct)
    return sorted(file for file in found if (ROOT / file).exists())


if __name__ == "__main__":
    print(*touched(changed(sys.argv[1] if len(sys.argv) > 1 else "main")))
