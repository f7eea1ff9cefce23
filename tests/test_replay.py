"""Replays: a run that depended on time is repeated from its recorded decisions, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.deploy.local.replay import largest_difference, replayed
from fedstrata.deploy.results.run import Run
from tests.helpers.commands import DEMO, fedstrata, invoke, run_lab, table, tensors
from tests.helpers.direct import run_direct
from tests.helpers.examples import slow
from tests.simulation.lab import ScenarioLab

pytestmark = pytest.mark.usefixtures("warm")

TINY: Final[dict[str, Any]] = {
    "seed": 3,
    "rounds": 3,
    "topology": {"institutions": 3, "devices": 9},
    "data": {
        "dataset": "synthetic",
        "classes": 3,
        "image_shape": [1, 8, 8],
        "samples": 180,
        "test_samples": 20,
    },
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 2000, "learning_rate": 0.2},
    "cloud": {"closing": {"rule": "quorum", "quorum": 1, "deadline_s": 60}},
    "institution": {"rounds": 2, "closing": {"rule": "quorum", "quorum": 2, "deadline_s": 60}},
}
Plan = dict[str, Any]


def replay(path: Path) -> Path:
    return replayed(Run(path), path.parent, accelerator="cpu", observe=lambda event, facts: None)


def plans(path: Path) -> list[Plan]:
    lines = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "plan"]


def decisions(path: Path) -> dict[tuple[str, int], Plan]:
    """Return what the plans record of each round, the last time that it was played."""
    names = ("taking_part", "without", "unreported")
    return {
        (one["node"], one["node_round"]): {name: one[name] for name in names if name in one}
        for one in plans(path)
    }


def change(path: Path, edit: Callable[[Plan], Plan | None]) -> None:
    """Change the plans of a recorded run; those for which `edit` returns None are removed."""
    kept = []
    for line in (path / "events.jsonl").read_text().splitlines():
        event: Plan | None = json.loads(line)
        assert event is not None
        event = edit(event) if event["event"] == "plan" else event
        kept += [] if event is None else [json.dumps(event)]
    (path / "events.jsonl").write_text("\n".join(kept) + "\n")


def without(event: Plan) -> Plan | None:
    """Leave out two devices and one institution, of which a device was not ready at first."""
    at = event["node"], event["node_round"]
    if at in (("institution-2", 2), ("institution-2", 3)):
        return None  # it is not reported
    changes: dict[tuple[str, int], Plan] = {
        ("cloud", 1): {"without": ["institution-2"]},
        ("institution-0", 1): {"without": ["device-1"], "unreported": ["device-1"]},
        ("institution-1", 4): {"without": ["device-3"]},
    }
    return event | changes.get(at, {})


@pytest.mark.parametrize("rule", slow(["fedavg", "fedcross", "fedadp"], but=["fedcross"]))
def test_a_replay_takes_part_and_leaves_out_as_recorded(rule: str, tmp_path: Path) -> None:
    aggregation = {"institution": {**TINY["institution"], "aggregation": {"name": rule}}}
    undisturbed = run_direct(tmp_path, TINY | aggregation)
    assert tensors(replay(undisturbed)) == tensors(undisturbed)
    change(undisturbed, without)
    disturbed = replay(undisturbed)
    assert decisions(disturbed) == decisions(undisturbed)
    assert [row["missing"] for row in table(disturbed / "rounds.csv")] == ["", "institution-2", ""]
    assert tensors(disturbed) != tensors(undisturbed)
    assert tensors(replay(disturbed)) == tensors(disturbed)
    difference = largest_difference(disturbed, undisturbed)
    assert difference is not None and 0 < difference < 1


def test_a_device_that_is_left_out_leaves_no_trace(tmp_path: Path) -> None:
    """Without one of two devices in each round the run is that of the other device alone, but for
    the samples.
    """
    tree = {**TINY, "rounds": 2, "topology": {"institutions": 1, "devices": 2}}
    tree["institution"] = {"closing": {"rule": "quorum", "quorum": 1, "deadline_s": 60}}
    both = run_direct(tmp_path, tree)
    change(
        both, lambda event: event if event["node"] == "cloud" else event | {"without": ["device-1"]}
    )
    alone = replay(both)
    trained = [row["node"] for row in table(alone / "devices.csv") if int(row["local_rounds"])]
    assert trained == ["cloud/institution-0/device-0"] * 2
    weights = [one["weights"] for one in plans(alone) if one["node"] == "institution-0"]
    assert weights == [{"device-0": 1.0}] * 2
    done = invoke("replay", both, "--runs", tmp_path / "again")
    assert (
        done.exit_code == 1
        and "another model: its values differ by up to 0." in done.stdout.splitlines()[-1]
    )


def test_a_selection_by_durations_is_replayed(tmp_path: Path) -> None:
    oort = {"participation": 0.67, "selection": {"name": "oort", "cut_off": 0.01}}
    one = run_direct(tmp_path, TINY | {"rounds": 5, "cloud": oort, "institution": oort})
    again = replay(one)
    assert decisions(again) == decisions(one) and tensors(again) == tensors(one)


def test_a_simulated_lab_records_whose_result_came_too_late() -> None:
    """A device that trains for long is left out by the quorum, and its samples are known all the
    same.
    """
    tree = TINY | {"links": {"check": "off"}, "topology": {"institutions": 2, "devices": 6}}
    tree["institution"] = {"rounds": 2, "closing": {"rule": "quorum", "quorum": 2, "deadline_s": 5}}
    tree["hardware"] = {"of": {"device-2": {"overhead_s": 40.0}}}
    found: list[Plan] = []

    def at_end(lab: ScenarioLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        found.extend(plans(folder))

    outcome = ScenarioLab(parse(tree), seed=1, model_bytes=10_000, at_end=at_end).run()
    assert outcome.ok, outcome.result
    left_out = {(one["node"], tuple(one.get("without", ()))) for one in found}
    assert ("institution-0", ("device-2",)) in left_out
    assert {one["node_round"] for one in found if one["node"] == "institution-1"} == set(range(6))


def leave_out_the_first_used(event: Plan) -> Plan:
    return event if event["node"] == "cloud" else event | {"without": [min(event["weights"])]}


@pytest.mark.slow
def test_a_lab_of_processes_with_quorums_and_a_slow_device_is_replayed(tmp_path: Path) -> None:
    recorded = run_lab(
        DEMO,
        tmp_path,
        "rounds=4",
        "topology.devices=9",
        "training.batch_size=100",
        'institution={rounds=2, closing={rule="quorum", quorum=2, deadline_s=0.3}}',
        'cloud={closing={rule="quorum", quorum=1, deadline_s=0.1}}',
        'hardware.of={device-1="raspberry-pi-4"}',
    )
    assert any("without" in found for found in decisions(recorded).values())
    done = fedstrata("replay", recorded, "--runs", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "the same model, bit for bit"), (
        done.stderr
    )
    change(recorded, leave_out_the_first_used)
    done = fedstrata("replay", recorded, "--runs", tmp_path, "--format", "json")
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and last["largest_difference"] > 0


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    path = run_direct(tmp_path, TINY | {"rounds": 1})
    change(path, lambda event: None if event["node"] == "institution-1" else event)
    with pytest.raises(
        InvalidExperiment, match=r"it has no plan of institution-1's round 0.*cannot be replayed"
    ):
        replay(path)
    (path / "events.jsonl").write_text(
        (path / "events.jsonl").read_text().replace('"finished"', '"failed"')
    )
    done = invoke("replay", path, "--runs", tmp_path)
    assert done.exit_code == 4 and "not finished. Resume it first." in done.stderr
