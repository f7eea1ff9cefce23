"""Sweeps' tables against plain numpy, and what they are compared with."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.deploy.console.layout import Width
from fedstrata.deploy.console.tabular import Table
from fedstrata.deploy.results.figures import styled
from fedstrata.deploy.results.machines import conditions
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.sweeps.grid import expand
from fedstrata.deploy.sweeps.output import long_table, missing, notes, to_json
from fedstrata.deploy.sweeps.output import tables_of as tables_within
from fedstrata.deploy.sweeps.results import SweepResults, value_of
from fedstrata.deploy.sweeps.schema import Measure
from tests.helpers.records import BYTES, a_global_round
from tests.helpers.sweeps import ACCURACIES, FIGURES, TREE, MakeRun, results, the_best_of_two


def tables_of(found: SweepResults) -> list[Table]:
    return tables_within(found, Width(120))


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
        ({"name": "seconds", "until": "end"}, 4 * 1.58),
        ({"name": "bytes"}, 3 * sum(BYTES.values()) / 1e6),
        (
            {"name": "bytes", "tier": "wan", "direction": "up", "unit": "kB"},
            3 * BYTES["wan_up_bytes"] / 1e3,
        ),
    ],
)
def test_a_measure_of_a_run(measure: dict[str, Any], expected: float | None) -> None:
    rows = [a_global_round(i, each) for i, each in enumerate((0.5, None, 0.8, 0.65), 1)]
    found = value_of(
        rows, Measure.model_validate(measure), target=measure.get("target", 0.6), rounds=4
    )
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_table_has_means_and_deviations_over_the_seeds(tmp_path: Path, make_run: MakeRun) -> None:
    found = results(tmp_path, make_run)
    (table,) = tables_of(found)
    assert [column.head for column in table.columns] == ["split", "FedAvg, %", "Other, %"]
    for row, split in zip(table.rows, "ab", strict=True):
        for cell, method in zip(row[1:], ("FedAvg", "Other"), strict=True):
            last = 100 * np.array([each[-1] for each in ACCURACIES[split, method]])
            assert (cell.mean, cell.deviation) == (
                pytest.approx(last.mean()),
                pytest.approx(last.std(ddof=1)),
            )  # type: ignore[union-attr]


def test_differences_are_paired_by_seed_and_costs_are_of_those_that_reached(
    tmp_path: Path, make_run: MakeRun
) -> None:
    speed_up = {"name": "rounds", "against": "FedAvg", "relation": "speed_up"}
    measures = [
        {"last": 1, "against": "FedAvg"},
        {"name": "reached"},
        {"name": "rounds"},
        {"name": "steps"},
        speed_up,
    ]
    found = results(tmp_path, make_run, measure=measures, columns=[])
    (table,) = tables_of(found)
    assert [column.head for column in table.columns] == [
        "split",
        "method",
        "accuracy, Δ, points",
        "reached",
        "global rounds",
        "steps",
        "global rounds, speed-up",
    ]
    for row in table.rows:
        mine, base = (np.array(ACCURACIES[row[0], method]) for method in (row[1], "FedAvg"))  # type: ignore[index]
        apart = 100 * (mine[:, -1] - base[:, -1])
        assert row[2].mean == pytest.approx(apart.mean()) and row[2].deviation == pytest.approx(
            apart.std(ddof=1)
        )  # type: ignore[union-attr]
        both = [
            (b, m) for b, m in zip(base, mine, strict=True) if (b >= 0.6).any() and (m >= 0.6).any()
        ]
        if both:
            ratios = [(np.argmax(b >= 0.6) + 1) / (np.argmax(m >= 0.6) + 1) for b, m in both]
            assert row[6].mean == pytest.approx(np.mean(ratios))  # type: ignore[union-attr]
        there = [int(np.argmax(each >= 0.6)) + 1 for each in mine if (each >= 0.6).any()]
        assert row[3] == f"{len(there)}/2"
        if there:
            assert row[4].mean == pytest.approx(np.mean(there))  # type: ignore[union-attr]
            assert row[5].mean == pytest.approx(
                np.mean([sum(100 * i for i in range(1, n + 1)) for n in there])
            )  # type: ignore[union-attr]
        else:
            assert row[4] is None and row[5] is None


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
        "split",
        "method",
        "runs",
        "of",
        "accuracy_percent",
        "accuracy_percent_sd",
        "accuracy_paper",
        "accuracy_paper_sd",
        "accuracy_difference",
    ]
    assert len(csv) == 5


def test_a_difference_has_an_interval_from_three_seeds_on(
    tmp_path: Path, make_run: MakeRun
) -> None:
    measures = [{"last": 1, "against": "FedAvg"}, {"last": 1, "label": "alone"}]
    tree = {**TREE, "seeds": 3, "measure": measures, "axes": {"method": TREE["axes"]["method"]}}
    grid = expand(tree, Path("two.toml"))
    runs = {}
    for place, cell in enumerate(grid.cells):
        for seed, one in cell.experiments.items():
            whole = one.model_dump(mode="json", exclude_none=True)
            path = make_run(tmp_path, whole, accuracies=(0.5 + 0.1 * place * seed,))
            runs[one.digest] = Run(path)
    _, other = to_json(SweepResults(grid, runs))["cells"]
    difference = other["measures"]["accuracy, Δ"]
    assert difference["mean"] == pytest.approx(20) and difference["deviation"] == pytest.approx(10)
    half = 4.302653 * 10 / 3**0.5
    assert difference["interval"] == pytest.approx((20 - half, 20 + half))
    assert "interval" not in other["measures"]["alone"]


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
    assert [cell.mean for cell in first.rows[1][1:]] == [
        pytest.approx(25),
        pytest.approx(60),
        pytest.approx(75),
    ]  # type: ignore[union-attr]


def test_machines_and_links_are_named(tmp_path: Path, make_run: MakeRun) -> None:
    links = {"links": {"wan": {"up_mbit": 20.0, "down_mbit": 40.0, "delay_ms": 10.0}}}
    found = results(tmp_path, make_run, experiment={"rounds": 3, **links})
    hardware, network = conditions(list(found.runs.values()))
    assert re.fullmatch(r"hardware: .+ cores(, (AVX-512|AVX2|SVE|NEON))?; torch .+", hardware)
    assert (
        network
        == "links: wan: up 20 Mbit/s, down 40 Mbit/s, 10 ms; lan: unlimited; enforced by: bucket"
    )


def test_a_method_has_a_colour_and_the_other_values_a_dash_pattern(
    tmp_path: Path, make_run: MakeRun
) -> None:
    axes = {
        "split": {f"split-{i}": {"data": {"noise": i / 10}} for i in range(5)},
        "method": TREE["axes"]["method"],
    }
    for own, apart in (
        (TREE["axes"], [(0, 0), (1, 0), (0, 1), (1, 1)]),
        # Two colours have four patterns each; then the next colour.
        (axes, [*((method, split) for split in range(4) for method in range(2)), (2, 0), (2, 1)]),
    ):
        order = expand({**TREE, "axes": own}, Path("two.toml")).file.order
        assert styled([(place.rank, place.rest) for place in order.places().values()]) == apart


def test_a_small_form_is_not_compared_with_the_papers_figures(
    tmp_path: Path, make_run: MakeRun
) -> None:
    found = results(tmp_path, make_run, paper={"figures": FIGURES}, small={})
    small = SweepResults(replace(found.grid, size="small"), found.runs)
    assert [len(table.rows) for table in tables_of(small)] == [2], "without the paper's lines"
    assert "the small size is another experiment: it is not compared with paper" in notes(small)
    assert "paper" not in to_json(small)["cells"][0]["measures"]["accuracy"]


def test_the_best_of_several_values_has_a_line_of_its_own(
    tmp_path: Path, make_run: MakeRun
) -> None:
    found = the_best_of_two(tmp_path, make_run)
    grid = found.grid
    assert [cell.values["method"] for cell in grid.rows] == ["Slow", "Fast", "Fixed", "New"]
    accuracy, rounds, _ = (found.values(grid.rows[2], measure) for measure in grid.measures)
    assert accuracy == {1: 70.0, 2: 70.0}, "of Slow"
    assert rounds == {1: 1.0, 2: 1.0}, "of Fast"
    speed_ups = [found.values(cell, grid.measures[2])[1] for cell in grid.rows]
    assert speed_ups == [1 / 2, 1.0, 1.0, 1 / 3], "against the quickest of Fixed, not the slowest"
    (table,) = tables_of(found)
    assert [row[0] for row in table.rows] == ["Slow", "Fast", "Fixed", "New"] and table.rows[2][
        2
    ] == "75"
