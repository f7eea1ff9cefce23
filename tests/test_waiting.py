"""Who waited, in a report: lanes of devices, and busy links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.cloud.records import LinkRecord, to_csv
from fedstrata.deploy.results import waiting
from fedstrata.deploy.results.run import Run
from tests.helpers.figures import boxes_of, drawn, texts, tooltips
from tests.helpers.records import PHASES_S, a_device

ROUND_S = sum(PHASES_S.values())
HOME = "cloud/institution-0"
TREE: dict[str, Any] = {
    "rounds": 250,
    "topology": {"institutions": 1, "devices": 2},
    "links": {"lan": {"up_mbit": 8.0, "down_mbit": 8.0, "delay_ms": 5.0}},
}


@pytest.fixture
def played(tmp_path: Path, make_run: Callable[..., Path]) -> Callable[[int], Run]:
    """Return what makes a run of so many rounds: device-0 trains half of each, device-1 all of the
    first one.
    """

    def play(rounds: int) -> Run:
        path = make_run(tmp_path, TREE, accuracies=[0.5] * rounds)
        rows = [
            a_device(number, f"{HOME}/device-0", train_s=0.4 * ROUND_S, pause_s=0.1 * ROUND_S)
            for number in range(1, 1 + rounds)
        ]
        rows.append(a_device(1, f"{HOME}/device-1", train_s=ROUND_S))
        (path / "devices.csv").write_text(to_csv(rows, header=True))
        half = round(0.5e6 * rounds * ROUND_S)
        links = [
            LinkRecord(
                tier="lan", from_=name, to="institution-0", kind="all", message_bytes=half // share
            )
            for share, name in enumerate(("device-1", "device-0"), 1)
        ]
        (path / "links.csv").write_text(to_csv(links, header=True))
        return Run(path)

    return play


def test_a_cell_is_as_dark_as_its_device_trained_long(played: Callable[[int], Run]) -> None:
    figure = waiting.lanes(played(2))
    assert figure is not None
    canvas = drawn(figure)
    name = "institution-0/device-"
    assert tooltips(canvas) == [
        f"{name}0, global round 1: trained 50 % of the time",
        f"{name}0, global round 2: trained 50 % of the time",
        f"{name}1, global round 1: trained 100 % of the time",
        f"{name}1, global round 2: trained 0 % of the time",
    ]
    assert [box[0] for box in boxes_of(canvas)] == pytest.approx([0.0, ROUND_S] * 2)
    assert [box[2] for box in boxes_of(canvas)] == pytest.approx([ROUND_S] * 4)
    assert texts(figure).count("50 %") == 2  # of the whole run
    assert figure.table is not None
    assert [row[1:] for row in figure.table.rows] == [
        (2, pytest.approx(ROUND_S), pytest.approx(50)),
        (1, pytest.approx(ROUND_S), pytest.approx(50)),
    ]


def test_many_rounds_are_drawn_several_as_one(played: Callable[[int], Run]) -> None:
    figure = waiting.lanes(played(250))
    assert figure is not None
    found = tooltips(drawn(figure))
    assert len(found) == 2 * 84  # of three rounds each, the last one of one
    assert "device-1, global round 1-3: trained 33 % of the time" in found[84]
    assert "global round 250: trained 50 %" in found[83]


def test_a_link_is_busy_while_its_bytes_pass_at_its_rate(
    played: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = played(3)
    both = [("device-1", 50), ("device-0", 25)]  # the busiest first
    rows = [(name, "institution-0", pytest.approx(busy, rel=1e-6)) for name, busy in both]
    assert waiting.links(run).rows == rows
    monkeypatch.setattr(waiting, "LINKS_MOST", 1)
    table = waiting.links(run)
    assert table.rows == rows[:1] and "the busiest 1 of 2" in table.title


def test_without_a_network_there_are_no_lanes(played: Callable[[int], Run]) -> None:
    run = played(1)
    run.direct = True
    assert waiting.lanes(run) is None
