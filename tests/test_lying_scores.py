"""Devices that report scores that cannot be: these are left out and named, and the others' scores
count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.runtime.round import WorkResult
from fedstrata.common.training.array_trainer import LocalTask, Scored, TrainingSite
from fedstrata.common.training.scores import ScoredModels, packed_sums
from fedstrata.deploy.planning.simulated_run import machine_speeds, simulated_run
from fedstrata.deploy.simulation import simulated_computing
from fedstrata.device.jobs import LocalResult
from fedstrata.device.training.tasks import LocalWork
from tests.helpers.commands import table, tensors
from tests.helpers.direct import events, run_direct
from tests.helpers.evaluation import HereEvaluator
from tests.helpers.examples import slow
from tests.helpers.records import with_work
from tests.simulation.trainer import DrawnTrainer

pytestmark = pytest.mark.usefixtures("short_calibration", "warm")

LIES: Final[dict[str, Callable[[ScoredModels], dict[str, Any]]]] = {
    "many samples": lambda _: {"samples": 10**11, "loss": -math.inf, "scores": packed_sums([1e11])},
    "few samples": lambda tests: {"scores": packed_sums([tests.each[0].samples + 1.0])},
    "twice its samples": lambda tests: {"samples": 2 * tests.each[0].samples},
    "not a number": lambda _: {"loss": math.nan},
}


def lab(institutions: int, **more: Any) -> dict[str, Any]:
    return {
        "name": "lied", "rounds": 3, "topology": {"institutions": institutions, "devices": 4},
        "model": {"name": "mlp_digits"}, "training": {"learning_rate": 0.5, "batch_size": 200},
        "evaluation": {"at": "devices", "data": "test"}, "stop": {"target": 0.999}, **more,
    }  # fmt: skip


def directly(root: Path, tree: dict[str, Any]) -> Path:
    return run_direct(root, tree)


def by_agents(root: Path, tree: dict[str, Any]) -> Path:
    experiment = parse(tree)
    facts = machine_speeds(experiment, of=None)
    folder = RunFolder.create(root, experiment, simulated=facts)
    simulated_run(folder, facts, workers=1).run()
    return folder.path


WAYS: Final = {"direct": directly, "agents": by_agents}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_computing, "Evaluator", HereEvaluator)


def left_out(folder: Path) -> list[str]:
    reasons = [event["reason"] for event in events(folder, "warning")]
    return [reason for reason in reasons if "left out" in reason]


@pytest.mark.parametrize(
    ("lie", "institutions", "way"),
    slow(
        product(LIES, (0, 2), WAYS),
        but=[
            ("many samples", 2, "agents"),
            ("few samples", 2, "direct"),
            ("twice its samples", 0, "direct"),
            ("twice its samples", 2, "direct"),
            ("not a number", 0, "agents"),
        ],
    ),
)
def test_a_device_does_not_own_the_score(
    lie: str, institutions: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, tree = WAYS[way], lab(institutions)
    honest = play(tmp_path / "honest", tree)
    honestly = LocalWork.result

    def lying(self: LocalWork, result: LocalResult) -> WorkResult:
        found = honestly(self, result)
        if (
            self._node != "device-1"
            or found.work.tests is None
            or found.work.tests.received is None
        ):
            return found
        received = replace(found.work.tests.received, **LIES[lie](found.work.tests))
        return with_work(found, tests=ScoredModels(received))

    monkeypatch.setattr(LocalWork, "result", lying)
    lied = play(tmp_path / "lied", tree)
    rows, devices = table(lied / "rounds.csv"), table(lied / "devices.csv")
    assert len(rows) == 3 and tensors(lied) == tensors(honest)
    assert [row["devices_scored"] for row in rows] == ["3"] * 3
    for row in rows:
        others = [
            (int(each["test_samples"]), float(each["test_score"]), float(each["test_loss"]))
            for each in table(honest / "devices.csv")
            if each["global_round"] == row["global_round"] and not each["node"].endswith("device-1")
        ]
        samples = sum(count for count, _, _ in others)
        assert int(row["devices_samples"]) == samples
        right = sum(count * score for count, score, _ in others)
        assert float(row["accuracy"]) == pytest.approx(right / samples, abs=1e-5)
        assert float(row["loss"]) == pytest.approx(
            sum(n * loss for n, _, loss in others) / samples, abs=1e-4
        )
    assert not any(each["test_score"] for each in devices if each["node"].endswith("device-1"))
    (named,) = left_out(lied)
    assert named.startswith("device-1's scores are left out: ")


OWN: Final[dict[str, Any]] = {
    "name": "owned",
    "rounds": 2,
    "evaluation": {"at": "devices"},
    "training": {
        "trainer": {"name": "tests.simulation.trainer:DrawnTrainer", "columns": 8, "silent": False}
    },
}


@pytest.mark.parametrize("institutions", [0, 2])
def test_a_trainer_that_knows_its_tests_does_not_own_the_score(
    institutions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {**OWN, "topology": {"institutions": institutions, "devices": 4}}
    honest = run_direct(tmp_path / "honest", tree)
    honestly = DrawnTrainer.evaluate

    def lying(self: DrawnTrainer, arrays: dict[str, Any], task: LocalTask) -> Scored:
        found = honestly(self, arrays, task)
        return found._replace(samples=10**9, score=1.0) if task.node == "device-1" else found

    monkeypatch.setattr(DrawnTrainer, "evaluate", lying)
    lied = run_direct(tmp_path / "lied", tree)
    assert tensors(lied) == tensors(honest)
    assert [row["devices_samples"] for row in table(honest / "rounds.csv")] == ["18", "18"]
    assert [row["devices_samples"] for row in table(lied / "rounds.csv")] == ["14", "14"]
    (named,) = left_out(lied)
    assert named.startswith(
        "device-1's scores are left out: it reports 1000000000 test samples, it has "
    )


def test_devices_that_do_not_know_their_tests_score_beside_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An institution then publishes no number: the sum of the known ones would be too small."""
    honestly = DrawnTrainer.prepare

    def some(self: DrawnTrainer, site: TrainingSite) -> int:
        found = honestly(self, site)
        self.tests *= site.node != "device-1"
        return found

    monkeypatch.setattr(DrawnTrainer, "prepare", some)
    folder = run_direct(tmp_path, {**OWN, "topology": {"institutions": 2, "devices": 4}})
    assert [row["devices_samples"] for row in table(folder / "rounds.csv")] == ["18", "18"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("institutions", [0, 2])
def test_devices_that_all_report_what_cannot_be_end_no_run(
    institutions: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honestly = LocalWork.result

    def lying(self: LocalWork, result: LocalResult) -> WorkResult:
        found = honestly(self, result)
        if found.work.tests is None or found.work.tests.received is None:
            return found
        return with_work(
            found, tests=ScoredModels(replace(found.work.tests.received, loss=math.nan))
        )

    monkeypatch.setattr(LocalWork, "result", lying)
    folder = WAYS[way](tmp_path, lab(institutions))
    rows = table(folder / "rounds.csv")
    assert [(row["accuracy"], row["devices_scored"]) for row in rows] == [("", "0")] * 3
    found = [event["reason"] for event in events(folder, "warning")]
    assert sum("left out" in reason for reason in found) == 4
    assert found.count("no device has a score of the model after global round 1") == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("institutions", [0, 2])
@pytest.mark.parametrize("at", ["devices", "both"])
def test_a_run_whose_devices_have_no_test_samples_is_refused_before(
    at: str, institutions: int, way: str, tmp_path: Path
) -> None:
    tree = lab(institutions, evaluation={"at": at}, stop={})
    tree["data"] = {
        "dataset": "synthetic",
        "samples": 4,
        "test_samples": 5,
        "classes": 2,
        "image_shape": [1, 8, 8],
    }
    with pytest.raises(
        InvalidExperiment, match=rf"^evaluation\.at = '{at}': no device has test samples\. Use"
    ):
        WAYS[way](tmp_path, tree)
