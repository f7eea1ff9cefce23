"""Sweeps' files: what their cells are, what is refused, and where a paper's figures belong."""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.settings.training import CrossEntropy
from fedstrata.deploy.console.shipped import shipped_sweeps
from fedstrata.deploy.sweeps.grid import Grid, PaperFigure, expand, load, merged
from tests.helpers.sweeps import digest_of
from tests.refused import KEPT, SWEEP

Tree = dict[str, Any]
NUMBERS = tomllib.loads((KEPT / "numbers.toml").read_text())
FILE = Path("two-by-two.toml")
keys = st.sampled_from(["a", "b", "c", "name"])
trees = st.recursive(
    st.dictionaries(keys, st.integers(0, 3), max_size=3),
    lambda below: st.dictionaries(keys, below, max_size=3),
)


def figures(rows: list[list[Any]]) -> dict[str, Any]:
    return {"paper": {"figures": rows}}


def grid(*changes: dict[str, Any], **options: Any) -> Grid:
    return expand(merged(SWEEP, *changes), FILE, **options)


@given(trees, trees, trees)
def test_merging_keeps_what_is_not_changed_and_takes_what_is(
    base: Tree, one: Tree, two: Tree
) -> None:
    assert merged(base) == base and merged(base, {}) == base and merged({}, base) == base
    assert merged(base, one, two) == merged(merged(base, one), two)
    once = merged(base, one)
    assert merged(once, one) == once
    assert base.keys() | one.keys() == once.keys()
    assert all(
        once[key] == value
        for key, value in one.items()
        if not isinstance(value, dict) or "name" in value
    )


def test_a_table_with_a_name_replaces_the_other() -> None:
    rule = {"aggregation": {"name": "fedcross", "alpha": 0.9}, "participation": 0.5}
    assert merged({"cloud": rule}, {"cloud": {"aggregation": {"name": "fedmr"}}}) == {
        "cloud": {"aggregation": {"name": "fedmr"}, "participation": 0.5}
    }


@given(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 2))
def test_each_combination_is_a_cell_with_each_seed(
    seeds: int, sizes: list[int], skipped: int
) -> None:
    axes = {
        f"axis-{i}": {f"{i}.{j}": {"rounds": 1 + j} for j in range(size)}
        for i, size in enumerate(sizes)
    }
    wheres = [{"axis-0": f"0.{skipped}", "skip": True}] if sizes[0] > skipped else []
    tree = {"title": "t", "seeds": seeds, "axes": axes, "where": wheres}
    found = expand(tree, FILE)
    wanted = [one for one in product(*axes.values()) if not (wheres and one[0] == f"0.{skipped}")]
    assert [tuple(cell.values.values()) for cell in found.cells] == wanted
    for cell in found.cells:
        *_, last = cell.values.values()
        assert list(cell.experiments) == list(range(1, seeds + 1))
        assert all(one.seed == seed for seed, one in cell.experiments.items())
        # the last axis wins
        assert {one.rounds for one in cell.experiments.values()} == {1 + int(last.split(".")[1])}
    assert len(found.experiments) == len(
        {one.digest for c in found.cells for one in c.experiments.values()}
    )


def test_a_cell_has_the_keys_of_all_its_values_in_their_order() -> None:
    where = {
        "method": ["FedCross 0.9, dynamic"],
        "split": "IID",
        "experiment": {"rounds": 9},
        "target": 0.7,
    }
    found = grid({"where": [where], "target": 0.8, "measure": {"name": "seconds"}})
    assert [cell.label for cell in found.cells] == [
        "Dirichlet 0.1, FedAvg",
        "Dirichlet 0.1, FedCross 0.9, dynamic",
        "IID, FedAvg",
        "IID, FedCross 0.9, dynamic",
    ]
    first, *_, last = found.cells
    wanted = {
        "name": "two-by-two", "seed": 2, "rounds": 4, "training": {"epochs": 2},
        "data": {"dataset": "digits", "partition": "dirichlet", "concentration": 0.1},
    }  # fmt: skip
    assert first.experiments[2] == parse(wanted)
    assert (last.experiments[1].rounds, last.target, first.target) == (9, 0.7, 0.8)
    assert last.experiments[1].tiers[0].aggregation.name == "fedcross"


