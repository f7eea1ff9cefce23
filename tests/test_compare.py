"""Runs against a target: groups, means, deviations, speed-ups, refusals, and the forms of the table."""

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

from common.errors import InvalidExperiment
from deploy.console.tabular import Column, Spread, Table, show
from deploy.report.compare import (
    check,
    differences,
    distinguishing_labels,
    group,
    notes,
    speed_up,
    target_of,
    to_target,
)
from deploy.runs.run import Run
from tests.helpers.commands import invoke

MakeRun = Callable[..., Path]
TEMPO = {"cloud": {"epoch_control": {"name": "tempo"}}}


def runs(root: Path, make_run: MakeRun, *trees: dict[str, Any], **settings: Any) -> list[Run]:
    return [Run(make_run(root, tree, **settings)) for tree in trees]


def test_the_cost_of_a_target_is_that_of_the_first_global_round_that_had_it(tmp_path: Path, make_run: MakeRun) -> None:
    (run,) = runs(tmp_path, make_run, {}, accuracies=(0.5, None, 0.8, 0.7, 0.9))
    assert to_target(run, 0.8).costs == {
        "rounds": 3, "seconds": pytest.approx(3 * 1.58), "wan_up_bytes": 3_000_009, "wan_down_bytes": 6_000_015,
        "lan_up_bytes": 90_000_021, "lan_down_bytes": 120_000_027, "sgd_steps": 600, "path_steps": 60,
    }  # fmt: skip
    assert to_target(run, 0.91).costs is None


def test_runs_that_differ_in_the_seed_alone_are_a_group(tmp_path: Path, make_run: MakeRun) -> None:
    trees = [{"seed": 1}, {"seed": 1, **TEMPO}, {"seed": 2}, {"seed": 2, **TEMPO}]
    found = group(runs(tmp_path, make_run, *trees), 0.9)
    assert [each.label for each in found] == ["cloud.epoch_control.name=fixed", "cloud.epoch_control.name=tempo"]
    assert [[each.run.seed for each in found_group.runs] for found_group in found] == [[1, 2], [1, 2]]


def test_groups_are_named_by_what_differs_or_as_given(tmp_path: Path, make_run: MakeRun) -> None:
    assert distinguishing_labels([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}]) == ["b=2", "b=3", "defaults"]
    assert distinguishing_labels([{"name": "x", "b": 2}, {"name": "y", "b": 3}]) == ["b=2", "b=3"]
    assert distinguishing_labels([{"name": "x"}, {"name": "y"}]) == ["name=x", "name=y"]
    assert distinguishing_labels([{"name": "x", "b": 1}]) == ["x"]
    found = runs(tmp_path, make_run, {}, TEMPO)
    assert [each.label for each in group(found, 0.9, ["one", "two"])] == ["one", "two"]
    with pytest.raises(InvalidExperiment, match=r"--label.*1 for 2 groups.*name=fixed, .*name=tempo"):
        group(found, 0.9, ["one"])


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


