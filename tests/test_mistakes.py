"""What a new user mistypes: one line with what is wrong and what to write instead, and the exit
code for it.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from typer.testing import Result

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment.reading import load
from fedstrata.common.settings.tables import parsed
from fedstrata.common.text import counted
from fedstrata.deploy.cli.chosen import kept_once_begun
from fedstrata.deploy.console.shipped import shipped
from fedstrata.deploy.watching.showing import CloudLog
from tests.helpers.commands import invoke
from tests.helpers.records import a_global_round


def measured(*words: str | Path) -> tuple[Result, int]:
    """Return a command's result, and the most bytes that Python's objects took meanwhile."""
    tracemalloc.start()
    try:
        done = invoke(*words)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return done, most


@pytest.mark.parametrize(
    "key", [b"a." * 20_000 + b"a", b"[" + b"a." * 20_000 + b"a]", b"x = [{" + b'"a".' * 20_000]
)
def test_a_file_with_a_long_key_takes_little_memory(key: bytes, tmp_path: Path) -> None:
    """tomllib keeps each beginning of a key: of 40 kB 1.2 GB."""
    (file := tmp_path / "it.toml").write_bytes(key + b" = 1")
    done, most = measured("run", file)
    assert done.exit_code == 4 and "nested too deeply" in done.stderr
    assert most < 30_000_000


@pytest.mark.parametrize(
    "line",
    [
        "[{:x}]",
        "[[{:x}]]",
        "[ {:x}" + ".a" * 98 + " ] # x",
        "'{:x}'" + ".a" * 98 + " = 1",
        "{:x}.a = 1",
    ],
)
def test_a_file_of_many_tables_is_refused_before_it_is_parsed(line: str, tmp_path: Path) -> None:
    """tomllib takes a kilobyte for each: of 1 MB half a gigabyte."""
    lines = (line.format(number) for number in range(52_000 if len(line) < 20 else 4_000))
    (file := tmp_path / "it.toml").write_text("\n".join(lines))
    done, most = measured("run", file)
    assert done.exit_code == 4 and done.stderr.count("\n") == 1, done.stderr
    assert "its headers and keys have more than 50,000 parts. Write fewer tables." in done.stderr
    assert most < 30_000_000


def test_numbers_of_a_long_list_are_no_headers() -> None:
    assert len(parsed("times = [\n" + "[1.5],\n" * 60_000 + "0.25, 1.5\n]")["times"]) == 60_002


def test_one_is_singular() -> None:
    assert [counted(count, "global rounds") for count in (0, 1, 2, 1000)] == [
        "0 global rounds", "1 global round", "2 global rounds", "1,000 global rounds"
    ]  # fmt: skip
    nodes = {"institutions": 1, "devices": 2}
    facts = {
        "run": "r",
        "experiment": "x",
        "nodes": nodes,
        "global_rounds": 1,
        "model": "m",
        "model_bytes": 1,
    }
    one = load(shipped()["demo"], ())
    assert "1 institution, 2 devices" in str(CloudLog(one).line("run", {**facts, "folder": "f"}))


def test_an_error_that_would_come_again_has_no_command_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, lines in (
        (InvalidExperiment("a", 1, "no", "Yes."), 0),
        # after a global round: own code that was corrected goes on
        (InvalidExperiment("a", 1, "no", "Yes."), 1),
        (RunFailed("so"), 1),
        (KeyboardInterrupt(), 2),  # after the terminal's ^C
    ):
        folder = RunFolder.create(tmp_path, load(shipped()["demo"], ()))
        folder.begun = True
        if lines:
            folder.add_round(a_global_round(1, 0.5))
        with pytest.raises(type(error)), kept_once_begun(folder, ["fedstrata", "run"]):
            raise error
        folder.release()
        assert capsys.readouterr().err.count("\n") == lines
