"""The report of several runs: means and bands over seeds, tasks, what was run, where it goes, and
how it is printed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import FillBetweenPolyCollection

from docs.tools.runs_picture import drawn as picture_of
from fedstrata.common.settings.training import Score
from fedstrata.deploy.console.tabular import Spread
from fedstrata.deploy.results.device_scores import score_axis
from fedstrata.deploy.results.figures import Point
from fedstrata.deploy.results.page import Page, compose
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.score_curves import mean_curve
from tests.helpers.commands import invoke
from tests.helpers.figures import drawn
from tests.helpers.records import BYTES
from tests.test_report import CHROMIUM, LAB, Tree

MakeRun = Callable[..., Path]
TEMPO = {"cloud": {"epoch_control": {"name": "tempo"}}}
LARGER = {**LAB, "topology": {"institutions": 2, "devices": 8}}
POINTS = st.lists(
    st.dictionaries(st.integers(1, 6), st.tuples(st.floats(0, 99), st.floats(0, 1)), max_size=6),
    max_size=4,
)


@given(runs=POINTS)
def test_means_and_bands_are_those_of_numpy(runs: list[dict[int, Point]]) -> None:
    curve = mean_curve(runs)
    some = [run for run in runs if run]
    common = sorted(set.intersection(*map(set, some))) if some else []
    if len(some) < 2:
        assert (
            curve.points == [run[i] for run in some for i in sorted(run)] and not curve.deviations
        )
        return
    values = np.array([[run[i] for i in common] for run in some]).reshape(len(some), -1, 2)
    assert np.allclose(np.array(curve.points).reshape(-1, 2), values.mean(axis=0))
    assert np.allclose(curve.deviations, values[:, :, 1].std(axis=0, ddof=1))
    spread = zip(curve.points, curve.deviations, strict=True)
    band = [(x, max(y - deviation, 0), min(y + deviation, 1)) for (x, y), deviation in spread]
    assert curve.band(score_axis(Score())) == band
    last = max(common, default=0)
    longer = [run for run in some if max(run) > last]
    assert [line[-1] for line in curve.rest] == [run[max(run)] for run in longer]
    assert all(
        len(line) == sum(i >= last for i in run)
        for line, run in zip(curve.rest, longer, strict=True)
    )


@pytest.mark.usefixtures("undrawn")
def test_seeds_are_one_line_with_a_band_and_one_row(tmp_path: Path, make_run: MakeRun) -> None:
    accuracies = {1: (0.5, 0.75), 2: (0.25, 0.5), 3: (0.5,)}
    fixed = [
        make_run(tmp_path, {**LAB, "seed": seed}, accuracies=each)
        for seed, each in accuracies.items()
    ]
    other = [
        make_run(tmp_path, {**LAB, **TEMPO, "seed": seed}, accuracies=(0.75, 1.0))
        for seed in (1, 2, 4)
    ]
    killed = make_run(tmp_path, {**LAB, "seed": 5}, accuracies=(0.125,), last="")
    failed = make_run(tmp_path, {**LAB, "seed": 6}, accuracies=(), last="failed")
    page = compose([Run(path) for path in (*fixed, *other, killed, failed)])
    assert page.title == "8 runs: fixed; tempo"
    figure = next(figure for figure in page.figures if figure.name == "accuracy-rounds")
    assert figure.table is not None
    assert [row[:2] for row in figure.table.rows] == [
        ("fixed", 1.0),
        ("tempo", 1.0),
        ("tempo", 2.0),
    ]
    assert figure.table.rows[0][2] == Spread(pytest.approx(125 / 3), pytest.approx(14.43, abs=0.01))
    (axes,) = drawn(figure).sheet.axes
    thin = [np.asarray(line.get_xdata()).tolist() for line in axes.lines if line.get_alpha()]
    assert thin == [[1.0, 2.0], [1.0, 2.0], [1.0]]  # beyond the mean, and of the killed one
    # of points, not of one
    assert sum(isinstance(each, FillBetweenPolyCollection) for each in axes.collections) == 1
    tree = Tree(page.html())
    heads, first, second = tree.tables[
        "The series: mean ± standard deviation (n - 1) over the finished runs"
    ]
    assert heads[:2] == ["series", "finished"] and first[:3] == ["fixed", "3/5", "1, 2, 3, 5, 6"]
    assert first[4:6] == ["58.33 ± 14.43", "-"]
    assert second[4:6] == ["100.00 ± 0.00", "37.50 ± 17.68"]  # of the seeds 1 and 2
    phases = "Seconds of a global round, mean ± standard deviation (n - 1) over runs"
    # without the failed one's zero
    assert tree.tables[phases][3] == ["train", "1.0000 ± 0.0000", "1.0000 ± 0.0000"]
    assert [(row[0], row[3]) for row in tree.tables["The runs, bytes as MQTT packets"][1:4]] == [
        ("fixed", seed) for seed in ("1", "2", "3")
    ]


def test_loss_is_beside_accuracy_where_it_is_recorded(tmp_path: Path, make_run: MakeRun) -> None:
    figures = compose([Run(make_run(tmp_path, LAB))]).figures
    by_wan = next(figure.table for figure in figures if figure.name == "accuracy-wan")
    both = (BYTES["wan_up_bytes"] + BYTES["wan_down_bytes"]) / 1e6
    assert by_wan is not None and [row[1] for row in by_wan.rows] == pytest.approx(
        [both, 2 * both, 3 * both]
    )
    names = [figure.name for figure in figures][:7]
    assert names == [
        "accuracy-rounds",
        "loss-rounds",
        "accuracy-seconds",
        "loss-seconds",
        "accuracy-wan",
        "accuracy-lan",
        "train-loss-rounds",
    ]
    without = compose([Run(make_run(tmp_path, LAB, accuracies=(None, None)))]).figures
    assert [figure.name for figure in without if "loss" in figure.name] == ["train-loss-rounds"]


def test_tasks_are_not_laid_over_each_other(tmp_path: Path, make_run: MakeRun) -> None:
    page = compose([Run(make_run(tmp_path, tree)) for tree in (LAB, LARGER)])
    assert page.title == "2 runs: 2 tasks"
    lines = {
        f.name: list(dict.fromkeys(row[0] for row in f.table.rows)) for f in page.figures if f.table
    }
    assert lines["accuracy-rounds-task0"] == lines["accuracy-rounds-task1"] == ["tiny"]
    words, both = Tree(page.html()).words, "2 institutions, 4 devices; 2 institutions, 8 devices"
    assert f"2 tasks, between which nothing is comparable: {both}." in words
    assert "Accuracy and loss: 2 institutions, 8 devices" in words


def test_another_score_is_another_task_and_has_its_own_unit(
    tmp_path: Path, make_run: MakeRun
) -> None:
    numbers = {"dataset": "flats.csv", "targets": "numbers", "target_column": "price"}
    paths = [
        make_run(tmp_path, {}),
        make_run(tmp_path, {"data": numbers, "model": {"name": "mine:build"}}),
    ]
    head, *rows = (paths[1] / "rounds.csv").read_text().splitlines()
    (paths[1] / "rounds.csv").write_text(
        "\n".join([f"{head},score", *(f"{row},-0.25" for row in rows)]) + "\n"
    )
    page = compose([Run(path) for path in paths])
    titles = [figure.title for figure in page.figures]
    assert "Accuracy over global rounds, %" in titles and "R2 over global rounds" in titles
    overview = next(table for table in page.tables if table.name == "overview")
    assert overview.columns[5].name == "test accuracy or r2" and not overview.columns[5].unit
    assert [row[5] for row in overview.rows] == [0.9, -0.25]


def facts_of(page: Page) -> dict[str, str]:
    """Return the rows of the first table of facts."""
    (facts, *_) = (content for kind, content in page.blocks if kind == "facts")
    return {
        name: " ".join(f"{of}: {text}" if of else text for of, text in lines)
        for name, lines in facts
    }


def test_the_top_has_what_was_run(tmp_path: Path, make_run: MakeRun) -> None:
    cross = {
        "cloud": {"aggregation": {"name": "fedcross", "alpha": 0.9}},
        "institution": {"rounds": 2},
    }
    found = facts_of(compose([Run(make_run(tmp_path, LAB | cross))]))
    assert list(found) == [
        "model",
        "data",
        "cloud",
        "institution",
        "devices",
        "topology",
        "links",
        "hardware",
        "versions",
        "seeds",
        "started",
    ]
    assert found["model"] == "mlp_digits" and found["data"].startswith("synthetic, iid")
    assert (found["cloud"], found["institution"]) == ("fedcross, alpha 0.9", "fedavg, rounds 2")
    assert (
        found["devices"].startswith("cross_entropy, epochs 1, batch_size") and found["seeds"] == "1"
    )
    assert found["topology"] == "2 institutions, 4 devices"
    lan = "lan: up 100 Mbit/s, down 100 Mbit/s, 0.25 ms"
    assert found["links"].startswith(f"wan: up 10 Mbit/s, down 20 Mbit/s; {lan}; enforced by")
    assert found["hardware"].endswith("; no emulated hardware") and "torch" in found["versions"]
    both = facts_of(compose([Run(make_run(tmp_path, tree)) for tree in (LAB, LAB | cross)]))
    assert " ".join(both["cloud"].split()) == (
        "fedavg, institution.rounds 1: fedavg "
        "fedcross, alpha 0.9, institution.rounds 2: fedcross, alpha 0.9"
    )
    assert both["topology"] == found["topology"]


def test_hardware_that_devices_emulate_is_named(tmp_path: Path, make_run: MakeRun) -> None:
    for hardware, words in (
        ({"default": {"slowdown": 2.0, "overhead_s": 0.5}}, "devices emulate other machines"),
        ({"of": {"device-1": {"profile": "raspberry-pi-4"}}}, "devices emulate raspberry-pi-4"),
    ):
        page = compose([Run(make_run(tmp_path, {**LAB, "hardware": hardware}))])
        assert facts_of(page)["hardware"].endswith(words)


@pytest.mark.usefixtures("undrawn")
def test_names_are_whole_and_notes_in_one_box(tmp_path: Path, make_run: MakeRun) -> None:
    names = ["an averaged model of two institutions", "Tempo over the slower of both links"]
    slow = {"links": {"wan": {"up_mbit": 1.0}}, **TEMPO}
    paths = [
        make_run(tmp_path, {**LAB, **tree, "seed": seed}) for tree in ({}, slow) for seed in (1, 2)
    ]
    killed = make_run(tmp_path, {**LAB, "seed": 3}, last="")
    page = compose([Run(path) for path in (*paths, killed)], names)
    text = page.html()
    assert page.title == "5 runs: 2 series" and text.count('class="notes"') == 1
    assert text.count(f"<li>{names[1]}: other links than {names[0]}: ") == 1
    tree = Tree(text)
    assert "was interrupted or killed: 3 of 3 global rounds are done" in tree.words
    means = tree.tables["The series: mean ± standard deviation (n - 1) over the finished runs"]
    phases = tree.tables["Seconds of a global round, mean ± standard deviation (n - 1) over runs"]
    assert [row[0] for row in means] == ["series", *names]
    assert phases[0] == ["phase", *(f"{name}, s" for name in names)]


@pytest.mark.usefixtures("undrawn")
def test_series_of_several_tasks_stand_with_their_tasks(tmp_path: Path, make_run: MakeRun) -> None:
    trees = (LAB, LARGER, LAB | TEMPO, LARGER | TEMPO)
    text = compose([Run(make_run(tmp_path, tree)) for tree in trees]).html()
    four, eight = "2 institutions, 4 devices", "2 institutions, 8 devices"
    means = Tree(text).tables[
        "The series: mean ± standard deviation (n - 1) over the finished runs"
    ]
    assert [row[:2] for row in means[1:]] == [
        [four, "fixed"],
        [eight, "fixed"],
        [four, "tempo"],
        [eight, "tempo"],
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_many_unfinished_runs_counts_them(tmp_path: Path, make_run: MakeRun) -> None:
    paths = [make_run(tmp_path, {**LAB, "seed": seed}, last="") for seed in range(4)]
    words = Tree(compose([Run(path) for path in paths]).html()).words
    assert "4 of 4 runs are not finished; the table of the runs has their states." in words
    assert "was interrupted" not in words


def test_figures_of_several_runs_compare_them_and_their_place_is_printed(
    tmp_path: Path, make_run: MakeRun
) -> None:
    paths = [make_run(tmp_path, {**LAB, "seed": seed}) for seed in (1, 2)]
    out, figures = tmp_path / "new" / "page.html", tmp_path / "other" / "figures"
    done = invoke("report", *paths, "--out", out, "--figures", figures, "--figure-formats", "svg")
    assert done.exit_code == 0 and done.stdout.splitlines() == [str(out), str(figures)]
    names = {path.name for path in figures.iterdir()}
    assert not [name for name in names for path in paths if path.name[-6:] in name]
    assert {
        "accuracy-rounds.svg",
        "budget.svg",
        "series.tex",
        "overview.csv",
        "phases.csv",
    } <= names
    counts = [sum(name.endswith(end) for name in names) for end in (".svg", ".tex")]
    assert done.stderr.splitlines() == [
        "reading 2 runs", f"drawing {counts[0]} figures, svg",
        f"{counts[0]} figures and {counts[1]} tables are in {figures}",
    ]  # fmt: skip


def test_the_demos_picture_is_of_a_machine_without_other_work(
    tmp_path: Path, make_run: MakeRun
) -> None:
    paths = [
        make_run(tmp_path, LAB),
        make_run(tmp_path, {**LAB, "links": {"wan": "lte"}}, accuracies=(0.1, 0.2)),
    ]
    runs = [Run(path) for path in paths]
    for run in runs:
        run.manifest = {**run.manifest, "cpus": 2, "load": 0.2}
    words = re.findall(r">([^<>]+)</text>", picture_of(runs, ["WAN 20", "LTE"]))
    assert {
        "Accuracy over global rounds, %",
        "Seconds of a global round, mean",
        "WAN 20",
        "LTE",
    } <= set(words)
    assert any(word.endswith("2 cores; load before the runs: at most 0.1 a core") for word in words)
    runs[1].manifest = {**runs[1].manifest, "load": 1.5}
    with pytest.raises(ValueError, match=rf"{runs[1].id} began on a busy machine: load 0.8 a core"):
        picture_of(runs, ["WAN 20", "LTE"])


def test_a_report_of_several_runs_is_beside_them(tmp_path: Path, make_run: MakeRun) -> None:
    paths = [make_run(tmp_path, {**LAB, "seed": seed}) for seed in range(6)]
    ends = [path.name[-6:] for path in paths]
    done = invoke("report", *paths[:2])
    assert done.stdout.strip() == str(tmp_path / f"report-{ends[0]}-{ends[1]}.html")
    many = Path(invoke("report", *paths).stdout.strip())
    assert many.parent == tmp_path and re.fullmatch(
        rf"report-{ends[0]}-and-5-more-[0-9a-f]{{8}}\.html", many.name
    )
    assert not list(tmp_path.glob("*/report.html"))
    (tmp_path / "sweep.json").write_text('{"cells": {}}')
    # of a sweep's folder
    assert invoke("report", tmp_path).stdout.strip() == str(tmp_path / "report.html")
    assert invoke("report", *paths[:2]).stdout == done.stdout
    # as a shell expands runs/*
    again = invoke("report", *sorted(tmp_path.iterdir()), "--out", tmp_path / "x.html")
    assert again.exit_code == 0 and again.stdout.strip() == str(tmp_path / "x.html")
    invoke("report", *paths[:2], "--label", "mine", "--out", tmp_path / "x.html")
    assert "<h1>2 runs: mine</h1>" in (tmp_path / "x.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None or shutil.which("pdftotext") is None, reason="no Chromium or pdftotext here"
)
def test_a_printed_report_has_every_row(tmp_path: Path, make_run: MakeRun) -> None:
    lab = {**LAB, "rounds": 90, "topology": {"institutions": 4, "devices": 60}}
    path = make_run(tmp_path, lab, accuracies=[i / 1000 for i in range(1, 91)])
    with (path / "events.jsonl").open("a") as file:
        for i in range(150):
            facts = {"event": "warning", "text": f"mark-{i:03} {'words ' * 9}end-{i:03}"}
            file.write(json.dumps({"time": f"2026-01-01T00:00:00.{i:03}", **facts}) + "\n")
    assert invoke("report", path).exit_code == 0
    pdf = tmp_path / "page.pdf"
    subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--blink-settings=preferredColorScheme=0",
            "--no-pdf-header-footer",
            f"--print-to-pdf={pdf}",
            f"file://{path / 'report.html'}",
        ],
        capture_output=True,
        timeout=100,
        check=True,
    )
    text = subprocess.run(
        ["pdftotext", "-layout", pdf, "-"], capture_output=True, text=True, check=True
    ).stdout
    assert [text.count(f"{word}-{i:03}") for i in range(150) for word in ("mark", "end")] == [
        1
    ] * 300
