"""Runs against a target: groups, means, deviations, speed-ups, refusals, and the forms of the
table.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import InvalidExperiment
from fedstrata.deploy.console.tabular import Column, Spread, Table, show
from fedstrata.deploy.results.compare import Group, costs_to, groups_of, notes, target_of
from fedstrata.deploy.results.pairs import Pairs
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.series import series_of
from tests.helpers.commands import invoke

MakeRun = Callable[..., Path]
TEMPO = {"cloud": {"epoch_control": {"name": "tempo"}}}


def group(found: list[Run], target: float) -> list[Group]:
    return groups_of(series_of(found), target)


def runs(root: Path, make_run: MakeRun, *trees: dict[str, Any], **settings: Any) -> list[Run]:
    return [Run(make_run(root, tree, **settings)) for tree in trees]


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_cost_of_a_target_is_that_of_the_first_global_round_that_had_it(
    tmp_path: Path, make_run: MakeRun
) -> None:
    (run,) = runs(tmp_path, make_run, {}, accuracies=(0.5, None, 0.8, 0.7, 0.9))
    assert costs_to(run, 0.8) == {
        "rounds": 3,
        "seconds": pytest.approx(3 * 1.58),
        "wan_up_bytes": 3_000_009,
        "wan_down_bytes": 6_000_015,
        "lan_up_bytes": 90_000_021,
        "lan_down_bytes": 120_000_027,
        "sgd_steps": 600,
        "path_steps": 60,
    }
    assert costs_to(run, 0.91) is None


@given(values=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9))
def test_mean_and_deviation_against_a_plain_twin(values: list[float]) -> None:
    n = len(values)
    mean = sum(values) / n
    spread = Spread.of(values)
    assert spread is not None and spread.mean == pytest.approx(mean)
    if n == 1:
        assert spread.deviation is None
    else:
        variance = sum((value - mean) ** 2 for value in values) / (n - 1)
        assert spread.deviation == pytest.approx(variance**0.5, rel=1e-6, abs=1e-6 * mean)


def test_means_are_over_the_runs_that_reached_it_and_the_others_are_reported(
    tmp_path: Path, make_run: MakeRun
) -> None:
    found = runs(tmp_path, make_run, {"seed": 1}) + runs(
        tmp_path, make_run, {"seed": 2}, accuracies=(0.9,)
    )
    found += runs(tmp_path, make_run, {"seed": 3}, accuracies=(0.25, None), last="")
    (each,) = group(found, 0.9)
    assert each.spread("rounds") == Spread(2, pytest.approx(2**0.5)) and each.reached == 2
    assert each.spread("wan_up_bytes") == Spread(2.000006, pytest.approx(2**0.5 * 1.000003))
    (note,) = notes([each], 0.9)
    assert "seed 3" in note and "at best 0.2500 in 2 of 10 global rounds, interrupted" in note
    done = invoke("compare", *(run.path for run in found), "--target", "0.9", "--format", "json")
    reported = json.loads(done.stdout)["groups"][0]
    assert (reported["reached"], reported["of"], reported["rounds"]["mean"]) == (2, 3, 2)
    assert [run["costs"] and run["costs"]["rounds"] for run in reported["runs"]] == [3, 1, None]
    assert note in done.stderr
    (row,) = table(
        invoke(
            "compare", *(run.path for run in found), "--target", "0.95", "--format", "csv"
        ).stdout
    )
    assert row["reached"] == "0/3" and row["global_rounds"] == row["time_s"] == ""


def test_speed_ups_are_paired_by_seed(tmp_path: Path, make_run: MakeRun) -> None:
    slow = runs(
        tmp_path, make_run, {"seed": 1}, {"seed": 2}, {"seed": 3}, accuracies=(0.1, 0.1, 0.9)
    )
    slow += runs(tmp_path, make_run, {"seed": 9}, accuracies=(0.9,))
    quick = runs(tmp_path, make_run, {"seed": 1, **TEMPO}, accuracies=(0.9,))
    quick += runs(tmp_path, make_run, {"seed": 2, **TEMPO}, accuracies=(0.1, 0.9))
    quick += runs(tmp_path, make_run, {"seed": 3, **TEMPO}, accuracies=(0.1, 0.1))  # never had it
    first, other = group(slow + quick, 0.9)
    ratio = other.ratio
    assert (len(ratio.values), other.common) == (2, 3) and ratio.interval is None
    assert ratio.spread is not None and ratio.spread.mean == pytest.approx((3 + 1.5) / 2)
    assert ratio.spread.deviation == pytest.approx(1.5 / 2**0.5)
    assert first.ratio.spread == Spread(1, 0)
    _, other = group([slow[0], quick[1]], 0.9)  # without a common seed
    assert (other.ratio, other.common) == (Pairs({}), 0)


def test_the_target_is_the_experiments_unless_given(tmp_path: Path, make_run: MakeRun) -> None:
    own, other, none = runs(
        tmp_path, make_run, {"stop": {"target": 0.75}}, {"stop": {"target": 0.8}}, {}
    )
    assert (
        target_of([own, own], None) == 0.75
        and target_of([own], 0.5) == 0.5
        and target_of([none], None) is None
    )
    with pytest.raises(InvalidExperiment, match="different ones"):
        target_of([own, other], None)
    assert invoke("compare", none.path, "--target", "2").exit_code == 4  # no accuracy
    assert invoke("compare").exit_code == 2


def test_another_task_is_compared_by_itself(tmp_path: Path, make_run: MakeRun) -> None:
    small, large = {"topology": {"devices": 4}}, {"topology": {"devices": 12}}
    found = [make_run(tmp_path, tree) for tree in (small, small | TEMPO)]
    found[1:1] = [make_run(tmp_path, large, accuracies=(0.1, 0.1, 0.1, 0.9))]
    found += [make_run(tmp_path, large | TEMPO, accuracies=(0.1, 0.1, 0.1, 0.9))]
    done = invoke("compare", *found, "--target", "0.9", "--format", "json")
    names = "1 institution, 4 devices; 1 institution, 12 devices"
    assert f"2 tasks, between which no cost is comparable: {names}" in done.stderr
    groups = json.loads(done.stdout)["groups"]
    assert [(each["task"], each["label"], each["relative_to"]) for each in groups] == [
        (f"1 institution, {count} devices", label, "fixed")
        for count in (4, 12)
        for label in ("fixed", "tempo")
    ]
    assert all(each["speed_up"]["mean"] == 1 for each in groups)
    rows = table(invoke("compare", *found, "--target", "0.9", "--format", "csv").stdout)
    assert [row["task"] for row in rows] == [each["task"] for each in groups]
    assert [row["speed-up_within_the_task"] for row in rows] == ["1.0"] * 4
    alone = invoke("compare", *found[:2], "--target", "0.9", "--format", "json")
    assert [each["relative_to"] for each in json.loads(alone.stdout)["groups"]] == [
        "experiment",
        "experiment",
    ]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (
            {"links": {"wan": {"up_mbit": 5.0}}},
            "links than defaults: links.of.institution-0.up_mbit",
        ),
        (
            {"links": {"enforce": "kernel"}},
            "links than enforce bucket: links.enforce: bucket and kernel",
        ),
        (
            {"hardware": {"default": {"slowdown": 2.0}}},
            "hardware than slowdown 1: hardware.default.slowdown: 1 and 2",
        ),
    ],
)
def test_other_conditions_are_named(
    tmp_path: Path, make_run: MakeRun, tree: dict[str, Any], words: str
) -> None:
    paths = [make_run(tmp_path, each) for each in ({}, tree)]
    kind = words.split(maxsplit=1)[0]
    done = invoke("compare", *paths, "--target", "0.9")
    assert done.exit_code == 0 and f"other {words}" in done.stderr
    heads, first, second = done.stdout.splitlines()
    assert heads.endswith("also differs in") and second.endswith(kind) and not first.endswith(kind)
    groups = json.loads(invoke("compare", *paths, "--target", "0.9", "--format", "json").stdout)[
        "groups"
    ]
    assert [list(each["also_differs_in"]) for each in groups] == [[], [kind]]


def test_a_run_that_its_own_target_ended_is_named(tmp_path: Path, make_run: MakeRun) -> None:
    path = make_run(tmp_path, {"stop": {"target": 0.8}}, accuracies=(0.8,))
    assert (
        "did not reach the target: at best 0.8000 in 1 of 10 global rounds, finished at its own "
        "target of 0.8"
    ) in (invoke("compare", path, "--target", "0.9").stderr)


def test_forms_of_the_table(tmp_path: Path, make_run: MakeRun) -> None:
    found = runs(tmp_path, make_run, {"seed": 1}, {"seed": 2}, {"seed": 1, **TEMPO})
    paths = [*(run.path for run in found), "--target", "0.75"]
    lines = invoke("compare", *paths).stdout.splitlines()
    assert len(lines) == 3 and "3.2 ± 0.0" in lines[1] and "2/2" in lines[1]
    rows = table(invoke("compare", *paths, "--format", "csv").stdout)
    assert float(rows[0]["time_s"]) == pytest.approx(3.16) and float(
        rows[0]["wan_up_mb"]
    ) == pytest.approx(2.000006)
    assert rows[0]["time_s_sd"] == "0.0" and rows[1]["time_s_sd"] == ""
    latex = invoke("compare", *paths, "--format", "latex").stdout
    first, *others = latex.split("\\medskip")
    assert "\\begin{tabular}{@{}ll" in first and "tempo & 1/1 & $2.0$" in first
    assert all(part.count("tempo & ") == 1 for part in others) and r"$3.2 \pm 0.0$" in latex
    assert latex.count("\\toprule") == latex.count("\\bottomrule") == 1 + len(others)


def test_latex_and_text_escape_what_names_may_hold() -> None:
    found = Table(
        "t",
        "T",
        [Column("a_b", text=True), Column("n", "%")],
        [("50% & #1 {x} \\ ~^$ <\x00\n", 1234567)],
    )
    body = found.latex().splitlines()[5]
    assert not re.search(r"(?<!\\)[%#]|(?<!\\)&.*(?<!\\)&", body) and r"$1\,234\,567$" in body
    assert "\x00" not in found.latex() + found.aligned() + found.csv()
    assert (
        show(1234.567, 2) == "1\u202f234.57"
        and show(Spread(2, 1), 1) == "2.0 ± 1.0"
        and show(None) == "-"
    )
