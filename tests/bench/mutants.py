"""`make bench NAME=mutants`: a list of small changes of the product: which do the tests notice?

A change of `mutants.csv` is made in a copy of the sources. There the test runs that found it last,
by the column `by`. If it finds nothing now, the quick tests follow that execute the changed lines,
by the map of `tests/helpers/executed.py`: the quickest of each test file first, then the others, up
to REST_S. Where the map has none, they are those that import its module. What is not Python also
has the test files that name its file. A test that fails without the change finds nothing. A change
that none finds has survived, and is lost if one had found it.

    python -m tests.bench.mutants                    the list; what found each is in .mutants.csv
    python -m tests.bench.mutants --update           and in the list
    python -m tests.bench.mutants --count 100 --seed 7    other changes, drawn
    python -m tests.bench.mutants --count 100 --seed 7 --against FILE    compared with results
    python -m tests.bench.mutants --keep --count 300 --seed 1    draw the list again

After an end before the last, `--resume` goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any, Final

import pytest
from rich.console import Console
from rich.table import Table

from tests.helpers.executed import Test, TestsMap
from tests.helpers.imported import ROOT, tests_of
from tests.helpers.mutants import Mutant, draw, read, writer
from tests.helpers.touched import tests_of_line

LIST: Final = Path(__file__).with_suffix(".csv")
SERVER: Final = Path(__file__).parents[1] / "helpers" / "pytest_server.py"
RESULTS: Final = ROOT / ".mutants.csv"
FIRST_MOST: Final = 30  # tests that run first
FIRST_S: Final = 20.0
REST_S: Final = 120.0  # of the other tests
FILES_MOST: Final = 20  # test files that run without a map
START_S: Final = 120.0  # of pytest on a busy machine
SLOWER: Final = 5.0  # than at the recording, at most
FILES_S: Final = 900.0  # of test files without known seconds
GONE: Final = "gone"
NO_TESTS: Final = int(pytest.ExitCode.NO_TESTS_COLLECTED)


def batches(known: TestsMap, mutant: Mutant, text: str) -> Iterator[tuple[list[str], float]]:
    """Yield tests that run together, and the most seconds that they may take."""
    line = mutant.line(text) or 0
    if mutant.path.endswith(".py"):
        tests = tests_of_line(known, mutant.path, text, line)
    else:
        tests = known.tests(mutant.path, text, ())
    if tests:
        yield from _of_map(known, tests)
    if mutant.path.endswith(".py"):
        levels = [] if tests else tests_of(mutant.path)
    else:
        # a file may be read once for several tests
        levels = naming(Path(mutant.path))
    for files in levels:
        if files:
            yield files[:FILES_MOST], START_S + FILES_S


def _of_map(known: TestsMap, tests: Sequence[Test]) -> Iterator[tuple[list[str], float]]:
    order = Counter[str]()
    ranks: dict[Test, tuple[int, float]] = {}
    for test in tests:
        ranks[test] = (order[test.file], test.seconds)
        order[test.file] += 1
    spread = sorted(tests, key=lambda test: ranks[test])
    first = within(spread, FIRST_S)[:FIRST_MOST]
    other = within([test for test in tests if test not in first], REST_S)
    for batch in (first, other):
        if batch:
            seconds = sum(test.seconds for test in batch)
            yield [test.name for test in batch], START_S + SLOWER * seconds


def within(tests: Sequence[Test], most_s: float) -> list[Test]:
    """Return the first of some tests that take so many seconds together, at least one."""
    found: list[Test] = []
    total = 0.0
    for test in tests:
        total += test.seconds
        if found and total > most_s:
            break
        found.append(test)
    return found


def naming(path: Path) -> tuple[list[str], list[str]]:
    """Return the test files that name a file, and those that import a module which names it; if
    there are none, those that name its folder.
    """
    tests: list[str] = []
    modules: list[str] = []
    for name in (path.name, path.parent.name):
        for pattern, found in (("tests/test_*.py", tests), ("[cdi]*/**/*.py", modules)):
            for file in sorted(ROOT.glob(pattern)):
                if name in file.read_text(encoding="utf-8"):
                    found.append(str(file.relative_to(ROOT)))
        if tests or modules:
            break
    importing = {test for module in modules for test in tests_of(module)[0]}
    return tests, sorted(importing.difference(tests))


class Copy:
    """A copy of the sources, and the process that runs tests in it."""

    def __init__(self, folder: Path) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for path in listed.stdout.splitlines():
            if (ROOT / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, folder / path)
        subprocess.run(["make", "-s", "links"], cwd=folder, check=True)
        self._folder = folder
        # of the tests that found a mutant, without it
        self._passing: set[str] = set()
        self._failing: set[str] = set()
        self._written = 0
        self._server = subprocess.Popen(
            [sys.executable, "-P", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        """End the process."""
        self._server.communicate()

    def _run(self, tests: Sequence[str], limit_s: float) -> tuple[int | None, list[str]]:
        assert self._server.stdin is not None and self._server.stdout is not None
        job = {"folder": str(self._folder), "tests": [*tests], "limit_s": limit_s}
        print(json.dumps(job), file=self._server.stdin, flush=True)
        result: dict[str, Any] = json.loads(self._server.stdout.readline())
        return result["code"], result["failed"]

    def _write(self, file: Path, text: str) -> None:
        """Write a file, with a time that no other writing has: by it and the size Python knows
        whether its bytecode is still that of the file.
        """
        file.write_text(text, encoding="utf-8")
        self._written += 1
        os.utime(file, (self._written, self._written))

    def found_by(self, mutant: Mutant, tests: Sequence[str], limit_s: float) -> str:
        """Return which of the tests finds a mutant, "" if none does.

        Raises LookupError if there are no such tests.
        """
        file = self._folder / mutant.path
        text = file.read_text(encoding="utf-8")
        while True:
            words = [*tests, *(f"--deselect={test}" for test in sorted(self._failing))]
            self._write(file, mutant.applied(text))
            try:
                code, failed = self._run(words, limit_s)
            finally:
                self._write(file, text)
            if code is None:
                return "the time limit"
            if code in (0, NO_TESTS):
                return ""
            if not failed:
                # with the mutant they cannot even be collected, or their process ends
                code, _ = self._run(["--collect-only", *words], limit_s)
                if code != 0:
                    raise LookupError(f"{' '.join(tests)}: no such tests. Run `make tests-map`.")
                return "collection"
            if failed[0] in self._passing:
                return failed[0]
            code, _ = self._run(failed, limit_s)
            known = self._passing if code == 0 else self._failing
            known.add(failed[0])


def play(known: TestsMap, copy: Copy, mutant: Mutant, hint: str) -> str:
    """Return what finds a mutant, first trying the test that found it before."""
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    if "::" in hint and (by := still_found(copy, mutant, hint)):
        return by
    for tests, limit_s in batches(known, mutant, text):
        if by := copy.found_by(mutant, tests, limit_s):
            return by
    return ""


def still_found(copy: Copy, mutant: Mutant, test: str) -> str:
    """Return what finds a mutant if a test does that found it before, "" if not, or if the test is
    gone.
    """
    try:
        return copy.found_by(mutant, [test], START_S)
    except LookupError:
        return ""


def is_gone(mutant: Mutant) -> bool:
    """Return whether the lines of a mutant are no longer there."""
    file = ROOT / mutant.path
    return not file.exists() or mutant.line(file.read_text(encoding="utf-8")) is None


def table_of(results: Sequence[tuple[Mutant, str]]) -> Table:
    """Return the table by room."""
    columns = ("mutants", "killed", "equivalents", "gone")
    counts: dict[str, Counter[str]] = {}
    for mutant, by in results:
        count = counts.setdefault(mutant.room, Counter())
        count["mutants"] += 1
        count["gone"] += by == GONE
        count["killed"] += by not in ("", GONE)
        count["equivalents"] += by == "" and bool(mutant.equivalent)
    total = sum(counts.values(), Counter[str]())
    tested = total["mutants"] - total["equivalents"] - total["gone"]
    share = 100 * total["killed"] / max(tested, 1)
    title = f"{total['killed']} of {tested} mutants were killed, {share:.0f} %"
    table = Table("room", *columns, title=title)
    for room, count in [*sorted(counts.items()), ("all", total)]:
        table.add_row(room, *(str(count[column]) for column in columns))
    return table


def lost(before: Sequence[tuple[Mutant, str]], now: Sequence[tuple[Mutant, str]]) -> list[str]:
    """Return the mutants that were killed before and survive now, with what had found them."""
    killed = {mutant.key: by for mutant, by in before if by not in ("", GONE)}
    return [
        f"{mutant} (before: {killed[mutant.key]})"
        for mutant, by in now
        if by == "" and mutant.key in killed
    ]


def write_list(rows: Sequence[tuple[Mutant, str]]) -> None:
    """Write mutants, with what found each, as the list."""
    with LIST.open("w", newline="", encoding="utf-8") as file:
        write = writer(file)
        for mutant, by in rows:
            write(mutant, by)


def asked_for() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, help="draw as many of Python, and a seventh of others")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write what is drawn as the list")
    parser.add_argument("--only", default="", help="paths that begin so")
    parser.add_argument("--against", type=Path, help="other results to compare with")
    parser.add_argument("--update", action="store_true", help="note what found each in the list")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="go on with the results")
    parser.add_argument("--jobs", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Play the list or what is drawn, and show. Exits with 1 if a mutant is lost."""
    asked, console = asked_for(), Console(soft_wrap=True, highlight=False, markup=False)
    listed = read(LIST)
    chosen = [mutant for mutant, _ in listed]
    before = listed
    if asked.count:
        chosen = draw(asked.count, asked.seed)
        before = []
    if asked.keep:
        reasons = {mutant.key: mutant.equivalent for mutant, _ in listed}
        write_list([(replace(m, equivalent=reasons.get(m.key, "")), "") for m in chosen])
        return
    if asked.against:
        before = read(asked.against)
    known = TestsMap()
    stale = known.stale()
    known.close()
    if stale:
        console.print(f"{len(stale)} test files are not in the map as they are: `make tests-map`")
    chosen = [mutant for mutant in chosen if mutant.path.startswith(asked.only)]
    hints = {mutant.key: by for mutant, by in before}
    done = read(asked.results) if asked.resume and asked.results.exists() else []
    played = {mutant.key: by for mutant, by in done}
    results: list[tuple[Mutant, str]] = []
    todo: list[Mutant] = []
    with asked.results.open("w", newline="", encoding="utf-8") as file:
        write = writer(file)

        def note(mutant: Mutant, by: str) -> None:
            write(mutant, by)
            results.append((mutant, by))

        for mutant in chosen:
            if mutant.key in played:
                note(mutant, played[mutant.key])
            elif is_gone(mutant):
                note(mutant, GONE)
                console.print(f"GONE: {mutant}")
            else:
                todo.append(mutant)
        for mutant, by in each_played(todo, hints, asked.jobs):
            note(mutant, by)
            console.print(f"killed by {by}: {mutant}" if by else f"SURVIVED: {mutant}")
    console.print(table_of(results))
    if asked.update:
        now = {mutant.key: by for mutant, by in results}
        write_list([(mutant, now.get(mutant.key, by)) for mutant, by in listed])
    missed = lost(before, results)
    for line in missed:
        console.print(f"LOST: {line}")
    sys.exit(bool(missed))


def each_played(
    mutants: Sequence[Mutant], hints: dict[tuple[str, ...], str], jobs: int
) -> Iterator[tuple[Mutant, str]]:
    """Yield mutants with what finds them, as they are played in copies of the sources."""
    free = Queue[Copy]()

    def played(mutant: Mutant) -> tuple[Mutant, str]:
        copy, known = free.get(), TestsMap()
        try:
            return mutant, play(known, copy, mutant, hints.get(mutant.key, ""))
        finally:
            known.close()
            free.put(copy)

    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(jobs) as threads:
        for number in range(jobs):
            (Path(root) / str(number)).mkdir()
            free.put(Copy(Path(root) / str(number)))
        try:
            for done in as_completed(threads.submit(played, mutant) for mutant in mutants):
                yield done.result()
        finally:
            threads.shutdown(cancel_futures=True)
            for _ in range(jobs):
                free.get().close()


if __name__ == "__main__":
    main()
