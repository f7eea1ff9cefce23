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

from docs.tools.runs_picture import drawn as picture_of
from fedstrata.common.settings.training import Score
from fedstrata.deploy.results.device_scores import score_axis
from fedstrata.deploy.results.figures import Point
from fedstrata.deploy.results.page import compose
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.score_curves import mean_curve
from tests.golden import LAB
from tests.helpers.commands import invoke
from tests.test_report import CHROMIUM, Tree

MakeRun = Callable[..., Path]
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
def test_a_report_of_many_unfinished_runs_counts_them(tmp_path: Path, make_run: MakeRun) -> None:
    paths = [make_run(tmp_path, {**LAB, "seed": seed}, last="") for seed in range(4)]
    words = Tree(compose([Run(path) for path in paths]).html()).words
    assert "4 of 4 runs are not finished; the table of the runs has their states." in words
    assert "was interrupted" not in words


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


@pytest.mark.usefixtures("undrawn")
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
