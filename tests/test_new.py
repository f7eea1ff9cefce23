"""`fedstrata new`: each folder runs as it is, and so do its sweep and its test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata import load, run
from fedstrata.deploy.cli.new import LEAST, Template
from tests.helpers.commands import invoke

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[1]


def made(folder: Path, template: Template) -> None:
    option = [] if template is Template.NET else [f"--{template}"]
    done = invoke("new", str(folder), *option)
    assert (
        done.exit_code == 0 and done.stdout == f"cd {folder} && fedstrata run lab.toml --direct\n"
    )


OF_FLOWER = pytest.param(Template.FLOWER, marks=pytest.mark.flower)
ALL = [OF_FLOWER if each is Template.FLOWER else each for each in Template]


@pytest.mark.parametrize("template", ALL)
def test_a_new_folder_has_a_run_that_learns(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "mine", template)
    monkeypatch.chdir(tmp_path / "mine")
    found = run("lab.toml", mode="direct", progress=False)
    assert (
        found.experiment.name == "mine"
        and found.score is not None
        and found.score > LEAST[template]
    )
    for file in Path().iterdir():
        assert file.is_dir() or "NAME" not in file.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("template", ALL)
def test_its_sweep_and_its_test_pass(template: Template, tmp_path: Path) -> None:
    made(tmp_path / "mine", template)
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    for words in (["-m", "fedstrata", "sweep", "sweep.toml", "--direct"], ["-m", "pytest", "-q"]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "mine", env=os.environ | {"PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [
        load(path) for path in (tmp_path / "mine" / "runs" / "sweep").iterdir() if path.is_dir()
    ]
    assert len(runs) == 4 and all(each.state == "finished" for each in runs)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("mine", "--rule", "--csv"), "use one of --rule, --csv, --numpy and --flower"),
        (("9 lives",), "'9 lives': use letters, digits, - and _"),
        (("there",), "'there' is there already: name another one"),
    ],
)
def test_other_folders_are_refused(
    words: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    done = invoke("new", *words)
    assert done.exit_code == 2 and line in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
