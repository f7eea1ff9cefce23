"""The report's picture of what changed while a run ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.results import maps, page, paper
from deploy.results.figures import Figure
from deploy.results.run import Run

LAB: dict[str, Any] = {"topology": {"institutions": 2, "devices": 4}}
AVAILABILITY = {"trace": {"changes": {"device-0": [0, 1, 4], "device-1": [0.5]}, "repeat_s": 8}}
LINK = {"trace": {"seconds": [0, 1], "up_mbit": [8, 2], "down_mbit": [16, 4]}}
Draw = Callable[..., tuple[Figure | None, str]]


@pytest.fixture
def drawn(tmp_path: Path, make_run: Callable[..., Path]) -> Draw:
    """Return what gives the figure of a run with some settings, and its report."""

    def draw(**settings: Any) -> tuple[Figure | None, str]:
        run = Run(make_run(tmp_path, LAB | settings))
        return maps.changes(run), page.compose([run])[0].html("run")

    return draw


def test_devices_and_links_are_on_the_clock_of_the_global_rounds(drawn: Draw) -> None:
    figure, report = drawn(availability=AVAILABILITY, links={"wan": LINK})
    assert figure is not None and figure.table is not None
    rows = [row for row in figure.table.rows if row[0] == "available devices"]
    assert [(row[2], row[3]) for row in rows] == [(0.0, 3.0), (0.5, 4.0), (1.0, 3.0), (4.0, 4.0)]
    (first, *_) = [row for row in figure.table.rows if row[1] == "down"]
    assert first == ("links of institution-0 and 1 more, Mbit/s", "down", 0.0, pytest.approx(16.0))
    assert figure.svg().count("<title>global round") == 3 and "Changes over time" in report
    assert paper.render(figure, ["svg"])["svg"].startswith(b"<?xml")


def test_a_run_without_traces_has_no_such_picture(drawn: Draw) -> None:
    figure, report = drawn()
    assert figure is None and "Changes over time" not in report


def test_changes_of_many_devices_are_sampled(drawn: Draw) -> None:
    figure, _ = drawn(availability={"trace": {"changes": {"device-0": [0, 0.0005]}, "repeat_s": 0.001}})
    assert figure is not None and figure.table is not None and len(figure.table.rows) == maps.SAMPLES
    assert 4.7 < max(float(str(row[2])) for row in figure.table.rows) < 4.74  # the run's seconds
