"""Sweeps' tables against plain numpy, and what they are compared with."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.deploy.console.table_layout import Width
from fedstrata.deploy.console.tabular import Table
from fedstrata.deploy.results.figures import styled
from fedstrata.deploy.results.machines import conditions
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.sweeps.grid import expand
from fedstrata.deploy.sweeps.measures import SweepResults, value_of
from fedstrata.deploy.sweeps.output import notes, to_json
from fedstrata.deploy.sweeps.output import tables_of as tables_within
from fedstrata.deploy.sweeps.sweep_schema import Measure
from tests.helpers.records import BYTES, a_global_round
from tests.helpers.sweeps import FIGURES, TREE, MakeRun, results


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
