"""`python -m tests.helpers.touched [COMMIT]`: the tests that a change touches, one a line, for
`make test-fast`.

By the map of `tests/helpers/executed.py` they execute the changed lines, or read the changed file.
For what no test of the map executes, they are the test files that import the changed module or
helper, and if none does, a module that imports it. Changed test files run whole.
"""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.helpers.concerned import concerned
from tests.helpers.executed import MAP, Test, TestsMap, matches
from tests.helpers.imported import ROOT, is_test, tests_of

HOUSE = "tests/test_house.py"  # it reads every file, and is quick


def changed(commit: str) -> list[str]:
    """Return the paths that differ from a commit, and those that Git does not know."""
    lines = [["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"]]
    found = [
        subprocess.run(["git", *line], cwd=ROOT, capture_output=True, text=True, check=True)
        for line in lines
    ]
    return sorted({path for done in found for path in done.stdout.splitlines()})


def text_of(path: str, commit: str) -> str:
    """Return the text of a file at a commit, "" if it has none."""
    done = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, check=False
    )
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def imported(paths: list[str]) -> list[str]:
    """Return the test files that change with these paths, by imports."""
    found = {HOUSE}
    if any(path.startswith("docs/") or path.endswith(".md") for path in paths):
        found.add("tests/test_docs.py")
    for path in paths:
        direct, _ = tests_of(path) if path.endswith(".py") else ([], [])
        found.update([path] if is_test(path) else direct)
    return sorted(file for file in found if (ROOT / file).exists())


def differing(before: str, now: str) -> tuple[set[int], set[int]]:
    """Return the lines of two texts that the other lacks, from 1 on; where one has none, the line
    before and the line after.
    """
    old, new = set[int](), set[int]()
    for same, start, end, now_start, now_end in matches(before, now):
        if not same:
            old.update(range(start + 1, end + 1))
            new.update(range(now_start + 1, now_end + 1) or (now_start, now_start + 1))
    return old, new


def statements(text: str) -> set[int]:
    """Return the lines of a source that are neither empty nor comments nor docstrings."""
    found = set[int]()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            found.add(number)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def executing(known: TestsMap, path: str, before: str, now: str) -> list[Test] | None:
    """Return the tests of a map that execute what differs between two texts of a source, None if
    it has none for a statement that differs.
    """
    found: set[Test] = set()
    complete = True
    for text, lines in zip((before, now), differing(before, now), strict=True):
        for line in sorted(lines & statements(text)):
            tests = tests_of_line(known, path, text, line)
            found.update(tests)
            complete = complete and bool(tests)
    return sorted(found) if complete else None


def tests_of_line(known: TestsMap, path: str, text: str, line: int) -> list[Test]:
    """Return the tests of a map that execute what shows a line of a source, quickest first."""
    found: set[Test] = set()
    for place, wanted in concerned(path, text, line).items():
        source = text if place == path else (ROOT / place).read_text(encoding="utf-8")
        found.update(known.tests(place, source, wanted))
    return sorted(found, key=lambda test: (test.seconds, test.name))


def touched(known: TestsMap, paths: list[str], commit: str) -> list[str]:
    """Return the tests, and the test files of which all tests are touched."""
    files, tests = {HOUSE}, set[Test]()
    for path in paths:
        if is_test(path):
            files.add(path)
            continue
        before, file = text_of(path, commit), ROOT / path
        now = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        found = known.tests(path, before, ()) or None
        if path.endswith(".py"):
            found = executing(known, path, before, now)
        if found is None:
            files.update(imported([path]))
        else:
            tests.update(found)
    for name in {test.file for test in tests}:
        if tests.issuperset(known.of_file(name)):
            files.add(name)
    alone = sorted(test.name for test in tests if test.file not in files)
    return sorted(file for file in files if (ROOT / file).exists()) + alone


if __name__ == "__main__":
    since = sys.argv[1] if len(sys.argv) > 1 else "main"
    if MAP.exists():
        print(*touched(TestsMap(), changed(since), since), sep="\n")
    else:
        print(*imported(changed(since)), sep="\n")
