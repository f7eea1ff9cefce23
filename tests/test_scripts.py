"""Runs from Python: loaded, started, awaited; and the notebook of the documentation."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fedstrata import compare, load, run, start, sweep
from fedstrata.cloud.records import GlobalRoundRecord
from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.deploy.scripts import _toml
from tests.helpers.commands import PATIENCE_S
from tests.helpers.mnist import idx
from tests.helpers.records import a_global_round

pytestmark = pytest.mark.usefixtures("warm")

NOTEBOOK: Final = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
LAST_CELL: Final = """
import json

print(json.dumps({
    "reached": [group["reached"] for group in groups],
    "scores": [run.score for run in runs.values()],
    "losses": [run.frame("rounds")["loss"].iloc[-1] for run in runs.values()],
    "right": float((found == tests.targets).float().mean()),
    "figures": pyplot.get_fignums(),
}))
"""
SMALL: Final = {
    "rounds": 2,
    "topology": {"institutions": 1, "devices": 2},
    "model.name": "mlp_digits",
    "training.batch_size": 100,
}


def test_a_run_is_started_awaited_and_loaded_and_its_tables_are_data_frames(tmp_path: Path) -> None:
    seen: list[tuple[str, Mapping[str, Any]]] = []
    changes = {**SMALL, "institution.aggregation": {"name": "fedavg", "weights": "uniform"}}
    lab = start(
        "demo", changes, runs=tmp_path, mode="direct", observe=lambda *event: seen.append(event)
    )
    run = asyncio.run(_awaited(lab))
    assert run.path == lab.folder and run.state == "finished" and len(run.rounds) == 2
    assert run.tree["institution"]["aggregation"]["weights"] == "uniform"
    assert load(run.id, runs=tmp_path).path == run.path and load(run.path).id == run.id
    events = dict(seen)
    later = {"accuracy": None, "loss": None}  # evaluated beside the next global round
    for column, value in (run.rounds[1].values() | later).items():
        shown = events["global_round"][column]
        assert shown == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), (
            column
        )
    assert events["finished"]["accuracy"] == pytest.approx(run.accuracy, rel=1e-5)
    rounds, links, devices = (run.frame(table) for table in ("rounds", "links", "devices"))
    assert rounds["global_round"].tolist() == [1, 2] and rounds["accuracy"].dtype == float
    assert rounds["elapsed_s"].is_monotonic_increasing and rounds["missing"].tolist() == [[], []]
    assert links.groupby("kind")["payload_bytes"].sum()["model"] == sum(run.totals.values())
    assert devices["sgd_steps"].sum() == rounds["sgd_steps"].sum()


def test_an_experiment_is_run_with_a_progress_bar_in_each_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    direct = run("demo", SMALL, mode="direct", runs=tmp_path)
    simulated = run("demo", SMALL, mode="simulate", runs=tmp_path)
    assert direct.state == simulated.state == "finished" and len(direct.rounds) == 2
    assert direct.model().keys() == simulated.model().keys()
    assert all(
        np.array_equal(array, simulated.model()[name]) for name, array in direct.model().items()
    )
    assert capsys.readouterr().err.count("2/2") >= 2
    with pytest.raises(ValueError, match="mode = 'netns': there are lab, direct, simulate"):
        run("demo", mode="netns", runs=tmp_path)  # type: ignore[arg-type]


def test_a_sweep_gives_its_runs_by_cell_and_they_are_compared(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        """title = "two"
[experiment]
rounds = 2
topology = { institutions = 1, devices = 2 }
model = { name = "mlp_digits" }
[axes.rule]
FedAvg = { cloud = { aggregation = "fedavg" } }
FedAvgM = { cloud = { aggregation = "fedavgm" } }
"""
    )
    cells = sweep(tmp_path / "two.toml", {"training.batch_size": 100}, seeds=2, runs=tmp_path)
    assert {name: [each.seed for each in runs] for name, runs in cells.items()} == {
        "FedAvg": [1, 2],
        "FedAvgM": [1, 2],
    }
    again = sweep(
        tmp_path / "two.toml",
        {"training.batch_size": 100},
        seeds=2,
        only={"rule": "FedAvg"},
        runs=tmp_path,
    )
    assert [each.path for each in again["FedAvg"]] == [each.path for each in cells["FedAvg"]]
    compared = compare([each for runs in cells.values() for each in runs])
    assert [group["label"] for group in compared["groups"]] == ["FedAvg", "FedAvgM"]
    with pytest.raises(RunFailed, match="is not finished"):
        sweep(
            tmp_path / "two.toml",
            {"data.root": str(tmp_path), "data.dataset": "mnist"},
            seeds=1,
            runs=tmp_path,
        )


async def _awaited(lab: Any) -> Any:
    return await lab


def test_what_fails_and_what_is_refused_has_the_commands_line(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed, match=r"model\.name = 'cnn_digts'.*Did you mean 'cnn_digits'\?.*\(exit code 4\)"
    ):
        start("demo", {"model.name": "cnn_digts"}, runs=tmp_path, mode="direct").wait()
    with pytest.raises(InvalidExperiment, match="rounds = 0"):
        start({"rounds": 0}, runs=tmp_path)
    with pytest.raises(InvalidExperiment, match=r"seed = .*no value of an experiment"):
        start("demo", {"seed": object()}, runs=tmp_path)
    with pytest.raises(InvalidExperiment, match="no run id has this prefix"):
        load("nothing", runs=tmp_path)


@pytest.mark.slow
def test_a_run_is_interrupted(tmp_path: Path) -> None:
    begun = threading.Event()
    lab = start(
        "demo", {"rounds": 10_000}, runs=tmp_path, mode="direct", observe=lambda *_: begun.set()
    )
    with pytest.raises(TimeoutError, match=r"not finished after 0\.1 s"):
        lab.wait(0.1)
    assert begun.wait(PATIENCE_S)
    lab.stop()
    with pytest.raises(RunFailed, match="exit code 130"):
        lab.wait()
    lab.stop()  # of one that has ended: nothing


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (True, "true"),
        ("a'b", '"a\'b"'),
        ("\N{GRINNING FACE}", '"\N{GRINNING FACE}"'),  # TOML has no surrogates
        ([1, "x"], '[1, "x"]'),
        ({"a": {"b": [0.5]}}, '{"a" = {"b" = [0.5]}}'),
    ],
)
def test_values_are_written_as_toml(value: Any, text: str) -> None:
    assert _toml("key", value) == text


def test_a_row_has_numbers_lists_and_nulls() -> None:
    row = a_global_round(1, accuracy=0.5)
    values = row.values()
    assert values.keys() == set(row.columns())
    assert json.loads(json.dumps(values)) == values
    short = GlobalRoundRecord(
        global_round=1,
        elapsed_s=1.0,
        train_loss=math.inf,
        phases=row.phases,
        sgd_steps=1,
        path_steps=1,
        bytes_={},
        missing=("a",),
        refused=(),
        epochs={"a": None},
        omega={"a": math.nan},
        spread={},
    ).values()
    assert short["train_loss"] is None and short["omega_a"] is None and short["missing"] == ["a"]
    assert short["accuracy"] is None and short["epochs_a"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_of_the_documentation_runs_as_it_is(tmp_path: Path) -> None:
    _write_clothes(tmp_path / "data" / "FashionMNIST" / "raw")
    script = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if source.startswith("%%writefile "):
            first, _, text = source.partition("\n")
            (tmp_path / first.split()[1]).write_text(text, encoding="utf-8")
        elif cell["cell_type"] == "code":
            script.append(source)
    (tmp_path / "notebook.py").write_text("\n".join([*script, LAST_CELL]), encoding="utf-8")
    path = os.pathsep.join((str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "agg"}
    words = [sys.executable, "notebook.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["reached"] == [1, 1] and facts["right"] == pytest.approx(
        facts["scores"][1], abs=1e-6
    )
    assert min(facts["scores"]) > 0.75 and facts["losses"][0] != facts["losses"][1]
    assert facts["figures"] == [1, 2]


def _write_clothes(raw: Path) -> None:
    """Write images of Fashion-MNIST's form: noise, and a bright bar whose height is the class."""
    raw.mkdir(parents=True)
    draw = np.random.default_rng(1)
    for part, count in (("train", 600), ("t10k", 100)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = draw.integers(0, 100, (count, 28, 28), np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 2 : 2 * label + 6] += 120
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
