"""Runs from Python: loaded, started, awaited; and the notebook of the documentation."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from cloud.records import GlobalRoundRecord
from common.errors import InvalidExperiment, RunFailed
from deploy.results import load, start
from deploy.results.starting import _toml
from tests.helpers.commands import PATIENCE_S
from tests.helpers.records import a_global_round

NOTEBOOK: Final = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
SMALL: Final = {
    "rounds": 2, "topology": {"institutions": 1, "devices": 2}, "model.name": "mlp_digits", "training.batch_size": 100,
}  # fmt: skip


def test_a_run_is_started_awaited_and_loaded_and_its_tables_are_data_frames(tmp_path: Path) -> None:
    seen: list[tuple[str, Mapping[str, Any]]] = []
    changes = {**SMALL, "institution.aggregation": {"name": "fedavg", "weights": "uniform"}}
    lab = start("demo", changes, runs=tmp_path, direct=True, observe=lambda *event: seen.append(event))
    run = asyncio.run(_awaited(lab))
    assert run.path == lab.folder and run.state == "finished" and len(run.rounds) == 2
    assert run.tree["institution"]["aggregation"]["weights"] == "uniform"
    assert load(run.id, runs=tmp_path).path == run.path and load(run.path).id == run.id
    events = dict(seen)
    later = {"accuracy": None, "loss": None}  # evaluated beside the next global round
    for column, value in (run.rounds[1].values() | later).items():
        shown = events["global_round"][column]
        assert shown == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), column
    assert events["finished"]["accuracy"] == pytest.approx(run.accuracy, rel=1e-5)
    rounds, links, devices = (run.frame(table) for table in ("rounds", "links", "devices"))
    assert rounds["global_round"].tolist() == [1, 2] and rounds["accuracy"].dtype == float
    assert rounds["elapsed_s"].is_monotonic_increasing and rounds["missing"].tolist() == [[], []]
    assert links.groupby("kind")["payload_bytes"].sum()["model"] == sum(run.totals.values())
    assert devices["sgd_steps"].sum() == rounds["sgd_steps"].sum()


async def _awaited(lab: Any) -> Any:
    return await lab


def test_what_fails_and_what_is_refused_has_the_commands_line(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"model\.name = 'cnn_digts'.*Did you mean 'cnn_digits'\?.*\(exit code 4\)"):
        start("demo", {"model.name": "cnn_digts"}, runs=tmp_path, direct=True).wait()
    with pytest.raises(InvalidExperiment, match="rounds = 0"):
        start({"rounds": 0}, runs=tmp_path)
    with pytest.raises(InvalidExperiment, match=r"seed = .*no value of an experiment"):
        start("demo", {"seed": object()}, runs=tmp_path)
    with pytest.raises(InvalidExperiment, match="no run id has this prefix"):
        load("nothing", runs=tmp_path)


@pytest.mark.slow
def test_a_run_is_interrupted(tmp_path: Path) -> None:
    begun = threading.Event()
    lab = start("demo", {"rounds": 10_000}, runs=tmp_path, direct=True, observe=lambda *_: begun.set())
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
        global_round=1, elapsed_s=1.0, train_loss=math.inf, phases=row.phases, sgd_steps=1, path_steps=1, bytes_={},
        missing=("a",), refused=(), epochs={"a": None}, omega={"a": math.nan}, spread={},
    ).values()  # fmt: skip
    assert short["train_loss"] is None and short["omega_a"] is None and short["missing"] == ["a"]
    assert short["accuracy"] is None and short["epochs_a"] is None


@pytest.mark.slow
def test_the_notebook_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}

    async def play() -> None:
        for number, cell in enumerate(cells):
            code = compile("".join(cell["source"]), f"cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            outcome = eval(code, names)
            if inspect.isawaitable(outcome):
                await outcome

    asyncio.run(play())
    assert len(names["runs"]) == 2 and names["table"].index.tolist() == ["fedavg", "fedcross"]
    assert (names["table"]["accuracy"] > 0.5).all()
