"""What a killed lab of processes leaves on its disks: cut, or with a flipped bit, it is found out
before it is used.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fedstrata.common.errors import UNEXPECTED
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.host.files import PARTIAL
from tests.helpers.commands import command, fedstrata, folder_in, tensors
from tests.helpers.examples import PROFILE

pytestmark = pytest.mark.usefixtures("warm")

FEEDBACK: Final = {"name": "topk", "share": 0.25, "feedback": True}
LAB: Final[dict[str, Any]] = {
    "rounds": 4,
    "topology": {"institutions": 2, "devices": 4},
    "cloud": {"aggregation": "fedavgm", "checkpoint_every": 1},
    "institution": {"rounds": 2, "aggregation": "fedavgm"},
    "transfer": {"wan": {"up": FEEDBACK}, "lan": {"up": FEEDBACK}},
    "stop": {"best": True},
}
KILLED: Final = 3  # the global round after which the lab was killed
# the folders of runs with the institutions' states, and of the devices' states
RUNS, KEPT = "runs", "kept"
FILES: Final = {  # all that it left, and whether its damage may end the run
    "runs/*/experiment.toml": True,
    "runs/*/manifest.json": True,
    "runs/*/ledger.json": True,
    "runs/*/rounds.csv": True,
    "runs/*/devices.csv": True,
    "runs/*/links.csv": False,
    "runs/*/events.jsonl": False,
    "runs/*/checkpoints/round-*.safetensors": False,
    "runs/*/checkpoints/round-*/facts.json": False,
    "runs/*/checkpoints/round-*/momentum": False,
    "runs/*/checkpoints/best-*": False,
    "runs/.spool/*/states/*/facts.json": True,
    "runs/.spool/*/states/*/left-out": True,
    "runs/.spool/*/states/*/momentum": True,
    "runs/.spool/*/uploads": False,
    "runs/.spool/*/samples": False,
    "kept/*/states/*/facts.json": True,
    "kept/*/states/*/vectors": True,
}


def environment(home: Path) -> dict[str, str]:
    return {"NULL_LAB_BYTES": "4000", "NULL_LAB_SPOOL": str(home / KEPT)}


def unlocked(paths: Iterable[Path]) -> None:
    """Return when no process holds these files or folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    """The model of a lab, and the home of the same one that was killed."""
    home = tmp_path_factory.mktemp("killed")
    file = home / "lab.toml"
    file.write_text(to_toml(parse(LAB)))
    words = ("run", file, "--runs", home / RUNS, "--format", "json")
    env = {**os.environ, **environment(home)}
    with subprocess.Popen(
        command(*words, null=True), stdout=subprocess.PIPE, env=env, text=True
    ) as lab:
        assert lab.stdout is not None
        for line in lab.stdout:
            event = json.loads(line)
            if event["event"] == "global_round" and event["global_round"] == KILLED:
                lab.kill()
    unlocked(
        [
            *home.glob(f"{RUNS}/*/experiment.toml"),
            *home.glob(f"{RUNS}/.spool/*"),
            *home.glob(f"{KEPT}/*"),
        ]
    )
    whole = tmp_path_factory.mktemp("whole")
    done = fedstrata(
        "run", file, "--runs", whole / RUNS, "--format", "json", null=True, env=environment(whole)
    )
    assert done.returncode == 0, done.stderr
    return tensors(folder_in(done.stdout)), home


def files_of(home: Path, pattern: str) -> list[Path]:
    return sorted(
        path for path in home.rglob("*") if fnmatchcase(str(path.relative_to(home)), pattern)
    )


def resumed(home: Path) -> subprocess.CompletedProcess[str]:
    (run,) = (path for path in (home / RUNS).iterdir() if not path.name.startswith("."))
    return fedstrata("run", "--resume", run, "--format", "json", null=True, env=environment(home))


@pytest.mark.slow
def test_each_file_of_a_lab_is_damaged_below(killed: tuple[bytes, Path]) -> None:
    _, home = killed
    for top in (RUNS, KEPT):
        for path in (home / top).rglob("*"):
            name = str(path.relative_to(home))
            # which a kill leaves in the midst of writing
            known = path.is_dir() or name.endswith(PARTIAL)
            assert known or any(fnmatchcase(name, pattern) for pattern in FILES), name
    for pattern in FILES:
        assert files_of(home, pattern), pattern


def damaged(content: bytes, how: str, draw: np.random.Generator) -> bytes:
    """Return the content cut at a drawn tenth, or with a drawn bit flipped."""
    if how == "cut":
        return content[: len(content) * int(draw.integers(10)) // 10]
    changed = bytearray(content)
    place = int(draw.integers(8 * len(content)))
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


HARMLESS: Final = [pattern for pattern, ends in FILES.items() if not ends]  # at once
ENDING: Final = [  # one of each role; `test_damage` damages the others in virtual time
    pattern
    for pattern, ends in FILES.items()
    if ends and (PROFILE == "thorough" or pattern.endswith(("ledger.json", "left-out", "vectors")))
]


HOWS: Final = ("cut", "flipped")  # both in the thorough profile, else by turns
CASES: Final = [
    pytest.param(patterns, how, id=f"{patterns[-1]}-{how}")
    for place, patterns in enumerate([HARMLESS, *([pattern] for pattern in ENDING)])
    for how in HOWS
    if PROFILE == "thorough" or how == HOWS[place % 2]
]


@pytest.mark.slow
@pytest.mark.parametrize(("patterns", "how"), CASES)
def test_a_damaged_file_gives_the_same_model_or_one_line(
    patterns: list[str], how: str, killed: tuple[bytes, Path], tmp_path: Path
) -> None:
    """The newest file of a kind is damaged; of states, which a resumed run may go back to, all of
    one node.
    """
    whole, left = killed
    home = tmp_path / "home"
    shutil.copytree(left, home)
    for pattern in patterns:
        *_, file = files_of(home, pattern)
        files = [file]
        if "/states/" in pattern:
            files = sorted(file.parents[1].glob(f"*/{file.name}"))
        draw = np.random.default_rng(len(files))
        for each in files:
            each.write_bytes(damaged(each.read_bytes(), how, draw))
    done = resumed(home)
    assert "Traceback" not in done.stderr and UNEXPECTED not in done.stderr, done.stderr
    if done.returncode == 0:
        assert tensors(folder_in(done.stdout)) == whole
    else:
        (error,) = (line for line in done.stderr.splitlines() if file.name in line)
        assert patterns != HARMLESS and done.returncode in (1, 4, 6), error