def test_means_are_over_the_runs_that_reached_it_and_the_others_are_reported(tmp_path: Path, make_run: MakeRun) -> None:
    found = runs(tmp_path, make_run, {"seed": 1}) + runs(tmp_path, make_run, {"seed": 2}, accuracies=(0.9,))
    found += runs(tmp_path, make_run, {"seed": 3}, accuracies=(0.25, None), last="")
    (each,) = group(found, 0.9)
    assert each.spread("rounds") == Spread(2, pytest.approx(2**0.5)) and len(each.reached) == 2
    assert each.spread("wan_up_bytes") == Spread(2_000_006, pytest.approx(2**0.5 * 1_000_003))
    (note,) = notes([each])
    assert "seed 3" in note and "at best 0.2500 in 2 of 10 global rounds, interrupted" in note
    done = invoke("compare", *(run.path for run in found), "--target", "0.9", "--format", "json")
    reported = json.loads(done.stdout)["groups"][0]
    assert (reported["reached"], reported["of"], reported["rounds"]["mean"]) == (2, 3, 2)
    assert [run["costs"] and run["costs"]["rounds"] for run in reported["runs"]] == [3, 1, None]
    assert note in done.stderr
    none = invoke("compare", *(run.path for run in found), "--target", "0.95", "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(none.stdout))
    assert row["reached"] == "0/3" and row["global_rounds"] == row["time_s"] == ""


def test_speed_ups_are_paired_by_seed(tmp_path: Path, make_run: MakeRun) -> None:
    slow = runs(tmp_path, make_run, {"seed": 1}, {"seed": 2}, {"seed": 3}, accuracies=(0.1, 0.1, 0.9))
    slow += runs(tmp_path, make_run, {"seed": 9}, accuracies=(0.9,))
    quick = runs(tmp_path, make_run, {"seed": 1, **TEMPO}, accuracies=(0.9,))
    quick += runs(tmp_path, make_run, {"seed": 2, **TEMPO}, accuracies=(0.1, 0.9))
    quick += runs(tmp_path, make_run, {"seed": 3, **TEMPO}, accuracies=(0.1, 0.1))  # never had it
    first, other = group(slow + quick, 0.9)
    ratio, paired, common = speed_up(first, other)
    assert (paired, common) == (2, 3)
    assert ratio is not None and ratio.mean == pytest.approx((3 + 1.5) / 2)
    assert ratio.deviation == pytest.approx(1.5 / 2**0.5)
    assert speed_up(first, first)[0] == Spread(1, 0)


def test_no_common_seed_gives_no_speed_up(tmp_path: Path, make_run: MakeRun) -> None:
    found = group(runs(tmp_path, make_run, {"seed": 1}, {"seed": 2, **TEMPO}), 0.9)
    assert speed_up(*found) == (None, 0, 0)


def test_the_target_is_the_experiments_unless_given(tmp_path: Path, make_run: MakeRun) -> None:
    own, other, none = runs(tmp_path, make_run, {"target_accuracy": 0.75}, {"target_accuracy": 0.8}, {})
    assert target_of([own, own], None) == 0.75 and target_of([own], 0.5) == 0.5
    for found, words in (([own, other], "different ones"), ([none], "have none")):
        with pytest.raises(InvalidExperiment, match=words):
            target_of(found, None)
    assert invoke("compare", none.path).exit_code == 4


@pytest.mark.parametrize(
    ("kind", "tree", "words"),
    [
        ("links", {"links": {"wan": {"up_mbit": 5.0}}}, "links.of.institution-0.up_mbit: none and 5.0"),
        ("links", {"links": {"enforce": "kernel"}}, "links.enforce: bucket and kernel"),
        ("data", {"data": {"noise": 0.2}}, "data.noise: 0.0 and 0.2"),
    ],
)
def test_unlike_runs_are_refused_by_what_differs(
    tmp_path: Path, make_run: MakeRun, kind: str, tree: dict[str, Any], words: str
) -> None:
    found = runs(tmp_path, make_run, {}, tree)
    done = invoke("compare", *(run.path for run in found), "--target", "0.9")
    assert done.exit_code == 4 and words in done.stderr and f"--allow {kind}" in done.stderr and not done.stdout
    check(found, [kind])
    assert invoke("compare", *(run.path for run in found), "--target", "0.9", "--allow", kind).exit_code == 0


def test_another_machine_and_a_run_without_a_network_are_refused(tmp_path: Path, make_run: MakeRun) -> None:
    for kind, change in (
        ("hardware", {"cpus": 999}),
        ("hardware", {"host": "elsewhere"}),
        ("links", {"direct": {}}),
    ):
        one, other = (make_run(tmp_path, {}) for _ in range(2))
        manifest = json.loads((other / "manifest.json").read_text())
        (other / "manifest.json").write_text(json.dumps(manifest | change))
        assert set(differences([Run(one), Run(other)])) == {kind}
        assert len(group([Run(one), Run(other)], 0.9)) == 2  # allowed, they are not averaged


def test_where_the_data_lie_and_how_large_the_lab_is_make_runs_no_less_alike(tmp_path: Path, make_run: MakeRun) -> None:
    trees: list[dict[str, Any]] = [{}, {"data": {"root": "/elsewhere"}}, {"topology": {"devices": 3}}]
    found = runs(tmp_path, make_run, *trees)
    assert differences(found) == {}
    assert [each.label for each in group(found, 0.9)] == ["topology.devices=1", "topology.devices=3"]


def test_one_seed_with_two_splits_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    found = runs(tmp_path, make_run, {"seed": 1}, {"seed": 1}, {"seed": 2})
    for run, digest in zip(found, "aba", strict=True):
        (run.path / "partition.json").write_text(json.dumps({"digest": digest, "devices": {}}))
    assert "different splits" in differences([Run(run.path) for run in found])["data"]
    assert differences([Run(run.path) for run in found[1:]]) == {}


def test_forms_of_the_table(tmp_path: Path, make_run: MakeRun) -> None:
    found = runs(tmp_path, make_run, {"seed": 1}, {"seed": 2}, {"seed": 1, **TEMPO})
    paths = [*(run.path for run in found), "--target", "0.75"]
    lines = invoke("compare", *paths).stdout.splitlines()
    assert len(lines) == 3 and "3.2 ± 0.0" in lines[1] and "2/2" in lines[1]
    rows = list(csv.DictReader(io.StringIO(invoke("compare", *paths, "--format", "csv").stdout)))
    assert float(rows[0]["time_s"]) == pytest.approx(3.16) and float(rows[0]["wan_up_mb"]) == pytest.approx(2.000006)
    assert rows[0]["time_s_sd"] == "0.0" and rows[1]["time_s_sd"] == ""
    latex = invoke("compare", *paths, "--format", "latex").stdout
    assert latex.startswith("\\begin{tabular}{llrr") and r"cloud.epoch\_control.name=tempo & 1/1 & $2" in latex
    assert r"$3.2 \pm 0.0$" in latex and latex.count(r"\\") == 3 and "\\toprule" in latex


def test_latex_and_text_escape_what_names_may_hold() -> None:
    table = Table("t", "T", [Column("a_b", text=True), Column("n", "%")], [("50% & #1 {x} \\ ~^$ <\x00\n", 1234567)])
    body = table.latex().splitlines()[4]
    assert not re.search(r"(?<!\\)[%#]|(?<!\\)&.*(?<!\\)&", body) and r"$1\,234\,567$" in body
    assert "\x00" not in table.latex() + table.aligned() + table.csv() + table.html()
    assert show(1234.567, 2) == "1\u202f234.57" and show(Spread(2, 1), 1) == "2.0 ± 1.0" and show(None) == "-"


def test_wrong_usage_ends_with_2(tmp_path: Path, make_run: MakeRun) -> None:
    path = make_run(tmp_path, {})
    assert invoke("compare").exit_code == 2
    assert invoke("compare", path, "--allow", "colours").exit_code == 2
