"""The command `fedstrata` as tests use it, and what its runs leave."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import typer
from typer.testing import CliRunner, Result

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.processes import bound
from fedstrata.deploy.cli.main import app
from tests.helpers.forked import forked
from tests.helpers.null_lab import MODEL_BYTES
from tests.simulation.lab import ScenarioLab

EXPERIMENTS: Final = Path(__file__).parents[2] / "deploy" / "experiments"
DEMO: Final = EXPERIMENTS / "demo.toml"
NULL_LAB: Final = Path(__file__).with_name("null_lab.py")
PATIENCE_S: Final = 180  # one of four labs beside one another on two cores took 90 s


@cache
def _tree() -> Any:
    return typer.main.get_command(app)


def invoke(
    *arguments: str | Path, env: Mapping[str, str] | None = None, answers: str = ""
) -> Result:
    """Run a command in this process, for one that starts no role; `answers` are lines of standard
    input.
    """
    # else each call builds all commands: 20 ms
    with patch("typer.testing._get_command", lambda _: _tree()):
        return CliRunner().invoke(
            app, [str(argument) for argument in arguments], env=env, input=answers or None
        )


def command(*arguments: str | Path, null: bool = False, stay: bool = False) -> list[str]:
    """Return a command for a process of its own; with `null`, one whose roles compute nothing
    (`null_lab`).

    Without `stay` a node ends with its first run, and a cloud does not ask for a second whether the
    lab is free. The process ends with that of the test, whatever ends it.
    """
    flags = {"institution": ["--once"], "device": ["--once"], "cloud": ["--sole"]}
    role = next((str(argument) for argument in arguments if argument in flags), "")
    once = flags[role] if role and not stay else []
    words = [*map(str, arguments), *once]
    return (
        [sys.executable, str(NULL_LAB), *words]
        if null
        else bound([sys.executable, "-m", "fedstrata", *words])
    )


def fedstrata(
    *arguments: str | Path, null: bool = False, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own to its end."""
    return subprocess.run(
        command(*arguments, null=null),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **(env or {})},
    )


def sets(*pairs: str) -> list[str]:
    """Return the options that override these keys."""
    return [word for pair in pairs for word in ("--set", pair)]


def run_lab(
    experiment: Path,
    runs: Path,
    *pairs: str,
    flags: Sequence[str] = (),
    null: bool = False,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Run a whole lab by `fedstrata run`, `pairs` overriding keys, and return the run's folder."""
    words: list[str | Path] = ["run", experiment, "--runs", runs, "--format", "json"]
    words += [*sets(*pairs), *flags]
    done = forked(*words) if "--direct" in flags else fedstrata(*words, null=null, env=env)
    assert done.returncode == 0, done.stderr
    return folder_in(done.stdout)


def folder_in(output: str) -> Path:
    """Return the run's folder from the output of `--format json`."""
    events = [json.loads(line) for line in output.splitlines()]
    return Path(next(event["folder"] for event in events if event["event"] == "run"))


def tensors(folder: Path) -> bytes:
    """Return the bytes of the model that a run left, without the header, which has the run's id."""
    data = (folder / "model.safetensors").read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def null_model(experiment: Experiment) -> str:
    """Return `model_digest` of a lab that computes nothing, from the same lab in virtual time."""
    outcome = ScenarioLab(experiment, model_bytes=MODEL_BYTES).run()
    assert outcome.ok, outcome.result
    return outcome.digest


def table(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
