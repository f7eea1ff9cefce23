"""`python -m tests.helpers.touched [COMMIT]`: the test files that a change touches, for `make test-fast`.

They are changed themselves, or import a changed module or helper; where pages change, those that read pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
IMPORT: Final = re.compile(r"^ *(?:from ([\w.]+) import (?:\(([^)]*)\)|(.*))|import ([\w.]+))", re.MULTILINE)


def changed(commit: str) -> list[str]:
    """Return the paths that differ from a commit, and those that Git does not know."""
    lines = [["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"]]
    found = [subprocess.run(["git", *line], cwd=ROOT, capture_output=True, text=True, check=True) for line in lines]
    return sorted({path for done in found for path in done.stdout.splitlines()})


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, and the names that it imports from them, as modules may be."""
    for module, several, names, plain in IMPORT.findall(path.read_text(encoding="utf-8")):
        yield module or plain
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", several or names))


def touched(paths: list[str]) -> list[str]:
    """Return the test files that change with these paths."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths}
    always = {"house"}  # it reads every file, and is quick
    if any(path.startswith("docs/") or path.endswith(".md") for path in paths):
        always.add("docs")
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if str(path.relative_to(ROOT)) in paths
        or path.stem.removeprefix("test_") in always
        or not modules.isdisjoint(imports(path))
    ]


if __name__ == "__main__":
    print(*touched(changed(sys.argv[1] if len(sys.argv) > 1 else "main")))
