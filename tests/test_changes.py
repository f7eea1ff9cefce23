"""The report's picture of what changed while a run ran."""

from __future__ import annotations

from typing import Any

import pytest

from common.experiment.reading import parse
from deploy.results import maps, page, paper
from deploy.results.figures import Figure
from deploy.results.run import Run
from deploy.simulation.hardware import Durations
from deploy.simulation.lab import SimulatedLab

LAB: dict[str, Any] = {
    "rounds": 2,
    "topology": {"institutions": 2, "devices": 4},
    "links": {"check": "off"},
    "transfer": {"idle_s": 20.0, "keepalive_s": 5},
}
AVAILABILITY = {"trace": {"changes": {"device-0": [0, 1, 4], "device-1": [0.5]}, "repeat_s": 8}}
LINK = {"trace": {"seconds": [0, 1], "up_mbit": [8, 2], "down_mbit": [16, 4]}}


def drawn(**settings: Any) -> tuple[Figure | None, str]:
    """Return the figure of a simulated run, and its report."""
    found: list[tuple[Figure | None, str]] = []

    def read(lab: SimulatedLab) -> None:
        run = Run(next(lab.agents.runs.iterdir()))
        found.append((maps.changes(run), page.compose([run])[0].html("run")))

    experiment = parse(LAB | settings)
    assert SimulatedLab(experiment, seed=3, model_bytes=400, durations=Durations(spread=0.0), at_end=read).run().ok
    return found[0]


def test_devices_and_links_are_on_the_clock_of_the_global_rounds() -> None:
    figure, report = drawn(availability=AVAILABILITY, links={"check": "off", "wan": LINK})
    assert figure is not None and figure.table is not None
    rows = [row for row in figure.table.rows if row[0] == "available devices"]
    assert [(row[2], row[3]) for row in rows[:4]] == [(0.0, 3.0), (0.5, 4.0), (1.0, 3.0), (4.0, 4.0)]
    (first, *_) = [row for row in figure.table.rows if row[1] == "down"]
    assert first == ("links of institution-0 and 1 more, Mbit/s", "down", 0.0, pytest.approx(16.0))
    assert figure.svg().count("<title>global round") == 2 and "Changes over time" in report
    assert paper.render(figure, ["svg"])["svg"].startswith(b"<?xml")


def test_a_run_without_traces_has_no_such_picture() -> None:
    figure, report = drawn()
    assert figure is None and "Changes over time" not in report


def test_changes_of_many_devices_are_sampled() -> None:
    times = maps._times([lambda t: t + 0.001], 10.0)
    assert len(times) == maps.SAMPLES and times[-1] < 10.0
