"""Sweeps' tables against plain numpy, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.protocol.round_state import GLOBAL_PHASES
from deploy.console.tabular import Column, Table
from deploy.results.figures import Figure, Line, inks
from deploy.results.run import Run
from deploy.sweeps.grid import Grid, expand
from deploy.sweeps.output import agreement, conditions, long_table, missing, notes, order, page_of, to_json
from deploy.sweeps.output import tables_of as tables_with_cells
from deploy.sweeps.results import SweepResults, value_of
from deploy.sweeps.schema import Measure
from tests.helpers.records import BYTES, PHASES_S, a_global_round

MakeRun = Callable[..., Path]
ACCURACIES = {  # by split, method and seed
    ("a", "FedAvg"): [(0.2, 0.4, 0.6), (0.4, 0.6, 0.65)],
    ("a", "Other"): [(0.1, 0.5, 0.7), (0.4, 0.7, 0.8)],
    ("b", "FedAvg"): [(0.3, 0.5, 0.9), (0.2, 0.3, 0.4)],
    ("b", "Other"): [(0.3, 0.4, 0.5), (0.1, 0.2, 0.3)],
}
TREE: dict[str, Any] = {
    "title": "Two methods",
    "seeds": 2,
    "target": 0.6,
    "columns": ["method"],
    "experiment": {"rounds": 3},
    "axes": {"split": {"a": {}, "b": {"data": {"noise": 0.4}}}, "method": {
        "FedAvg": {}, "Other": {"training": {"learning_rate": 0.5}}}},
}  # fmt: skip


def results(
    tmp_path: Path, make_run: MakeRun, *, left_out: Sequence[tuple[str, str, int]] = (), **changes: Any
) -> SweepResults:
    grid: Grid = expand({**TREE, **changes}, Path("two.toml"))
    runs = {}
    for cell in grid.cells:
        split, method = cell.values["split"], cell.values["method"]
        for seed, experiment in cell.experiments.items():
            if (split, method, seed) not in left_out:
                accuracies = ACCURACIES[split, method][seed - 1]
                tree = experiment.model_dump(mode="json", exclude_none=True)
                runs[experiment.digest] = Run(make_run(tmp_path, tree, accuracies=accuracies))
    return SweepResults(grid, runs)


def tables_of(found: SweepResults) -> list[Table]:
    return [table for table, _ in tables_with_cells(found)]


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ({}, 65.0),
        ({"last": 2}, 100 * np.mean([0.8, 0.65])),
        ({"last": 9}, 100 * np.mean([0.5, 0.8, 0.65])),
        ({"best": True}, 80.0),
        ({"round": 1}, 50.0),
        ({"round": 2}, 50.0),  # not evaluated: the last one before it
        ({"round": 9}, None),  # the experiment has fewer
        ({"name": "rounds"}, 3.0),
        ({"name": "rounds", "target": 0.9}, None),
        ({"name": "reached"}, 1.0),
        ({"name": "reached", "target": 0.9}, 0.0),
        ({"name": "steps"}, 100 + 200 + 300),
        ({"name": "path_steps", "until": "end"}, 10 + 20 + 30 + 40),
        ({"name": "seconds", "unit": "min"}, 3 * 1.58 / 60),
        ({"name": "seconds", "phases": ["train", "wait"]}, 3 * (PHASES_S["train"] + PHASES_S["wait"])),
        ({"name": "seconds", "phases": list(GLOBAL_PHASES), "until": "end"}, 4 * 1.58),
        ({"name": "bytes"}, 3 * sum(BYTES.values()) / 1e6),
        ({"name": "bytes", "tier": "wan", "direction": "up", "unit": "kB"}, 3 * BYTES["wan_up_bytes"] / 1e3),
    ],
)
def test_a_measure_of_a_run(measure: dict[str, Any], expected: float | None) -> None:
    rows = [a_global_round(i, each) for i, each in enumerate((0.5, None, 0.8, 0.65), 1)]
    found = value_of(rows, Measure.model_validate(measure), target=measure.get("target", 0.6), rounds=4)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_table_has_means_and_deviations_over_the_seeds(tmp_path: Path, make_run: MakeRun) -> None:
    found = results(tmp_path, make_run)
    (table,) = tables_of(found)
    assert [column.head for column in table.columns] == ["split", "FedAvg, %", "Other, %"]
    for row, split in zip(table.rows, "ab", strict=True):
        for cell, method in zip(row[1:], ("FedAvg", "Other"), strict=True):
            last = 100 * np.array([each[-1] for each in ACCURACIES[split, method]])
            assert (cell.mean, cell.deviation) == (pytest.approx(last.mean()), pytest.approx(last.std(ddof=1)))  # type: ignore[union-attr]


def test_differences_are_paired_by_seed_and_costs_are_of_those_that_reached(tmp_path: Path, make_run: MakeRun) -> None:
    speed_up = {"name": "rounds", "against": "FedAvg", "relation": "speed_up"}
    measures = [{"last": 1, "against": "FedAvg"}, {"name": "reached"}, {"name": "rounds"}, {"name": "steps"}, speed_up]
    found = results(tmp_path, make_run, measure=measures, columns=[])
    (table,) = tables_of(found)
    assert [column.head for column in table.columns] == [
        "split", "method", "accuracy, Δ, points", "reached", "global rounds", "steps", "global rounds, speed-up"
    ]  # fmt: skip
    for row in table.rows:
        mine, base = (np.array(ACCURACIES[row[0], method]) for method in (row[1], "FedAvg"))  # type: ignore[index]
        apart = 100 * (mine[:, -1] - base[:, -1])
        assert row[2].mean == pytest.approx(apart.mean()) and row[2].deviation == pytest.approx(apart.std(ddof=1))  # type: ignore[union-attr]
        both = [(b, m) for b, m in zip(base, mine, strict=True) if (b >= 0.6).any() and (m >= 0.6).any()]
        if both:
            ratios = [(np.argmax(b >= 0.6) + 1) / (np.argmax(m >= 0.6) + 1) for b, m in both]
            assert row[6].mean == pytest.approx(np.mean(ratios))  # type: ignore[union-attr]
        there = [int(np.argmax(each >= 0.6)) + 1 for each in mine if (each >= 0.6).any()]
        assert row[3] == f"{len(there)}/2"
        if there:
            assert row[4].mean == pytest.approx(np.mean(there))  # type: ignore[union-attr]
            assert row[5].mean == pytest.approx(np.mean([sum(100 * i for i in range(1, n + 1)) for n in there]))  # type: ignore[union-attr]
        else:
            assert row[4] is None and row[5] is None


FIGURES = [["split", "FedAvg", "Other"], ["a", [60.0, 1.0], 70], ["b", 50, {"from": 60, "to": 61}]]


def test_ours_stands_beside_the_papers(tmp_path: Path, make_run: MakeRun) -> None:
    found = results(tmp_path, make_run, paper={"figures": FIGURES})
    (table,) = tables_of(found)
    assert table.aligned() == (
        "split                  FedAvg, %       Other, %\n"
        "a      here         62.50 ± 3.54   75.00 ± 7.07\n"
        "       paper              60 ± 1             70\n"
        "       difference           2.50           5.00\n"
        "b      here        65.00 ± 35.36  40.00 ± 14.14\n"
        "       paper                  50       60 to 61\n"
        "       difference          15.00         -20.00\n"
    )
    beside = results(tmp_path, make_run, paper={"figures": FIGURES, "label": "seen"}, columns=[])
    assert [column.head for column in tables_of(beside)[0].columns] == [
        "split", "method", "accuracy, %", "seen", "difference"
    ]  # fmt: skip
    csv = long_table(found).csv().splitlines()
    assert csv[0].split(",") == [
        "split", "method", "runs", "of", "accuracy_percent", "accuracy_percent_sd", "accuracy_paper",
        "accuracy_paper_sd", "accuracy_difference",
    ]  # fmt: skip
    assert len(csv) == 5


def test_what_contradicts_the_paper_is_named(tmp_path: Path, make_run: MakeRun) -> None:
    found = results(tmp_path, make_run, paper={"figures": FIGURES})
    assert list(order(found)) == [
        "the order of paper in 2 comparisons (the best, and what is above FedAvg and below it) does not hold, "
        "2 contradictions (2 within a deviation)",
        "contradicts the order: b: the best is FedAvg, paper: Other; "
        "here FedAvg 65.00 ± 35.36 % and Other 40.00 ± 14.14 %, within a deviation",
        "contradicts the order: b: Other is not above FedAvg, as paper has it; "
        "here 40.00 ± 14.14 % and FedAvg 65.00 ± 35.36 %, within a deviation",
    ]
    assert list(agreement(found)) == ["4 of 4 figures (paper) are within two deviations of ours"]
    agreeing = results(tmp_path, make_run, paper={"figures": FIGURES[:2]})
    assert [line.rpartition(" ")[2] for line in order(agreeing)] == ["holds"]
    figures = [["split", "FedAvg", "Other"], ["a", 70, 60]]  # beyond the deviations
    first, *wrong = order(results(tmp_path, make_run, paper={"figures": figures}))
    assert first.endswith("does not hold, 2 contradictions")
    assert wrong == [
        "contradicts the order: a: the best is Other, paper: FedAvg; "
        "here Other 75.00 ± 7.07 % and FedAvg 62.50 ± 3.54 %",
        "contradicts the order: a: Other is not below FedAvg, as paper has it; "
        "here 75.00 ± 7.07 % and FedAvg 62.50 ± 3.54 %",
    ]


def test_a_small_form_is_compared_with_the_papers_order_alone(tmp_path: Path, make_run: MakeRun) -> None:
    found = results(tmp_path, make_run, paper={"figures": FIGURES})
    small = SweepResults(replace(found.grid, small=True), found.runs)
    assert not list(agreement(small)) and list(order(small)) == list(order(found)) != []
    assert [len(table.rows) for table in tables_of(small)] == [2], "without the paper's lines"
    assert any(line.endswith("only its order is compared with paper, not its figures") for line in notes(small))
    assert "paper" not in to_json(small)["cells"][0]["measures"]["accuracy"]


def test_a_cost_is_better_if_it_is_smaller(tmp_path: Path, make_run: MakeRun) -> None:
    figures = [["split", "FedAvg", "Other"], ["a", 2, 1]]
    found = results(tmp_path, make_run, measure={"name": "rounds", "target": 0.5}, paper={"figures": figures})
    (ranking,) = to_json(found)["rankings"]
    assert ranking == {
        "where": "a", "measure": "global rounds to 50 %", "ours": {"FedAvg": 2.5, "Other": 2.0},
        "paper": {"FedAvg": 2.0, "Other": 1.0}, "best": "Other", "paper_best": "Other",
    }  # fmt: skip


def test_figures_that_no_table_shows_have_lines(tmp_path: Path, make_run: MakeRun) -> None:
    measures = [{"last": 1}, {"label": "lag", "round": 1, "against": "FedAvg", "shown": False}]
    figures = [["split", "method", "lag"], ["a", "Other", {"from": -5, "to": -4}], ["b", "Other", -80]]
    paper = {"figures": figures, "label": "seen elsewhere"}
    found = results(tmp_path, make_run, measure=measures, paper=paper)
    assert list(agreement(found)) == [
        "1 of 2 figures (seen elsewhere) are within two deviations of ours",
        "a, Other, lag: -5.00 ± 7.07 points; seen elsewhere -5 to -4: within two deviations",
        "b, Other, lag: -5.00 ± 7.07 points; seen elsewhere -80: not within two deviations",
    ]
    alone = results(tmp_path / "one", make_run, measure=measures, paper=paper, seeds=1)
    assert [line.endswith("no verdict of one seed") for line in agreement(alone)] == [True, True]
    assert "lag" not in tables_of(found)[0].aligned()


def test_a_partial_table_has_what_is_there(tmp_path: Path, make_run: MakeRun) -> None:
    left_out = [("a", "Other", 2), ("b", "Other", 1), ("b", "Other", 2)]
    found = results(tmp_path, make_run, left_out=left_out)
    (table,) = tables_of(found)
    assert [[getattr(cell, "mean", cell) for cell in row] for row in table.rows] == [
        ["a", pytest.approx(62.5), pytest.approx(70.0)], ["b", pytest.approx(65.0), None]
    ]  # fmt: skip
    assert list(missing(found)) == ["partial: 5 of 8 runs are finished; 2 of 4 cells lack some"]


def test_a_table_for_each_value_and_a_curve(tmp_path: Path, make_run: MakeRun) -> None:
    found = results(tmp_path, make_run, tables=["split"], columns=[], measure={"every": 1})
    first, second = tables_of(found)
    assert (first.title, second.title) == ("Two methods: a", "Two methods: b")
    assert [column.name for column in first.columns] == ["method", "round 1", "round 2", "round 3"]
    assert [cell.mean for cell in first.rows[1][1:]] == [pytest.approx(25), pytest.approx(60), pytest.approx(75)]  # type: ignore[union-attr]


def test_machines_and_links_are_named(tmp_path: Path, make_run: MakeRun) -> None:
    links = {"links": {"wan": {"up_mbit": 20.0, "down_mbit": 40.0, "delay_ms": 10.0}}}
    found = results(tmp_path, make_run, experiment={"rounds": 3, **links})
    hardware, network = conditions(found)
    assert hardware.startswith("hardware: ") and " cores; torch " in hardware
    assert network == "links: wan: up 20 Mbit/s, down 40 Mbit/s, 10 ms; lan: unlimited; enforced by: bucket"


def test_markdown_has_aligned_columns_and_escaped_bars(tmp_path: Path, make_run: MakeRun) -> None:
    (table,) = tables_of(results(tmp_path, make_run, axes=TREE["axes"]))
    assert table.markdown().splitlines()[:3] == [
        "| split | FedAvg, % | Other, % |", "| --- | ---: | ---: |", "| a | 62.50 ± 3.54 | 75.00 ± 7.07 |"
    ]  # fmt: skip
    assert "| a\\|b |" in Table("t", "t", [Column("x", text=True)], [["a|b"]]).markdown()


def test_a_page_has_tables_curves_and_runs(tmp_path: Path, make_run: MakeRun) -> None:
    page = page_of(results(tmp_path, make_run, tables=["split"], paper={"figures": FIGURES, "notes": ["so"]}))
    assert [table.name for table in page.tables] == ["table-1", "table-2", "runs"]
    first, _ = page.figures
    assert first.table is not None
    assert [(label, at, pytest.approx(cell.mean)) for label, at, cell in first.table.rows] == [  # type: ignore[union-attr]
        ("a, FedAvg", 1.0, 30.0), ("a, FedAvg", 2.0, 50.0), ("a, FedAvg", 3.0, 62.5),
        ("a, Other", 1.0, 25.0), ("a, Other", 2.0, 60.0), ("a, Other", 3.0, 75.0),
    ]  # fmt: skip
    assert "note: so" in page.html("t") and "contradicts the order: b: " in page.html("t")


def test_a_method_has_a_colour_and_the_other_values_a_dash_pattern(tmp_path: Path, make_run: MakeRun) -> None:
    (figure,) = page_of(results(tmp_path, make_run)).figures
    assert in_legend(figure) == ["stroke-s0 dash-0", "stroke-s1 dash-0", "stroke-s0 dash-1", "stroke-s1 dash-1"]
    axes = {"split": {f"split-{i}": {"data": {"noise": i / 10}} for i in range(5)}, "method": TREE["axes"]["method"]}
    grid = expand({**TREE, "axes": axes}, Path("two.toml"))
    runs = [Run(make_run(tmp_path, {}, accuracies=(i / 10, 0.9, 0.9))) for i in range(10)]
    by_digest = {cell.experiments[1].digest: run for cell, run in zip(grid.cells, runs, strict=True)}
    (figure,) = page_of(SweepResults(grid, by_digest)).figures
    assert in_legend(figure) == [inks(i, i)[0] for i in range(10)]


def in_legend(figure: Figure) -> list[str]:
    """Return the classes of the lines in the legend of curves with three points."""
    lines = (mark for mark in figure.page().marks if isinstance(mark, Line) and len(mark.points) == 2)
    return [line.kind for line in lines if line.kind.startswith("stroke")]


def test_the_best_of_several_values_is_compared_with_its_figure(tmp_path: Path, make_run: MakeRun) -> None:
    rates = {"Slow": 0.1, "Fast": 0.5, "New": 0.2}
    tree = {
        "title": "The best of two rates",
        "seeds": 2,
        "measure": [{"name": "accuracy"}, {"name": "rounds", "target": 0.5}],
        "experiment": {"rounds": 3},
        "axes": {"method": {name: {"training": {"learning_rate": rate}} for name, rate in rates.items()}},
        "paper": {
            "best": {"Fixed": ["Slow", "Fast"]},
            "baseline": "Fixed",
            "figures": [["measure", "Fixed", "New"], ["accuracy", 75.0, 80.0], ["global rounds to 50 %", 2, 3]],
        },
    }
    accuracies = {0.1: (0.4, 0.6, 0.7), 0.5: (0.5, 0.6, 0.6), 0.2: (0.1, 0.4, 0.65)}
    grid = expand(tree, Path("best.toml"))
    runs = {}
    for one in grid.experiments.values():
        each = accuracies[one.training.learning_rate]
        runs[one.digest] = Run(make_run(tmp_path, one.model_dump(mode="json", exclude_none=True), accuracies=each))
    found = SweepResults(grid, runs)
    assert [cell.values["method"] for cell in grid.rows] == ["Slow", "Fast", "Fixed", "New"]
    accuracy, rounds = (found.values(grid.rows[2], measure) for measure in grid.measures)
    assert accuracy == {1: 70.0, 2: 70.0}, "of Slow"
    assert rounds == {1: 1.0, 2: 1.0}, "of Fast"
    _, *lines = order(found)
    assert [line.rpartition("; ")[0] for line in lines] == [
        "contradicts the order: accuracy: the best is Fixed, paper: New",
        "contradicts the order: accuracy: New is not above Fixed, as paper has it",
    ]  # the new one needs more rounds here, too
    (table,) = tables_of(found)
    assert [row[0] for row in table.rows] == ["Slow", "Fast", "Fixed", "New"] and table.rows[2][2] == "75"
