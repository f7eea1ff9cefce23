"""What runs are compared with, in which order, and in which colours: nothing of it depends on the
names of folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.errors import InvalidExperiment
from fedstrata.deploy.results.figures import COLOURS, DASHES, SERIES, styled
from fedstrata.deploy.results.page import Page, compose
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.series import baseline_notes, baselines, series_of
from fedstrata.deploy.sweeps.grid import Grid, expand
from fedstrata.deploy.sweeps.sweep_folder import SweepFolder
from tests.helpers.commands import invoke
from tests.helpers.figures import curves_of, drawn

MakeRun = Callable[..., Path]
CROSS: dict[str, Any] = {"cloud": {"aggregation": {"name": "fedcross"}}}
TREE: dict[str, Any] = {
    "title": "Three methods",
    "experiment": {"rounds": 3, "topology": {"institutions": 2, "devices": 4}},
    "axes": {
        "split": {"a": {}, "b": {"data": {"noise": 0.4}}},
        "method": {"Cross": CROSS, "FedAvg": {}, "Fast": {"training": {"learning_rate": 0.5}}},
    },
}
SCORES: dict[str, Sequence[float]] = {
    "Cross": (0.1, 0.1, 0.9),
    "FedAvg": (0.1, 0.9),
    "Fast": (0.9,),
}
SPLITS = {"a": 0.0, "b": 0.05}  # what a split adds, so that no two curves are equal


def swept(
    root: Path, make_run: MakeRun, *, backwards: bool = False, **changes: Any
) -> tuple[Grid, list[Run]]:
    """Leave the folder of a finished sweep, whose runs began in the order of its cells or
    backwards.
    """
    grid = expand({**TREE, **changes}, Path("three.toml"))
    paths = []
    for cell in grid.cells[:: -1 if backwards else 1]:
        (one,) = cell.experiments.values()
        tree = one.model_dump(mode="json", exclude_none=True)
        scores = [each + SPLITS[cell.values["split"]] for each in SCORES[cell.values["method"]]]
        paths.append(make_run(root, tree, accuracies=scores))
    SweepFolder(root).name_cells(grid)
    return grid, [Run(path) for path in paths]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_sweeps_series_are_in_the_order_of_its_axes(
    tmp_path: Path, make_run: MakeRun, backwards: bool, whole: bool
) -> None:
    _, runs = swept(tmp_path / "three", make_run, backwards=backwards)
    names = [tmp_path / "three"] if whole else [run.path for run in runs]
    done = invoke("compare", *names, "--target", "0.9", "--format", "json")
    groups = json.loads(done.stdout)["groups"]
    assert [each["label"] for each in groups] == [
        f"{split}, {name}" for split in "ab" for name in SCORES
    ]
    assert [each["relative_to"] for each in groups] == ["a, FedAvg"] * 3 + ["b, FedAvg"] * 3
    assert [each["speed_up"]["mean"] for each in groups[:3]] == pytest.approx([2 / 3, 1, 2])
    assert (
        "compared with a, FedAvg (the sweep's baseline); b, FedAvg (the sweep's baseline)\n"
        in done.stderr
    )


def test_the_baseline_of_a_sweep_may_be_another_value(tmp_path: Path, make_run: MakeRun) -> None:
    for number, (paper, wanted) in enumerate([
        ({"baseline": "Fast"}, "a, Fast"), ({"baseline": "Best", "best": {"Best": ["Cross",
        "Fast"]}}, "a, Cross")
    ]):  # fmt: skip
        _, runs = swept(tmp_path / str(number), make_run, backwards=True, paper=paper)
        assert next(iter(baselines(series_of(runs)).values())).label == wanted


def test_without_a_sweep_it_is_fedavg_and_else_the_first(tmp_path: Path, make_run: MakeRun) -> None:
    fast, plain, cross, tempo = (
        Run(make_run(tmp_path, tree))
        for tree in (
            {"training": {"learning_rate": 0.5}, **CROSS},
            {},
            CROSS,
            {"cloud": {"epoch_control": {"name": "tempo"}}},
        )
    )
    for runs in permutations([cross, plain, tempo, fast]):
        (base,) = baselines(series_of(runs)).values()
        assert base.runs == (plain,)
    assert "FedAvg" in baseline_notes(series_of([cross, plain]))[0]
    for runs in permutations([cross, tempo, fast]):
        series = series_of(runs)
        assert baselines(series)[""] is series[0] and series[0].runs == runs[:1]
        assert baseline_notes(series) == [f"compared with {series[0].whole} (the first)"]
    assert baseline_notes(series_of([plain])) == [], "nothing is compared"


def test_runs_of_one_second_are_not_in_the_order_of_their_random_names(
    tmp_path: Path, make_run: MakeRun
) -> None:
    orders = []
    for number in range(6):
        root = tmp_path / str(number)
        for tree in ({"seed": 1}, {"seed": 2}, {"seed": 3}):
            path = make_run(root, tree)
            facts = json.loads((path / "manifest.json").read_text()) | {
                "started": "20260101T000000Z"
            }
            (path / "manifest.json").write_text(json.dumps(facts))
        done = invoke("compare", root, "--target", "0.9", "--format", "json")
        orders.append([run["seed"] for run in json.loads(done.stdout)["groups"][0]["runs"]])
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize(
    "tree", [{"order": []}, {"order": {"axes": {}, "ranked": "method", "baseline": ""}}]
)
def test_a_damaged_order_is_named(tmp_path: Path, make_run: MakeRun, tree: dict[str, Any]) -> None:
    path = make_run(tmp_path, {})
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": {}, **tree}))
    with pytest.raises(InvalidExperiment, match=r"sweep\.json'?: order: "):
        series_of([Run(path)])


def colours(page: Page) -> dict[str, set[str]]:
    """Return the colours of each curve by name, in all charts of a page."""
    found: dict[str, set[str]] = {}
    for figure in page.figures:
        for name, line in curves_of(drawn(figure)).items():
            if name.startswith(("a, ", "b, ")):
                found.setdefault(name, set()).add(str(line.get_color()))
    return found


def test_a_cell_has_one_colour_in_all_reports(tmp_path: Path, make_run: MakeRun) -> None:
    _, runs = swept(tmp_path / "three", make_run, backwards=True)
    wanted = {
        f"{split}, {name}": {COLOURS[f"s{i}"]} for split in "ab" for i, name in enumerate(SCORES)
    }
    for left_out in ("none", "a, Cross", "b, FedAvg"):
        chosen = [run for run in runs if run.cell != left_out]
        page = compose(chosen)
        assert colours(page) == {cell: kinds for cell, kinds in wanted.items() if cell != left_out}
        key = {
            each.whole: each.style[0]
            for kind, series in page.blocks
            if kind == "key"
            for each in series
        }
        assert all(wanted[name] == {COLOURS[f"s{colour}"]} for name, colour in key.items())


def test_lines_of_a_chart_differ_while_there_are_styles() -> None:
    assert styled([(0, 0), (1, 0), (0, 3), (1, 3)]) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert styled([(0, 5), (1, 5), (8, 5)]) == [(0, 0), (1, 1), (8 % SERIES, 0)]
    most = SERIES * len(DASHES)
    for conditions in (1, 3, 5, 8):
        ranks = [(i // conditions, i % conditions) for i in range(most)]
        assert len(set(styled(ranks))) == most
        assert [colour for colour, _ in styled(ranks[: len(DASHES)])] == [
            rank for rank, _ in ranks[: len(DASHES)]
        ]
    assert len(styled([(0, 0)] * (most + 1))) == most + 1
