"""Which of a paper's figures a sweep's runs agree with, and where they contradict its order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from docs.tools.verdicts import agreement, order, rankings
from fedstrata.deploy.sweeps.measures import SweepResults
from tests.helpers.sweeps import FIGURES, MakeRun, results, the_best_of_two


def test_what_contradicts_the_paper_is_named(tmp_path: Path, make_run: MakeRun) -> None:
    found = results(tmp_path, make_run, paper={"figures": FIGURES})
    assert list(order(found)) == [
        "the order of paper in 2 comparisons (the best, and what is above FedAvg and below it) "
        "does not hold, "
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


def test_of_a_small_form_the_order_alone_is_compared(tmp_path: Path, make_run: MakeRun) -> None:
    found = results(tmp_path, make_run, paper={"figures": FIGURES}, small={})
    small = SweepResults(replace(found.grid, size="small"), found.runs)
    assert not list(agreement(small)) and list(order(small)) == list(order(found)) != []


def test_a_cost_is_better_if_it_is_smaller(tmp_path: Path, make_run: MakeRun) -> None:
    figures = [["split", "FedAvg", "Other"], ["a", 2, 1]]
    found = results(
        tmp_path, make_run, measure={"name": "rounds", "target": 0.5}, paper={"figures": figures}
    )
    (ranking,) = rankings(found)
    assert (ranking.where, ranking.measure.label, ranking.best) == (
        "a",
        "global rounds to 50 %",
        ("Other", "Other"),
    )
    assert {value: spread.mean for value, spread in ranking.ours.items()} == {
        "FedAvg": 2.5,
        "Other": 2.0,
    }
    assert {value: figure.mean for value, figure in ranking.papers.items()} == {
        "FedAvg": 2.0,
        "Other": 1.0,
    }


def test_figures_that_no_table_shows_have_lines(tmp_path: Path, make_run: MakeRun) -> None:
    measures = [{"last": 1}, {"label": "lag", "round": 1, "against": "FedAvg", "shown": False}]
    figures = [
        ["split", "method", "lag"],
        ["a", "Other", {"from": -5, "to": -4}],
        ["b", "Other", -80],
    ]
    paper = {"figures": figures, "label": "seen elsewhere"}
    found = results(tmp_path, make_run, measure=measures, paper=paper)
    assert list(agreement(found)) == [
        "1 of 2 figures (seen elsewhere) are within two deviations of ours",
        "a, Other, lag: -5.00 ± 7.07 points; seen elsewhere -5 to -4: within two deviations",
        "b, Other, lag: -5.00 ± 7.07 points; seen elsewhere -80: not within two deviations",
    ]
    alone = results(tmp_path / "one", make_run, measure=measures, paper=paper, seeds=1)
    assert [line.endswith("no verdict of one seed") for line in agreement(alone)] == [True, True]


def test_the_best_of_several_values_is_compared_with_its_figure(
    tmp_path: Path, make_run: MakeRun
) -> None:
    _, *lines = order(the_best_of_two(tmp_path, make_run))
    assert [line.rpartition("; ")[0] for line in lines] == [
        "contradicts the order: accuracy: the best is Fixed, paper: New",
        "contradicts the order: accuracy: New is not above Fixed, as paper has it",
    ]  # the new one needs more rounds here, too
