"""The note about a device for which rounds will wait, by the steps of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedstrata.cloud.records import to_csv
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.stragglers import straggler_note
from tests.helpers.records import a_device

PIS = {"device-0": 2.0, "device-1": 2.2, "device-2": 1.8, "device-3": 20.0}


def lab(**tables: Any) -> Experiment:
    topology = {"institutions": 0, "devices": 4}
    return parse({"topology": topology, "training": {"epochs": 2}, **tables})


def ran(
    root: Path, experiment: Experiment, train_s: Mapping[str, float], pause_s: float = 0
) -> str:
    """Leave a run of two global rounds, in which each device trained for so long; return its id."""
    folder = RunFolder.create(root, experiment)
    rows = [
        a_device(
            global_round,
            f"cloud/{device}",
            epochs=2,
            sgd_steps=20,
            train_s=seconds,
            pause_s=pause_s if device == "device-0" else 0.0,
        )
        for global_round in range(2)
        for device, seconds in train_s.items()
    ]
    (folder.path / "devices.csv").write_text(to_csv(rows, header=True))
    return Run(folder.path).id


def test_the_slowest_device_is_named_with_its_step_and_the_remedy(tmp_path: Path) -> None:
    run = ran(tmp_path, lab(), PIS)
    assert straggler_note(lab(), tmp_path) == (
        "device-3 will be the straggler: 20 s a local round by its 1e+03 ms a step, the others 2 s "
        f"(measured in run {run}). Give it fewer samples, or close rounds by "
        'closing.rule = "quorum".'
    )
    more = straggler_note(lab(training={"epochs": 10}), tmp_path)
    assert "100 s a local round" in more, "of this experiment's epochs"


def test_emulated_hardware_is_as_slow_as_that(tmp_path: Path) -> None:
    ran(tmp_path, lab(), {**PIS, "device-3": 2.0}, pause_s=28.0)
    assert straggler_note(lab(), tmp_path).startswith("device-0 will be the straggler: 30 s ")


@pytest.mark.parametrize(
    ("train_s", "tables"),
    [
        ({**PIS, "device-3": 5.0}, {}),
        ({name: seconds / 100 for name, seconds in PIS.items()}, {}),
        ({"device-2": 1.0, "device-3": 20.0}, {}),
        ({**PIS, "elsewhere": 90.0, "device-3": 2.0}, {}),
        (PIS, {"training": {"batch_size": 7}}),
        (PIS, {"model": {"name": "mlp_digits"}}),
        (PIS, {"cloud": {"closing": {"rule": "quorum", "quorum": 2, "deadline_s": 5}}}),
        ({}, {}),
    ],
    ids=["near", "fast", "few", "others", "batches", "model", "quorum", "none"],
)
def test_no_note(train_s: dict[str, float], tables: dict[str, Any], tmp_path: Path) -> None:
    ran(tmp_path, lab(), train_s)
    assert straggler_note(lab(**tables), tmp_path) == ""


def test_an_older_run_counts_and_a_damaged_one_does_not(tmp_path: Path) -> None:
    assert straggler_note(lab(), tmp_path / "none") == ""
    run = ran(tmp_path, lab(), PIS)
    ran(tmp_path, lab(model={"name": "mlp_digits"}), PIS)
    damaged = ran(tmp_path, lab(), PIS).rpartition("-")[2]
    (folder,) = tmp_path.glob(f"*-{damaged}")
    (folder / "devices.csv").write_text("nothing\n1\n")
    assert run in straggler_note(lab(), tmp_path)
