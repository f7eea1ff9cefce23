"""Runs compared without a target: finals, bests, costs, and differences seed by seed with their
interval.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstrata.common.experiment.reading import load
from fedstrata.deploy.console.shipped import shipped
from fedstrata.deploy.results.pairs import Pairs, quantile
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.series import series_of
from fedstrata.deploy.results.whole import best_score, quantities
from tests.helpers.commands import invoke

MakeRun = Callable[..., Path]
TEMPO = {"cloud": {"epoch_control": {"name": "tempo"}}}
SCORES = {  # of both series by seed
    1: ((0.5, 0.8, 0.7), (0.4, 0.9, 0.9)),
    2: ((0.6, 0.7, 0.8), (0.5, 0.8, 0.8)),
    3: ((0.1, 0.2, 0.6), (0.3, 0.9, 0.7)),
}


@pytest.fixture
def paths(tmp_path: Path, make_run: MakeRun) -> list[Path]:
    return [
        make_run(tmp_path, {"seed": seed, **tree}, accuracies=scores[place])
        for place, tree in enumerate(({}, TEMPO))
        for seed, scores in SCORES.items()
    ]


def test_two_runs_of_the_demo_are_compared_without_a_target(
    tmp_path: Path, make_run: MakeRun
) -> None:
    demo = load(shipped()["demo"], ())
    slow = load(shipped()["demo"], ["links.wan=lte"])
    runs = [
        make_run(tmp_path, one.model_dump(mode="json", exclude_none=True)) for one in (demo, slow)
    ]
    done = invoke("compare", *runs)
    assert done.exit_code == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert len(rows) == 2 and "test accuracy, %" in head and "difference, paired" in head
    assert done.stderr.startswith(
        "no target: whole runs are compared. --target gives the costs of reaching a score\n"
    )


def test_numbers_are_those_of_numpy(paths: list[Path]) -> None:
    finals, bests = (
        np.array([[100 * choose(scores[place]) for scores in SCORES.values()] for place in (0, 1)])
        for choose in (lambda scores: scores[-1], max)
    )
    rows = list(csv.DictReader(io.StringIO(invoke("compare", *paths, "--format", "csv").stdout)))
    assert [row["series"] for row in rows] == ["fixed", "tempo"]
    for row, final, best in zip(rows, finals, bests, strict=True):
        for column, values in (("test_accuracy_percent", final), ("best_accuracy_percent", best)):
            assert float(row[column]) == pytest.approx(values.mean())
            assert float(row[f"{column}_sd"]) == pytest.approx(values.std(ddof=1))
    apart = finals[1] - finals[0]
    assert float(rows[1]["difference,_paired_points"]) == pytest.approx(apart.mean())
    half = 4.302653 * apart.std(ddof=1) / 3**0.5
    assert (
        rows[1]["difference,_95_%_interval"]
        == f"{apart.mean() - half:.2f} to {apart.mean() + half:.2f}"
    )
    assert rows[0]["difference,_paired_points"] == "", "the baseline is not compared with itself"
    facts = json.loads(invoke("compare", *paths, "--format", "json").stdout)
    assert facts["target"] is None
    _, tempo = facts["groups"]
    assert tempo["score"]["mean"] == pytest.approx(finals[1].mean() / 100)
    assert tempo["difference"]["by_seed"] == {
        str(i): pytest.approx(a / 100) for i, a in enumerate(apart, 1)
    }
    assert tempo["difference"]["interval"] == pytest.approx(
        [(apart.mean() - half) / 100, (apart.mean() + half) / 100]
    )
    assert tempo["seconds_ratio"]["mean"] == pytest.approx(1)


def test_a_score_of_zero_is_paired(tmp_path: Path, make_run: MakeRun) -> None:
    both = [
        make_run(tmp_path, tree, accuracies=[score]) for tree, score in (({}, 0.5), (TEMPO, 0.0))
    ]
    _, tempo = json.loads(invoke("compare", *both, "--format", "json").stdout)["groups"]
    assert tempo["difference"]["mean"] == -0.5 and tempo["difference"]["interval"] is None


def test_unfinished_runs_are_in_no_mean_and_named(
    tmp_path: Path, make_run: MakeRun, paths: list[Path]
) -> None:
    killed = make_run(tmp_path, {"seed": 4}, accuracies=(0.1,), last="")
    done = invoke("compare", *paths, killed, "--format", "json")
    fixed, _ = json.loads(done.stdout)["groups"]
    assert (fixed["finished"], fixed["of"], fixed["rounds"]["mean"]) == (3, 4, 3)
    assert "(seed 4) is in no mean: interrupted, 1 of 10 global rounds" in done.stderr


def test_epsilon_and_energy_have_columns_where_they_are_known(
    tmp_path: Path, make_run: MakeRun
) -> None:
    path = make_run(tmp_path, {})
    head, *rows = (path / "rounds.csv").read_text().splitlines()
    for epsilon, wanted in (("2.5", "2.500"), ("", "inf")):
        lines = [f"{head},epsilon_lan", *(f"{row},{epsilon}" for row in rows)]
        (path / "rounds.csv").write_text("\n".join(lines) + "\n")
        (line,) = csv.DictReader(io.StringIO(invoke("compare", path, "--format", "csv").stdout))
        assert float(line["epsilon"]) == float(wanted)
    assert "energy" not in invoke("compare", path).stdout


def test_the_best_is_the_lowest_where_lower_is_better(tmp_path: Path, make_run: MakeRun) -> None:
    numbers = {"dataset": "flats.csv", "targets": "numbers", "target_column": "price"}
    tree = {
        "data": numbers,
        "model": {"name": "mine:build"},
        "score": {"name": "mean_absolute_error"},
    }
    run = Run(make_run(tmp_path, tree, accuracies=(None, None, None)))
    head, *rows = (run.path / "rounds.csv").read_text().splitlines()
    lines = [f"{row},{score}" for row, score in zip(rows, (3.0, 1.0, 2.0), strict=True)]
    (run.path / "rounds.csv").write_text("\n".join([f"{head},score", *lines]) + "\n")
    assert best_score(Run(run.path)) == 1.0
    keys = [each.key for each in quantities(series_of([Run(run.path)]))]
    assert keys[:4] == ["rounds", "score", "best_score", "loss"]


def test_an_interval_needs_three_seeds() -> None:
    assert Pairs({"1": 1.0, "2": 2.0}).interval is None and Pairs({}).interval is None
    assert Pairs({"1": 1.0, "2": 1.0, "3": 1.0}).interval == (1.0, 1.0)
    known = {
        1: 12.7062,
        2: 4.302653,
        3: 3.182446,
        4: 2.776445,
        5: 2.570582,
        9: 2.262157,
        10: 2.228139,
        30: 2.042272,
    }
    assert {freedom: quantile(freedom) for freedom in known} == pytest.approx(known, rel=1e-5)
