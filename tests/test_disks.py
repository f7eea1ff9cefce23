"""Full and read-only disks: a run waits, and what cannot wait ends with one line."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import StorageFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host import files
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.console.reporting import reporting
from tests.helpers.commands import DEMO, fedstrata, invoke, table
from tests.helpers.disks import Disk, disk
from tests.helpers.records import a_global_round
from tests.simulation.lab import Scenario, ScenarioLab

SMALL: Mapping[str, Any] = {
    "name": "disks",
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 4},
    "links": {"check": "off"},
    "transfer": {"idle_s": 30.0},
}


def test_rows_and_events_wait_for_room(tmp_path: Path) -> None:
    with disk(tmp_path / "disk") as small:
        folder = RunFolder.create(small.path, parse({}))
        folder.event("before", {})
        small.fill()
        for number in range(300):  # more than the last page of a file takes
            folder.event("full", {"number": number, "text": "x" * 100})
        folder.add_round(a_global_round(1, None))
        folder.complete_round(a_global_round(1, 0.5))
        with pytest.raises(
            StorageFailed, match=r"^file = '.*events.jsonl': No space left on device\. Make room"
        ):
            folder.catch_up()
        small.empty()
        folder.catch_up()
        events = [
            json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()
        ]
        assert [event.get("number") for event in events] == [None, *range(300)]
        assert [row["accuracy"] for row in table(folder.path / "rounds.csv")] == ["0.5"]


def lab_on(
    small: Disk, on_event: Callable[[str], None], scenario: Scenario | None = None
) -> tuple[ScenarioLab, list[tuple[str, str]]]:
    """Return a lab whose runs are on a disk, and the events that it will have reported."""
    events: list[tuple[str, str]] = []

    def observe(event: str, facts: Mapping[str, object]) -> None:
        events.append((event, str(facts.get("reason", ""))))
        on_event(event)

    lab = ScenarioLab(parse(SMALL), observe=observe, scenario=scenario)
    lab.agents.runs.symlink_to(small.path)
    return lab, events


def test_a_run_waits_for_room(tmp_path: Path) -> None:
    with disk(tmp_path / "disk") as small:
        full = asyncio.Event()

        def on_event(event: str) -> None:
            if event == "global_round" and len([name for name, _ in events if name == event]) == 2:
                small.fill()
            elif event == "warning":
                full.set()

        async def make_room(lab: ScenarioLab) -> None:
            await full.wait()
            await asyncio.sleep(25)  # of virtual time, nearly idle_s
            small.empty()

        lab, events = lab_on(small, on_event, make_room)
        outcome = lab.run()
        assert outcome.ok, outcome
        assert outcome.digest == ScenarioLab(parse(SMALL)).run().digest
        (warning,) = [reason for event, reason in events if event == "warning"]
        assert (
            "No space left on device. Make room" in warning and "waits for it, for 30 s" in warning
        )
        assert [row["global_round"] for row in outcome.rounds] == ["1", "2", "3"]
        (path,) = small.path.glob("*/events.jsonl")
        written = [json.loads(line)["event"] for line in path.read_text().splitlines()]
        assert [event for event in written if event != "plan"] == [
            event for event, _ in events if event != "status"
        ]


def test_a_disk_that_stays_full_ends_the_run_with_one_line(tmp_path: Path) -> None:
    with disk(tmp_path / "disk") as small:
        lab, _ = lab_on(small, lambda event: small.fill() if event == "global_round" else None)
        outcome = lab.run()
    assert outcome.ended["cloud"].startswith("StorageFailed: file = ")
    assert "No space left on device. Make room on that disk." in outcome.ended["cloud"]
    assert outcome.errors == () and "\n" not in outcome.ended["cloud"]
    assert 30 <= outcome.virtual_s < 120


def test_an_institution_waits_for_room_for_its_rules_state() -> None:
    experiment = parse(SMALL | {"institution": {"aggregation": {"name": "fedadp"}}})

    async def fill(lab: ScenarioLab) -> None:
        while not list(small.path.glob("*/*/states/*/facts.json")):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        small.fill()
        await asyncio.sleep(20)  # of virtual time, less than idle_s
        small.empty()

    lab = ScenarioLab(experiment, scenario=fill)
    (lab.agents.path / "spool").mkdir()
    with disk(lab.agents.path / "spool" / "institution-0") as small:
        outcome = lab.run()
    assert outcome.ok, outcome
    assert outcome.digest == ScenarioLab(experiment).run().digest
    (warning,) = [each for each in outcome.warnings if "states" in each]
    assert (
        "No space left on device. Make room on that disk. The run waits for it, for 30 s."
        in warning
    )


@pytest.mark.parametrize("write", ["spool", "runs", "resume"])
def test_a_read_only_folder_is_one_line(write: str, tmp_path: Path) -> None:
    with disk(tmp_path / "disk") as small:
        folder = RunFolder.create(small.path, parse({}))
        folder.release()
        small.protect()
        if write == "spool":
            with pytest.raises(
                StorageFailed, match=r"--spool = .*: Read-only file system\. Name a folder"
            ) as failed:
                Spool.open(small.path / "spool", run="r", node="n")
            assert failed.value.exit_code == 6
        elif write == "runs":
            done = invoke("run", DEMO, "--direct", "--runs", small.path)
            assert done.exit_code == 6 and done.stderr.splitlines()[-1] == (
                f"fedstrata: --runs = '{small.path}': Read-only file system. Name another folder."
            )
            assert "Traceback" not in done.stderr
        else:
            with pytest.raises(
                StorageFailed, match=r"file = '.*experiment.toml': Read-only file system\. Make"
            ):
                RunFolder.reopen(folder.path)


@pytest.mark.slow
def test_a_lab_of_processes_on_a_full_disk_ends_with_one_line(tmp_path: Path) -> None:
    with disk(tmp_path / "disk") as small:
        small.fill()
        done = fedstrata("run", DEMO, "--runs", small.path, null=True)
    assert done.returncode == 6 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fedstrata: file = ")
    assert done.stderr.count("No space left on device. Make room on that disk.") == 1


def test_a_full_disk_that_a_command_meets_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, reporting():
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/fedstrata-x")
    assert ended.value.exit_code == 6
    assert capsys.readouterr().err == (
        "fedstrata: file = '/tmp/fedstrata-x': No space left on device. Make room on that disk.\n"
    )
    with pytest.raises(FileNotFoundError), reporting():
        raise FileNotFoundError(errno.ENOENT, "No such file", "/x")


def test_retries_end_with_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RETRY_S", 0.0)
    left, warnings = [3], list[str]()

    async def write() -> None:
        left[0] -= 1
        if left[0]:
            raise StorageFailed("file", "f", "full", "Make room.")

    asyncio.run(files.until_written(write, patience_s=60.0, warn=warnings.append))
    assert left == [0] and warnings == [
        "file = 'f': full. Make room. The run waits for it, for 60 s."
    ]
