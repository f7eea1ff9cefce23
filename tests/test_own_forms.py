"""What own code keeps in its file, in each form of run: a lab of processes, without a network, and
in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Final

import pytest

from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.text import NOTE
from tests.helpers.commands import fedstrata
from tests.simulation.outcome import model_digest

pytestmark = pytest.mark.usefixtures("warm")

RARE: Final = "tests.helpers.rare_models"
FORMS: Final = {"lab": (), "direct": ("--direct",), "simulated": ("--simulate", "--workers", "1")}
Play = Callable[[str, str], CompletedProcess[str]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run a lab with a model of a user's in a form of run, its folder below `tmp_path/FORM`."""

    def run(form: str, model: str) -> CompletedProcess[str]:
        lab = {
            "topology": {"institutions": 1, "devices": 2},
            "model": {"name": f"{RARE}:{model}"},
            "training": {"batch_size": 50, "recorded": True},
            "hardware": {"default": {"step_s": 0.01}},
            "rounds": 2,
        }
        file = tmp_path / "lab.toml"
        file.write_text(to_toml(parse(lab)))
        return fedstrata("run", file, "--runs", tmp_path / form, "--format", "json", *FORMS[form])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lab", "simulated"])
def test_a_file_that_passes_on_what_it_keeps_is_refused_by_name(form: str, play: Play) -> None:
    done = play(form, "GlobalCounter")
    problem = (
        f"model.name = '{RARE}:GlobalCounter': the same training twice gives other models, "
        "and changes"
    )
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("fedstrata: ")]
    assert f"{problem} {RARE}.CALLS. Draw" in error
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_what_a_file_keeps_without_an_effect_is_named_once_and_the_models_are_the_same(
    play: Play, tmp_path: Path
) -> None:
    """Beside it, that the steps of such a model are not recorded."""
    name = f"{RARE}:LateGlobalCounter"
    kept = f"{NOTE}model.name = '{name}': each training changes {RARE}.CALLS, which"
    asked = f"{NOTE}training.recorded = true: {name} is not recorded, as code keeps something"
    for form in FORMS:
        done = play(form, "LateGlobalCounter")
        assert done.returncode == 0, done.stderr
        notes = [line for line in done.stderr.splitlines() if NOTE in line]
        assert [sum(text in line for line in notes) for text in (kept, asked)] == [1, 1], notes
        assert len(notes) == 2, notes
    assert len({model_digest(tmp_path / form) for form in FORMS} - {""}) == 1
