"""`fedstrata export`: what trackers get of a run's folder, afterwards and while it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from tensorboardX.proto.event_pb2 import Event

from fedstrata.cloud.records import GlobalRoundRecord
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import read
from fedstrata.deploy.console import reporting
from fedstrata.deploy.results.run import Run, State
from fedstrata.deploy.results.trackers import TensorBoardTracker, began_s, complete, series
from tests.helpers.commands import DEMO, PATIENCE_S, command, invoke, sets

pytestmark = pytest.mark.usefixtures("warm")

LAB: Final = (
    "topology.institutions=1",
    "topology.devices=2",
    "rounds=3",
    "model.name='mlp_digits'",
    "training.batch_size=100",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), read(DEMO, LAB))


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return the (step, value, wall time) of each series in a folder's event file."""
    (path,) = folder.glob("events.out.tfevents.*")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for event in _events(path.read_bytes()):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append(
                    (event.step, value.simple_value, event.wall_time)
                )
    return found


def _events(data: bytes) -> Iterator[Event]:
    """Yield the records of an event file: length, its checksum, the event, its checksum."""
    place = 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 8], "little")
        yield Event.FromString(data[place + 12 : place + 12 + length])
        place += 16 + length


def test_a_global_round_is_named_numbers_without_what_is_not_known() -> None:
    row = GlobalRoundRecord(
        global_round=2,
        elapsed_s=3.5,
        accuracy=0.5,
        train_loss=1.25,
        phases={"train": 1.0, "wait": 0.5},
        sgd_steps=9,
        path_steps=3,
        bytes_={"wan_up_bytes": 10, "lan_down_bytes": 20},
        missing=("a", "b"),
        refused=(),
        epochs={"a": 2, "b": None},
        omega={"a": 0.75},
        spread={"cloud": None},
    )
    assert series(row) == {
        "model/accuracy": 0.5,
        "model/train_loss": 1.25,
        "seconds/elapsed": 3.5,
        "seconds/global_round": 1.5,
        "seconds/train": 1.0,
        "seconds/wait": 0.5,
        "bytes/wan_up": 10,
        "bytes/lan_down": 20,
        "work/sgd_steps": 9,
        "work/path_steps": 3,
        "work/missing": 2,
        "work/refused": 0,
        "epochs/a": 2,
        "omega/a": 0.75,
    }


def test_a_running_run_gives_the_rounds_that_were_evaluated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(folder)
    assert [row.global_round for row in complete(run)] == [1, 2, 3]
    rows = list(run.rounds)
    blank = {field: getattr(rows[2], field) for field in GlobalRoundRecord.__dataclass_fields__}
    late = Run(folder)
    monkeypatch.setitem(late.__dict__, "state", State.RUNNING)
    monkeypatch.setitem(
        late.__dict__, "rounds", [*rows[:2], GlobalRoundRecord(**{**blank, "accuracy": None})]
    )
    assert [row.global_round for row in complete(late)] == [1, 2]
    monkeypatch.setitem(late.__dict__, "rounds", [])
    assert complete(late) == []


def test_tensorboard_gets_each_number_at_its_time_and_once(folder: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second time it is replaced
        done = invoke("export", folder, "--tensorboard", tmp_path)
        assert done.exit_code == 0 and f"{tmp_path / folder.name}" in done.stdout
    run, found = Run(folder), scalars(tmp_path / folder.name)
    assert found.keys() == set().union(*(series(row) for row in run.rounds))
    for name, points in found.items():
        wanted = [
            (row.global_round, series(row)[name], began_s(run) + row.elapsed_s)
            for row in run.rounds
        ]
        assert [step for step, *_ in points] == [step for step, *_ in wanted]
        assert [value for _, value, _ in points] == pytest.approx(
            [value for _, value, _ in wanted], rel=1e-6
        )
        assert [at for *_, at in points] == pytest.approx([at for *_, at in wanted], abs=1e-3)
    (path,) = (tmp_path / folder.name).iterdir()
    assert b"mlp_digits" in path.read_bytes()  # the experiment


def test_several_runs_are_exported_one_after_another(folder: Path, tmp_path: Path) -> None:
    paths = [shutil.copytree(folder, tmp_path / "runs" / name) for name in ("first", "second")]
    (tmp_path / "runs" / "sweep.lock").touch()
    done = invoke(
        "export", *sorted((tmp_path / "runs").iterdir()), "--tensorboard", tmp_path / "boards"
    )
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 2
    for path in paths:
        assert len(scalars(tmp_path / "boards" / path.name)["model/accuracy"]) == 3


def test_a_folder_of_other_files_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / folder.name).mkdir()
    (tmp_path / folder.name / "thesis.tex").write_text("years")
    done = invoke("export", folder, "--tensorboard", tmp_path)
    assert done.exit_code == InvalidExperiment.exit_code and "has thesis.tex" in done.stderr
    assert (tmp_path / folder.name / "thesis.tex").read_text() == "years"


@pytest.mark.slow
def test_wandb_gets_a_run_that_can_be_synchronised(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command("export", folder, "--wandb", tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "WANDB_MODE": "offline"},
    )
    assert done.returncode == 0 and "wandb sync" in done.stdout and not done.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    data, run = path.read_bytes(), Run(folder)
    assert path.name == f"run-{run.id}.wandb"
    assert all(data.count(name.encode()) >= 3 for name in series(run.rounds[0]))


def test_a_missing_extra_and_no_tracker_are_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(self: object, run: Run, where: str) -> None:
        raise ModuleNotFoundError("No module named 'tensorboardX'", name="tensorboardX")

    monkeypatch.setattr(TensorBoardTracker, "__init__", absent)
    done = invoke("export", folder, "--tensorboard", "boards")
    assert done.exit_code == 4 and "pip install 'fedstrata[tensorboard]'" in done.stderr
    done = invoke("export", folder)
    assert done.exit_code == 4 and "Give --tensorboard or --wandb." in done.stderr
    assert {"tensorboardX", "wandb"} <= reporting.EXTRAS.keys()


@pytest.mark.slow
def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    environment: Mapping[str, str] = {**os.environ, "FEDSTRATA_RUNS": str(tmp_path / "runs")}
    lab = subprocess.Popen(
        command("run", DEMO, *sets(*LAB, "rounds=12")), env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := list((tmp_path / "runs").glob("*/rounds.csv"))):
            assert lab.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        done = subprocess.run(
            command("export", found[0].parent, "--tensorboard", tmp_path / "boards", "--follow"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0 and done.stdout.startswith("12 global rounds of a finished run")
        assert lab.wait(PATIENCE_S) == 0
    finally:
        lab.kill()
    points = scalars(tmp_path / "boards" / found[0].parent.name)["model/accuracy"]
    assert [step for step, *_ in points] == list(range(1, 13))
