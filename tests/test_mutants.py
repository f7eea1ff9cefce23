"""What judges the tests: the map of the lines that each executes, and the mutants that it plays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import mutants as bench
from tests.helpers import concerned, executed, imported, touched
from tests.helpers.mutants import Mutant, read

PRODUCT = """\
LIMIT = 3


def double(x, factor=2):
    # a comment
    if x > LIMIT:
        return x * factor
    return 0


def other(x):
    return x + 1
"""
TESTS = """\
import subprocess, sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.toy import double, other


@pytest.fixture(scope="module")
def four():
    return double(4)


def test_of_a_fixture(four):
    assert four == 8

def test_of_the_same(four):
    assert four

def test_small():
    assert double(1) == 0

def test_in_a_process():
    code = "import sys; sys.path.insert(0, '.'); from common.toy import other; print(other(1))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"2\\n"

def test_file():
    assert (Path(__file__).parents[1] / "common" / "toy.toml").read_text() == "number = 1\\n"
"""
FILES = {
    "common/__init__.py": "",
    "common/toy.py": PRODUCT,
    "common/toy.toml": "number = 1\n",
    "tests/test_toy.py": TESTS,
    "tests/helpers/__init__.py": "",
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    "Makefile": "links:\n",
}
TOY = "common/toy.py"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a module, its tests, and their map."""
    folder = tmp_path_factory.mktemp("toy")
    helpers = Path(imported.__file__).parent
    for name in ("recorder", "executed", "imported"):
        FILES[f"tests/helpers/{name}.py"] = (helpers / f"{name}.py").read_text()
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    command = [sys.executable, "-m", "tests.helpers.executed"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def in_toy(toy: Path, monkeypatch: pytest.MonkeyPatch) -> executed.TestsMap:
    for module in (bench, concerned, executed, imported, touched):
        monkeypatch.setattr(module, "ROOT", toy)
    monkeypatch.setattr(bench, "TestsMap", lambda: executed.TestsMap(toy / ".tests-map"))
    monkeypatch.setattr(concerned, "_words", lambda: {TOY: {"LIMIT"}})
    return executed.TestsMap(toy / ".tests-map")


def names(tests: list[executed.Test] | None) -> set[str]:
    assert tests is not None
    return {test.name.removeprefix("tests/test_toy.py::test_") for test in tests}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (1, {"of_a_fixture", "of_the_same", "small"}),  # a constant: where its name is
        (4, {"of_a_fixture", "of_the_same", "small"}),  # a default: its function's body
        (7, {"of_a_fixture", "of_the_same"}),
        (8, {"small"}),
        (12, {"in_a_process"}),
    ],
)
def test_a_line_has_the_tests_that_execute_it(
    in_toy: executed.TestsMap, line: int, expected: set[str]
) -> None:
    assert names(touched.tests_of_line(in_toy, TOY, PRODUCT, line)) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("# a comment", "# another", set()),
        ("return 0", "return -1", {"small"}),
        ("def other(x):\n", "def other(x):\n    x += 0\n", {"in_a_process"}),
        ("return x * factor", "return factor * x", {"of_a_fixture", "of_the_same"}),
    ],
)
def test_a_change_touches_the_tests_that_execute_it(
    in_toy: executed.TestsMap, before: str, after: str, expected: set[str]
) -> None:
    now = PRODUCT.replace(before, after)
    assert names(touched.executing(in_toy, TOY, PRODUCT, now)) == expected


def test_a_file_has_the_tests_that_read_it(in_toy: executed.TestsMap) -> None:
    assert names(in_toy.tests("common/toy.toml", "", ())) == {"file"}
    assert in_toy.stale() == []


# one test that finds the last change, and that is gone
FOUND_BY = "tests/test_toy.py::test_gone"
PLAYED = [
    (Mutant(TOY, "double", 0, "if x > LIMIT:", "if x <= LIMIT:"), "test_toy"),
    (Mutant(TOY, "double", 0, "return 0", "return 0.0"), ""),
    (Mutant(TOY, "other", 0, "return x + 1", "return x - 1"), "test_in_a_process"),
    (Mutant(TOY, "other", 1, "return x + 1", "return x - 1"), "gone"),
    (Mutant("common/toy.toml", "", 0, "number = 1", "number = 2"), "test_file"),
]


@pytest.mark.slow
def test_what_survives_but_was_killed_before_is_lost(
    in_toy: executed.TestsMap,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(bench, "LIST", tmp_path / "list.csv")
    bench.write_list([(mutant, FOUND_BY) for mutant, _ in PLAYED])
    words = ["mutants", "--update", "--results", str(tmp_path / "results.csv"), "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 1
    found = dict(read(bench.LIST))
    for mutant, expected in PLAYED:
        assert expected in found[mutant] and bool(expected) == bool(found[mutant]), mutant
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("LOST", "GONE"))] == [
        f"GONE: {PLAYED[3][0]}",
        f"LOST: {PLAYED[1][0]} (before: {FOUND_BY})",
    ]
