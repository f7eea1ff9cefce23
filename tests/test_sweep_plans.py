"""The plan of a sweep: its sums, and what is predicted once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.experiment.schema import Experiment
from deploy.planning.predicting import Predictor
from deploy.sweeps import planning
from deploy.sweeps.grid import expand
from tests.helpers.commands import invoke

TREE: dict[str, Any] = {
    "title": "Two models on two splits",
    "seeds": 3,
    "experiment": {"rounds": 10, "data": {"dataset": "digits"}},
    "axes": {
        "model.name": ["mlp_digits", "cnn_digits"],
        "data.partition": ["iid", "dirichlet"],
    },
    "where": [{"model.name": "cnn_digits", "data.partition": "iid", "experiment": {"rounds": 5}}],
}
SECONDS = {"mlp_digits": 1.0, "cnn_digits": 4.0}


def predicted(experiment: Experiment, **_: Any) -> dict[str, Any]:
    second = SECONDS[experiment.model.name]
    memory = {"device": int(second * 1e8), "cloud": 1000}
    return {"global_round_s": second, "tiers": {"wan_up": 100.0 * second}, "memory": memory, "assumed": ["as ever"]}


def test_runs_of_equal_cost_are_predicted_once_and_all_are_summed() -> None:
    seen: list[Experiment] = []

    def predict(experiment: Experiment) -> dict[str, Any]:
        seen.append(experiment)
        return predicted(experiment)

    grid = expand(TREE, Path("t.toml"))
    begun: list[str] = []
    planned = planning.plan_of(planning.groups_of(grid), predict, begun.append)
    assert begun == [f"predicts 6 runs like {model}, iid, seed 1" for model in ("mlp_digits", "cnn_digits")]
    assert [one.model.name for one in seen] == ["mlp_digits", "cnn_digits"]
    found = planning.to_json(grid, planned, jobs=2)
    rounds = {"mlp_digits": 3 * 2 * 10, "cnn_digits": 3 * (10 + 5)}
    assert found["run_s"] == pytest.approx(sum(SECONDS[name] * count for name, count in rounds.items()))
    assert found["total_s"] == pytest.approx(found["run_s"] / 2)
    assert found["bytes"] == {"wan_up": pytest.approx(100 * found["run_s"])}
    assert found["memory"] == {"device": 400_000_000, "cloud": 1000} and found["assumed"] == ["as ever"]
    assert [(group["runs"], group["global_rounds"]) for group in found["groups"]] == [(6, 60), (6, 45)]
    assert planning.to_json(grid, planned, jobs=100)["total_s"] == pytest.approx(40.0)  # the longest run


def test_plan_takes_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "predict", lambda self, experiment, **_: predicted(experiment))
    found = invoke("plan", "study/two", "--one-host", "--only", "method=FedAvg", "--seeds", "2", "--format", "json")
    assert found.exit_code == 0, found.stderr
    assert found.stderr.startswith("predicts 8 runs like ") and found.stderr.count("\n") == 1
    plan = json.loads(found.stdout)
    assert plan["runs"] == 2 * 2 * 2 and plan["total_s"] == pytest.approx(8 * 300 * 1.0) and plan["jobs"] == 1
    text = invoke("plan", "study/two", "--one-host", "--only", "method=FedAvg", "--out", tmp_path / "plan.json")
    assert "20 runs   1.67 h" in text.stdout and "  wan up         600.0 kB" in text.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["runs"] == 20


def test_an_experiment_has_no_cells() -> None:
    refused = invoke("plan", "demo", "--seeds", "2")
    assert refused.exit_code == 2 and "valid only for a sweep" in refused.stderr
    refused = invoke("run", "study/two")
    assert refused.exit_code == 4 and "a sweep of several runs. Use `fedstrata sweep`." in refused.stderr
