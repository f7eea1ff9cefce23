"""`make bench NAME=gpu` goes on: after a row that fails, one that ends its process, and after it
was killed itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MEASURES = """
import os, signal
from pathlib import Path

HOME = Path(__file__).parent
setting_of = lambda accelerator: accelerator or "cpu"
machine = lambda setting: {"accelerator": setting, "gpu": (HOME / "gpu").read_text()}


def measured(name):
    with (HOME / "measured").open("a") as file:
        print(name, file=file)
    return {"value": 1.5}


def fail():
    if not (HOME / "repaired").exists():
        raise ValueError("no memory |\\nor so")
    return measured("failing")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def wait():
    if not (HOME / "repaired").exists():
        print("waits in", os.getpid(), flush=True)
        signal.pause()
    return measured("waiting")


def rows(*names):
    work = {"failing": fail, "killing": kill, "waiting": wait}
    return lambda setting: ((name, work.get(name, lambda name=name: measured(name))) for name in names)


PARTS = {"models": rows("one", "failing", "killing", "last"), "vmapped": rows("two"), "lab": rows("three", "waiting")}
"""


def words(home: Path, *parts: str, gpu: str = "none") -> list[str]:
    (home / "measures.py").write_text(MEASURES)
    (home / "gpu").write_text(gpu)
    chosen = [word for part in parts for word in ("--part", part)]
    script = ROOT / "tests" / "bench" / "gpu.py"
    return [
        sys.executable,
        str(script),
        "--measures",
        "measures",
        "--results",
        str(home / "results.json"),
        *chosen,
    ]


def run(home: Path, *parts: str, gpu: str = "none") -> subprocess.CompletedProcess[str]:
    line = words(home, *parts, gpu=gpu)
    return subprocess.run(
        line, capture_output=True, text=True, timeout=90, check=False, env=environment(home)
    )


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(home), str(ROOT)))}


def rows_of(home: Path, part: str) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((home / "results.json").read_text())["parts"][part]["rows"]
    return rows


def test_rows_that_fail_are_recorded_and_tried_again(tmp_path: Path) -> None:
    done = run(tmp_path, "models", "vmapped")
    assert done.returncode == 1
    assert rows_of(tmp_path, "models") == {
        "one": {"value": 1.5},
        "failing": {"error": "ValueError: no memory | or so"},
        "killing": {"error": "the process was killed by SIGKILL"},
        "last": {"value": 1.5},
    }
    assert (
        "2 failed" in done.stdout
        and "No GPU" in done.stdout
        and "on a GPU this would be a step" in done.stdout
    )
    page = (tmp_path / "results.md").read_text()
    assert "| failing |  | ValueError: no memory / or so |" in page and "| two | 1.5 |" in page
    (tmp_path / "repaired").touch()
    again = run(tmp_path, "models", "vmapped")
    assert again.returncode == 1 and "vmapped: finished before" in again.stdout
    assert rows_of(tmp_path, "models")["failing"] == {"value": 1.5}
    assert (tmp_path / "measured").read_text().split() == ["one", "last", "two", "failing"]


def test_after_a_kill_it_goes_on_with_the_row_under_way(tmp_path: Path) -> None:
    line, env = words(tmp_path, "lab"), environment(tmp_path)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env) as first:
        assert first.stdout is not None
        waits = next(line for line in first.stdout if line.startswith("waits in"))
        first.kill()
        os.kill(int(waits.split()[-1]), signal.SIGKILL)
    assert rows_of(tmp_path, "lab") == {"three": {"value": 1.5}}
    (tmp_path / "repaired").touch()
    assert run(tmp_path, "lab").returncode == 0
    assert (tmp_path / "measured").read_text().split() == ["three", "waiting"]


def test_figures_of_two_machines_are_not_mixed(tmp_path: Path) -> None:
    assert run(tmp_path, "vmapped").returncode == 0
    done = run(tmp_path, "lab", gpu="another")
    assert done.returncode == 1 and "is of another machine" in done.stdout
    assert not rows_of(tmp_path, "lab")
