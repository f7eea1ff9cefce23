"""The report's picture of what changed while a run ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.deploy.results import maps, page
from fedstrata.deploy.results.figures import Figure
from fedstrata.deploy.results.run import Run

LAB: dict[str, Any] = {"topology": {"institutions": 2, "devices": 4}}
AVAILABILITY = {"trace": {"changes": {"device-0": [0, 1, 2], "device-1": [0.5]}, "repeat_s": 8}}
Draw = Callable[..., tuple[Figure | None, str]]


@pytest.fixture
def drawn(tmp_path: Path, make_run: Callable[..., Path]) -> Draw:
    """Return what gives the figure of a run with some settings, and its report."""

    def draw(**settings: Any) -> tuple[Figure | None, str]:
        run = Run(make_run(tmp_path, LAB | settings))
        return maps.changes(run), page.compose([run]).html()

    return draw


def test_available_devices_are_on_the_clock_of_the_global_rounds(drawn: Draw) -> None:
    figure, report = drawn(availability=AVAILABILITY)
    assert figure is not None and figure.table is not None
    rows = [row[1:] for row in figure.table.rows if row[0] == "available"]
    # device-1 is away until 0.5 s, device-0 from 1 to 2 s
    assert [count for _, count in rows] == [3.0, 3.0, 4.0]
    assert rows[0][0] == 0.0 and "Devices over time" in report


def test_a_run_without_traces_has_no_such_picture(drawn: Draw) -> None:
    figure, report = drawn()
    assert figure is None and "Devices over time" not in report
