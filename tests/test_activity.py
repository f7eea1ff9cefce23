"""What nodes report of their activity on standard error, at the default log level."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.experiment.reading import parse
from deploy.console import logs
from deploy.simulation.lab import SimulatedLab

TREE = {"rounds": 1, "topology": {"institutions": 1, "devices": 2}, "links": {"check": "off"}}


class Lines(logging.Handler):
    """Handler that keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.found.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler, logger = Lines(), logging.getLogger(logs.ACTIVITY)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.found
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_agents_report_each_step_of_a_run_once(lines: list[str]) -> None:
    outcome = SimulatedLab(parse(TREE), time_limit_s=900.0).run()
    assert outcome.ok, outcome
    run = next(line for line in lines if "preparing" in line).split()[2].rstrip(":")
    for node, parent in (("device-0", "institution-0"), ("device-1", "institution-0"), ("institution-0", "cloud")):
        *_, taking_part, over = own = [line for line in lines if line.startswith(f"{node}: ")]
        assert len(own) == 4
        assert own[0].startswith(f"{node}: connected to broker ") and f"waiting for a run of {parent} " in own[0]
        assert own[1] == f"{node}: run {run}: preparing"
        if parent == "cloud":
            assert taking_part.startswith(f"{node}: run {run}: taking part with 2 of 2 devices, ")
        else:
            assert taking_part.startswith(f"{node}: run {run}: training cnn_digits with ")
        assert taking_part.endswith(" samples")
        assert over == f"{node}: run {run} finished"


@pytest.mark.parametrize(("level", "shown"), [("debug", True), ("warning", True), ("error", False)])
@pytest.mark.parametrize("json_lines", [False, True])
def test_activity_is_shown_unless_only_errors_are(level: str, shown: bool, json_lines: bool) -> None:
    code = (
        f"from deploy.console import logs; logs.begin({level!r}, json_lines={json_lines}); import logging;"
        "logging.getLogger(logs.ACTIVITY).info('device-0: run %s finished', 'r');"
        "logging.getLogger('fedstrata.other').info('nothing') if logs.shows_activity() else None"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    own = [line for line in done.stderr.splitlines() if "device-0" in line]
    assert len(own) == shown
    if shown and json_lines:
        assert json.loads(own[0])["message"] == "device-0: run r finished"
    elif shown:
        assert own[0].endswith(" device-0: run r finished") and "INFO" not in own[0]
