"""`python -m tests.helpers.executed [--all]`: which lines each quick test executes, as the map that
`make test-fast` and `make bench NAME=mutants` read.

Test files that have changed since they were recorded run again, with `--all` every one. Processes
that a test starts count for it, and so do the files that it reads. If several tests share a
fixture, what the fixture executes counts for each of them.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from tests.helpers.imported import PRODUCT, ROOT
from tests.helpers.recorder import RAW

MAP: Final = ROOT / ".tests-map"
TOGETHER: Final = 60  # test files of one run of pytest
MEASURED: Final = (*PRODUCT, "docs/tools", "tests/helpers", "tests/simulation")
# Braces in a value are environment variables of the process that is measured.
SETTINGS: Final = """
[run]
parallel = true
data_file = {raw}/lines
context = ${{TESTS_MAP_NOW-}}
patch = _exit, fork
source_dirs =
    {folders}
disable_warnings =
    no-data-collected
    couldnt-parse
"""
TABLES: Final = """
CREATE TABLE IF NOT EXISTS files (file TEXT PRIMARY KEY, digest TEXT);
CREATE TABLE IF NOT EXISTS tests (test TEXT PRIMARY KEY, file TEXT, seconds REAL);
-- who: a test or a fixture
CREATE TABLE IF NOT EXISTS uses (test TEXT, file TEXT, who TEXT);
-- numbits: the set of lines, NULL for a file that is read; digest: of the text with these lines
CREATE TABLE IF NOT EXISTS lines (file TEXT, who TEXT, path TEXT, digest TEXT, numbits BLOB);
CREATE TABLE IF NOT EXISTS texts (digest TEXT PRIMARY KEY, text TEXT);
CREATE INDEX IF NOT EXISTS of_path ON lines (path);
CREATE INDEX IF NOT EXISTS of_who ON uses (who);
"""
FOUND: Final = """
SELECT DISTINCT tests.test, tests.file, seconds
FROM lines JOIN uses ON uses.who = lines.who JOIN tests ON tests.test = uses.test
WHERE path = ? AND digest IS ? AND (numbits IS NULL OR numbits_any_intersection(numbits, ?))
"""


class Test(NamedTuple):
    """A test of the map."""

    name: str
    file: str
    seconds: float


class TestsMap:
    """The map; one without a file is empty."""

    def __init__(self, path: Path = MAP) -> None:
        from coverage.numbits import register_sqlite_functions

        self._base = sqlite3.connect(path)
        register_sqlite_functions(self._base)
        self._base.executescript(TABLES)

    def close(self) -> None:
        """Close its file."""
        self._base.close()

    def tests(self, path: str, text: str, lines: Iterable[int]) -> list[Test]:
        """Return the tests that execute any of the lines of a file with this text, or read the
        file, quickest first.

        Lines that the recorded text lacks stand for those in whose place they are.
        """
        from coverage.numbits import nums_to_numbits

        wanted = set(lines)
        recorded = self._base.execute("SELECT DISTINCT digest FROM lines WHERE path = ?", (path,))
        found: set[Test] = set()
        for (digest,) in recorded.fetchall():
            numbits = b""
            if digest is not None:
                (before,) = self._base.execute(
                    "SELECT text FROM texts WHERE digest = ?", (digest,)
                ).fetchone()
                numbits = nums_to_numbits(translated(text, before, wanted))
            rows = self._base.execute(FOUND, (path, digest, numbits))
            found.update(Test(*row) for row in rows)
        return sorted(found, key=lambda test: (test.seconds, test.name))

    def of_file(self, file: str) -> list[Test]:
        """Return the tests of a test file, quickest first."""
        rows = self._base.execute(
            "SELECT test, file, seconds FROM tests WHERE file = ? ORDER BY seconds, test", (file,)
        )
        return [Test(*row) for row in rows]

    def stale(self, *, again: bool = False) -> list[str]:
        """Return the test files that are not recorded as they are now, or all, again; forget those
        that are gone.
        """
        recorded = dict(self._base.execute("SELECT file, digest FROM files").fetchall())
        present = {}
        for path in sorted((ROOT / "tests").glob("test_*.py")):
            present[f"tests/{path.name}"] = digest_of(path.read_text(encoding="utf-8"))
        self._forget(file for file in recorded if file not in present)
        self._base.commit()
        return [file for file, digest in present.items() if again or recorded.get(file) != digest]

    def _forget(self, files: Iterable[str]) -> None:
        for file in files:
            for table in ("files", "tests", "uses", "lines"):
                self._base.execute(f"DELETE FROM {table} WHERE file = ?", (file,))

    def merge(self, raw: Path, root: Path = ROOT) -> list[str]:
        """Take what processes of pytest have noted in place of what is known of their test files.

        Returns the tests that failed or did not run: their files are recorded without them, and
        stay stale.
        """
        notes = [json.loads(path.read_text()) for path in raw.glob("*.json")]
        seconds = {test: each for note in notes for test, each in note["seconds"].items()}
        collected = {test for note in notes for test in note["collected"]}
        failed = {test for note in notes for test in note["failed"]} | collected - seconds.keys()
        uses = {test: each for note in notes for test, each in note["fixtures"].items()}
        rows = executed_in(raw, f"{root}/")
        read = {(who, path) for note in notes for who, path in note["read"]}
        known = subprocess.run(
            ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
        )
        tracked = set(known.stdout.splitlines())
        files = {test: test.partition("::")[0] for test in seconds}
        self._forget({*files.values()})
        stale = {test.partition("::")[0] for test in failed}
        for file in {*files.values()} - stale:
            digest = digest_of((root / file).read_text(encoding="utf-8"))
            self._base.execute("INSERT INTO files VALUES (?, ?)", (file, digest))
        for test in uses.keys() & files.keys() - failed:
            file = files[test]
            self._base.execute("INSERT INTO tests VALUES (?, ?, ?)", (test, file, seconds[test]))
            for who in {test, *uses[test]}:
                self._base.execute("INSERT INTO uses VALUES (?, ?, ?)", (test, file, who))
        for (who, path), numbits in rows.items():
            text = _text(root / path)
            digest = digest_of(text)
            self._base.execute("INSERT OR IGNORE INTO texts VALUES (?, ?)", (digest, text))
            line = (file_of(who), who, path, digest, numbits)
            self._base.execute("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", line)
        for who, path in read:
            if path in tracked:
                whole = (file_of(who), who, path)
                self._base.execute("INSERT INTO lines VALUES (?, ?, ?, NULL, NULL)", whole)
        self._base.execute("DELETE FROM texts WHERE digest NOT IN (SELECT digest FROM lines)")
        self._base.commit()
        return sorted(failed)


def executed_in(raw: Path, root: str) -> dict[tuple[str, str], bytes]:
    """Return the lines, as numbits, by test or fixture and path, of the files that coverage left."""
    from coverage.numbits import numbits_union

    found: dict[tuple[str, str], bytes] = {}
    for path in raw.glob("lines.*"):
        base = sqlite3.connect(path)
        try:
            rows = base.execute(
                "SELECT context, path, numbits FROM line_bits"
                " JOIN context ON context.id = context_id JOIN file ON file.id = file_id"
            ).fetchall()
        except sqlite3.DatabaseError:
            continue  # of a process that was killed as it wrote
        finally:
            base.close()
        for context, file, numbits in rows:
            # a forked process has both, its parent's and its own
            who = context.rpartition("|")[2]
            key = (who, file.removeprefix(root))
            if who:
                found[key] = numbits_union(found.get(key, b""), numbits)
    return found


def file_of(who: str) -> str:
    """Return the test file of a test or a fixture, "" or a folder for a fixture of many files."""
    return who.partition("::")[0].partition("@")[0]


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def digest_of(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def translated(text: str, other: str, lines: set[int]) -> set[int]:
    """Return the lines of another text that stand in the place of these, from 1 on.

    Where the other has none, they are the one before and the one after.
    """
    if text == other:
        return lines
    found = set[int]()
    for same, start, end, other_start, other_end in matches(text, other):
        inside = [line for line in lines if start < line <= end]
        if same:
            found.update(line - start + other_start for line in inside)
        elif inside:
            found.update(range(other_start + 1, other_end + 1) or (other_start, other_start + 1))
    return found


def matches(text: str, other: str) -> list[tuple[bool, int, int, int, int]]:
    """Return the stretches of lines of two texts, and whether they are the same."""
    matcher = difflib.SequenceMatcher(None, text.splitlines(), other.splitlines(), autojunk=False)
    return [(tag == "equal", a, b, c, d) for tag, a, b, c, d in matcher.get_opcodes()]


def record(files: Sequence[str], *, jobs: int = 2) -> list[str]:
    """Run test files, and take what they execute into the map; return the tests that failed."""
    with tempfile.TemporaryDirectory() as name:
        raw = Path(name)
        settings = raw / "settings"
        folders = "\n    ".join(str(ROOT / each) for each in MEASURED if (ROOT / each).exists())
        settings.write_text(SETTINGS.format(raw=raw, folders=folders), encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COVERAGE_PROCESS_START": str(settings),
            RAW: name,
        }
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile"]
        command += ["--no-loadscope-reorder", "-p", "tests.helpers.recorder", *files]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        known = TestsMap()
        failed = known.merge(raw)
        known.close()
    if code not in (0, 1):
        sys.exit(f"pytest ended with code {code}")
    return failed


def main() -> None:
    """Record what is not recorded, some files at a time: an end before the last loses few."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="of these test files; of all by default")
    parser.add_argument("--all", action="store_true", help="those that are recorded, too")
    asked = parser.parse_args()
    known = TestsMap()
    files = known.stale(again=asked.all)
    known.close()
    if asked.files:
        files = [file for file in files if file in asked.files]
    failed: list[str] = []
    for first in range(0, len(files), TOGETHER):
        failed += record(files[first : first + TOGETHER])
    if failed:
        sys.exit(f"{len(failed)} tests failed, and are not in the map: {', '.join(failed[:5])}")


if __name__ == "__main__":
    main()
