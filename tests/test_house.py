"""The house rules that a machine can hold."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.timeouts import ended_by_timeout
from tests.helpers.touched import imported

ROOT = Path(__file__).parents[1]
PACKAGES = ("cloud", "institution", "device", "common", "deploy")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_imports_run_strictly_downward() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("aiomqtt", {"common/net/client.py"}),
        ("prometheus_client", {"common/metrics.py"}),
        ("zstandard", {"common/model/codecs.py"}),
        (
            "torch",
            {
                "common/learning",
                "common/methods/baselines",
                "deploy/audits",
                "deploy/checking",
                "device/",
            },
        ),
        ("PIL", {"common/learning/readers/folder.py"}),
        ("matplotlib", {"deploy/results/figures.py", "deploy/results/charts.py"}),
        ("jinja2", {"deploy/results/page.py"}),
        ("cryptography", {"common/secure/masks.py", "deploy/kits/authority.py"}),
    ],
)
def test_libraries_stay_in_their_rooms(library: str, home: set[str]) -> None:
    users = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if re.search(rf"^\s*(import|from) {library}\b", path.read_text(), re.MULTILINE)
    ]
    assert users
    assert all(any(user.startswith(place) for place in home) for user in users), users


def test_a_name_of_a_class_is_unique() -> None:
    names = Counter(
        re.findall(
            r"^class ([A-Za-z]\w*)", "\n".join(path.read_text() for path in SOURCES), re.MULTILINE
        )
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_json_that_users_read_may_have_a_number_that_json_has_not() -> None:
    written = {
        "cloud/run_folder.py",
        "deploy/sweeps/output.py",
        "deploy/sweeps/planning.py",
        "deploy/watching",
        "deploy/cli",
    }
    files = [
        path for path in SOURCES if path.relative_to(ROOT).as_posix().startswith(tuple(written))
    ]
    assert len(files) > len(written)
    assert [path.name for path in files if "json.dumps(" in path.read_text()] == []


def test_no_file_is_long() -> None:
    drawn = (ROOT / "tests/simulation").rglob("*.py")
    for files, most in ((SOURCES, 600), (drawn, 750)):
        lengths = {path.name: len(path.read_text().splitlines()) for path in files}
        assert {name: length for name, length in lengths.items() if length > most} == {}


def test_the_product_imports_no_tests() -> None:
    pattern = re.compile(r"^\s*(import|from) tests\b", re.MULTILINE)
    assert [path.name for path in SOURCES if pattern.search(path.read_text())] == []


def test_an_experiment_is_read_without_numpy() -> None:
    code = (
        "import sys; from fedstrata.common.experiment.lint import warnings\n"
        "from fedstrata.common.experiment.reading import parse; "
        # a baseline is as a user's file
        "from fedstrata.common.methods.settings import BASELINES, RULES;"
        "warnings(parse({})); [RULES[name] for name in RULES if name not in BASELINES]; "
        "sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel lists the processes of a thread on Linux alone"
)
@pytest.mark.parametrize(
    ("reason", "ends"), [("Timeout (>1.0s) from pytest-timeout.", True), ("an assertion", False)]
)
def test_what_a_test_has_started_ends_if_it_times_out(reason: str, ends: bool) -> None:
    def wait_and_fail() -> None:
        started.append(subprocess.Popen(words))
        pytest.fail(reason)

    words, started = [sys.executable, "-c", "import signal; signal.pause()"], []
    with subprocess.Popen(words) as before:
        with pytest.raises(pytest.fail.Exception), ended_by_timeout():
            wait_and_fail()
        (process,) = started
        assert process.wait(10) == -signal.SIGKILL if ends else process.poll() is None
        assert before.poll() is None
        for each in (before, process):
            each.kill()
            each.wait()


def test_a_change_touches_the_tests_that_import_it_and_those_of_the_house() -> None:
    house, of_pages = "tests/test_house.py", "tests/test_docs.py"
    found = {*imported(["common/net/bulk.py"])}
    assert found >= {"tests/test_packets.py", house} and not found & {
        of_pages,
        "tests/test_mixing.py",
    }
    assert {*imported(["docs/own-data.md", "tests/test_own.py"])} == {
        "tests/test_own.py",
        of_pages,
        house,
    }


# The private dialect that fedstrata once had does not come back

REFUSED: Final = (
    *(
        "wish",
        "wishes",
        "foretell",
        "foretells",
        "foretold",
        "herald",
        "courier",
        "mend",
        "mended",
        "mends",
    ),
    *(
        "tells",
        "told",
        "hears",
        "heard",
        "says",
        "desk",
        "shelf",
        "examiner",
        "descent",
        "receipt",
        "stand-in",
    ),
    *("iteration", "iterations"),
)
WORD: Final = re.compile(rf"(?<![a-z])(?:{'|'.join(REFUSED)})(?![a-z])")
THIS: Final = "tests/test_house.py"


def test_no_refused_word_stands_in_code_messages_or_docs() -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    kinds = (".py", ".md", ".toml", ".json", ".yml", ".css", ".sh", ".svg")
    found = [
        f"{name}: {match[0]}"
        for name in names
        if name.endswith(kinds) and name != THIS and (ROOT / name).exists()
        for match in WORD.finditer((ROOT / name).read_text(encoding="utf-8").lower())
    ]
    assert found == []
