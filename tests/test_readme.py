"""The README's commands, each as it stands there; only the roles of a lab compute nothing, and
sizes are small.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from fedstrata.common.host.processes import free_port
from fedstrata.common.settings.tables import write
from fedstrata.deploy.results.run import Run, folders
from tests.helpers.commands import command, fedstrata, invoke
from tests.helpers.kits import wheel_in

pytestmark = pytest.mark.usefixtures("warm")

ROOT: Final = Path(__file__).parents[1]
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS: Final = [
    found.strip() for found in re.findall(r"(?:^    |`)(fedstrata [^`\n#]+)", README, re.MULTILINE)
]
PATIENCE_S: Final = 60
SHORT: Final = ("--set", "rounds=2")
# of a lab that trains nothing: long enough to be seen by a watch on a busy host
ROUNDS: Final = 100
MakeRun = Callable[..., Path]


def words_of(text: str) -> list[str]:
    """Return the words of a command of the README behind `fedstrata`."""
    assert text in COMMANDS, "the README has another one"
    return shlex.split(text)[1:]


def test_each_command_is_tried_here() -> None:
    tried = Path(__file__).read_text(encoding="utf-8")
    partial = {"fedstrata cloud", "fedstrata run demo"}  # as other commands of this page begin
    assert [each for each in COMMANDS if each not in partial and f'"{each}"' not in tried] == []


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_has_the_targets(target: str) -> None:
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout, done.stderr


def test_a_laptop_runs_and_compares_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fedstrata(*words_of("fedstrata run demo --simulate"), *SHORT)
    assert done.returncode == 0, done.stderr
    (first,) = folders(tmp_path / "runs")
    known = first.name.rpartition("-")[2]
    assert f"fedstrata report {known}" in done.stderr + done.stdout, (
        "the id that the first run prints"
    )
    words = words_of("fedstrata run demo --simulate --speeds RUN --set links.wan=lte")
    done = fedstrata(*(known if word == "RUN" else word for word in words), *SHORT)
    assert done.returncode == 0, done.stderr
    quick, slow = sorted(folders(tmp_path / "runs"), key=lambda path: Run(path).seconds)
    assert quick == first and Run(quick).score == Run(slow).score, (
        "the WAN changes the seconds and nothing else"
    )
    speeds = [Run(path).manifest["simulated"]["speeds"] for path in (quick, slow)]
    assert speeds[0] == speeds[1]
    done = invoke(*words_of("fedstrata compare RUN RUN")[:1], quick, slow)
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 3, done.stderr
    assert "other links than" in done.stderr
    done = invoke(*words_of("fedstrata report RUN")[:1], quick)
    assert done.exit_code == 0 and Path(done.stdout.strip()).stat().st_size > 10_000, done.stderr


def test_the_demo_runs_with_a_rule_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = README.partition("# mine.py\n")[2].partition("```")[0]
    short = whole.replace('"}}, mode=', '"}, "rounds": 6}, mode=')
    assert short != whole
    (tmp_path / "mine.py").write_text(short)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and float(done.stdout) > 0.8, done.stderr


def test_a_new_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*words_of("fedstrata new NAME"))
    assert done.exit_code == 0 and (tmp_path / "NAME" / "lab.toml").exists()


def test_a_rack_gets_its_kits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    (tmp_path / "rack.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    wheel_in(tmp_path / "dist")
    done = invoke(*words_of("fedstrata provision rack.toml"))
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in (tmp_path / "kits").iterdir()} >= {
        "server",
        "pi-0",
        "pi-1",
        "gpu-0",
    }


@pytest.mark.slow
def test_a_file_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text(
        'title = "Two"\nbase = "demo"\nexperiment = { rounds = 1, topology = { institutions = 1, '
        "devices = 2 } }\n"
        "axes = { method = { FedAvg = {}, FedAvgM = { cloud = { aggregation = 'fedavgm' } } } }\n"
    )
    done = fedstrata(*words_of("fedstrata sweep FILE"), null=True)
    assert done.returncode == 0 and "FedAvgM" in done.stdout, done.stderr


@pytest.fixture
def started() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Starts processes that end with the test."""
    with ExitStack() as ends:

        def start(words: list[str]) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            ends.callback(process.communicate)
            ends.callback(process.kill)
            return process

        yield start


@pytest.mark.usefixtures("cold")
def test_several_machines_make_a_lab(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: Callable[[list[str]], subprocess.Popen[str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = tomllib.loads(README.partition("```toml\n")[2].partition("```")[0])
    small = {
        "rounds": ROUNDS,
        "topology": {"institutions": 1, "devices": 1},
        "links": {"check": "off"},
    }
    (tmp_path / "my.toml").write_text(write({**tree, **small, "data": {"dataset": "digits"}}))
    port = free_port()

    def words(text: str) -> list[str]:
        return [word.replace("HOST", f"127.0.0.1:{port}") for word in words_of(text)]

    started(command(*words("fedstrata broker --host 0.0.0.0 --insecure"), "--port", str(port)))
    started(
        command(
            *words("fedstrata institution --name institution-0 --broker HOST"), null=True, stay=True
        )
    )
    device = "fedstrata device --name device-0 --parent institution-0 --broker HOST"
    started(command(*words(device), null=True, stay=True))
    watch = started(command(*words("fedstrata watch --broker HOST")))
    assert watch.stdout is not None and "waiting for a run" in watch.stdout.readline()
    cloud = started(command(*words("fedstrata cloud my.toml --broker HOST"), null=True))
    output, _ = cloud.communicate(timeout=PATIENCE_S)
    assert cloud.returncode == 0, output
    (run,) = map(Run, folders(tmp_path / "runs"))
    assert len(run.rounds) == ROUNDS
    seen, _ = watch.communicate(timeout=PATIENCE_S)
    assert watch.returncode == 0 and "institution-0" in seen, seen


@pytest.mark.slow
def test_without_a_network_it_runs_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        [*words_of("fedstrata run demo"), "--direct"],
        words_of("fedstrata run demo --simulate"),
    ):
        done = fedstrata(*words, *SHORT)
        assert done.returncode == 0, done.stderr
    direct, _ = folders(tmp_path / "runs")
    assert Run(direct).direct
    done = fedstrata(*words_of("fedstrata replay RUN")[:1], direct)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "the same model, bit for bit", (
        done.stderr
    )