def test_experiments_that_are_equal_are_one() -> None:
    goals = [{"goal": goal, "target": target} for goal, target in (("80 %", 0.8), ("90 %", 0.9))]
    found = grid(
        {"axes": {"goal": {"80 %": {}, "90 %": {}}}, "where": goals, "measure": {"name": "rounds"}}
    )
    assert len(found.cells) == 8 and {cell.target for cell in found.cells} == {0.8, 0.9}
    assert len(found.experiments) == 8  # of four configurations and two seeds
    assert [one.seed for one in found.experiments.values()] == [1] * 4 + [2] * 4  # seed by seed


def test_an_axis_may_be_a_list_of_values_of_a_key() -> None:
    found = grid(
        {
            "axes": {
                "training.learning_rate": [0.01, 0.1],
                "model.name": ["mlp_digits", "cnn_digits"],
            }
        }
    )
    assert found.axes["training.learning_rate"] == ["0.01", "0.1"]
    assert [each.training.learning_rate for each in found.experiments.values()][:4] == [
        0.01,
        0.01,
        0.1,
        0.1,
    ]
    assert [each.model.name for each in found.experiments.values()][:2] == [
        "mlp_digits",
        "cnn_digits",
    ]


def test_a_base_is_an_experiment_by_name_or_file(tmp_path: Path) -> None:
    demo = expand({"title": "t", "base": "demo", "axes": {"rounds": [1, 2]}}, FILE)
    assert demo.cells[0].experiments[1].cloud.epoch_control.name == "tempo"
    assert demo.cells[0].experiments[1].name == "two-by-two"
    (tmp_path / "own.toml").write_text("rounds = 7\n[training]\nepochs = 3\n")
    own = expand(
        {"title": "t", "base": "own.toml", "axes": {"training.epochs": [4]}},
        tmp_path / "sweep.toml",
    )
    assert [(one.rounds, one.training.epochs) for one in own.experiments.values()] == [(7, 4)]


def test_the_small_form_lies_on_top_of_the_large_one() -> None:
    small = {
        "experiment": {"rounds": 2},
        "axes": {"method": {"FedCross 0.9, dynamic": {"training": {"epochs": 1}}}},
        "where": [{"split": "IID", "experiment": {"data": {"node_samples": 29}}, "target": 0.3}],
        "only": {"split": ["IID"]},
        "seeds": [7],
        "measure": {"name": "bytes", "until": "end"},
    }
    where = [{"split": "IID", "experiment": {"rounds": 50}}]
    small_grid, large = (
        grid({"where": where, "small": small}, size=each) for each in ("small", "full")
    )
    assert [one.rounds for one in large.experiments.values()] == [4, 4, 50, 50] * 2
    assert {cell.target for cell in small_grid.cells} == {0.3} and {
        cell.target for cell in large.cells
    } == {None}
    one, other = small_grid.experiments.values()
    assert (one.rounds, one.seed, one.training.epochs, one.data.node_samples) == (2, 7, 2, 29)
    assert (other.training.epochs, other.tiers[0].aggregation.name) == (1, "fedcross")
    assert [measure.label for measure in small_grid.measures] == ["bytes"]


def test_a_small_form_has_the_figures_of_the_large_one() -> None:
    changes = figures([["split", "FedAvg"], ["IID", 3]]) | {
        "small": {"only": {"split": ["IID"]}, "seeds": 1}
    }
    small_grid, large = (grid(changes, size=each) for each in ("small", "full"))
    assert small_grid.figures == large.figures != {}


def test_overrides_lie_on_top_of_all() -> None:
    found = grid(
        {"where": [{"split": "IID", "experiment": {"rounds": 50}}]}, overrides=["rounds=3"]
    )
    assert {one.rounds for one in found.experiments.values()} == {3}


def test_only_some_values_and_seeds() -> None:
    found = grid(only=["split=IID", "method=FedAvg"], seeds=3)
    assert [cell.label for cell in found.cells] == ["IID, FedAvg"] and found.seeds == [1, 2, 3]
    with pytest.raises(InvalidExperiment, match="method=FedAvg': not in the small size"):
        grid(
            {"small": {"only": {"method": ["FedCross 0.9, dynamic"]}}},
            size="small",
            only=["method=FedAvg"],
        )


def test_a_curve_is_a_measure_every_so_many_rounds() -> None:
    found = grid({"measure": [{"every": 2}, {"last": 2, "against": "FedAvg"}]})
    assert [(each.label, each.round) for each in found.measures] == [
        ("round 2", 2), ("round 4", 4), ("accuracy, Δ", None)
    ]  # fmt: skip


def test_the_papers_figures_find_their_cells() -> None:
    rows = [
        ["split", *SWEEP["axes"]["method"]],
        ["Dirichlet 0.1", [46.1, 2.3], {"from": 50, "to": 52}],
        ["IID", 60.5],
    ]
    assert grid(figures(rows)).figures == {
        (("Dirichlet 0.1", "FedAvg"), "accuracy"): PaperFigure(46.1, 46.1, 2.3),
        (("Dirichlet 0.1", "FedCross 0.9, dynamic"), "accuracy"): PaperFigure(50, 52),
        (("IID", "FedAvg"), "accuracy"): PaperFigure(60.5, 60.5),
    }
    measures = [{"label": "final"}, {"name": "bytes", "until": "end"}]
    for table in (
        [["measure", "split", "FedAvg"], ["final", "IID", 60], ["bytes", "IID", 3]],
        [
            ["split", "method", "final", "bytes"],
            ["IID", "FedAvg", 60, 3],
            ["Dirichlet 0.1", "FedAvg", "", ""],
        ],
    ):
        both = grid({"measure": measures, **figures(table)}).figures
        assert both == {
            (("IID", "FedAvg"), name): PaperFigure(n, n)
            for name, n in (("final", 60), ("bytes", 3))
        }


# The study's sweeps

STUDY = [name for name in shipped_sweeps() if name.startswith("study/")]
EQUAL_WORK = ("study/two", "study/methods", "study/three")


@pytest.mark.parametrize("name", STUDY)
def test_every_cell_is_an_experiment_of_its_own(name: str) -> None:
    large, small = (load(shipped_sweeps()[name], size=size, seeds=1) for size in ("full", "small"))
    assert len({*large.experiments, *small.experiments}) == 2 * len(large.cells)
    assert digest_of(large) == NUMBERS["cells"][name]


def test_the_study_has_the_parts_that_its_page_has() -> None:
    cells = {name: len(load(shipped_sweeps()[name], seeds=1).cells) for name in STUDY}
    assert cells == {
        "study/two": 40,
        "study/methods": 72,
        "study/three": 192,
        "study/tempo": 36,
        "study/table1": 4,
        "study/codecs": 76,
        "study/images": 8,
        "study/motions": 5,
        "study/phones": 8,
        "study/wan": 21,
        "study/adversaries": 144,
    }
    seen = load(shipped_sweeps()["study/two"]).figures
    assert {label for _, label in seen} == {"Δ 25", "round 300"} and len(seen) == 7


def test_all_rows_do_equal_local_work() -> None:
    work = set()
    for name in EQUAL_WORK:
        for one in load(shipped_sweeps()[name], seeds=1).experiments.values():
            drawn = float(len(one.tree.devices))
            for tier in one.tiers:
                drawn *= tier.participation
            # FedSAM: two gradients a step
            training = one.training.model_copy(update={"objective": CrossEntropy()})
            work.add((one.rounds * one.device_rounds * round(drawn), training.model_dump_json()))
    assert len(work) == 1
