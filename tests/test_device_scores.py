"""Devices score the models that they receive: sums, samples, tables, what a run does by them, and
what is refused.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from torch.nn import functional

from fedstrata.cloud.cloud_agent import evaluator_of
from fedstrata.cloud.evaluator import needs_process
from fedstrata.cloud.records import STATISTICS
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment, RefusedModel, WireError
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models, splits
from fedstrata.common.learning import evaluation as learning
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.limits import (
    ChildLimits,
    TaskLimits,
    check_report,
    limits_below,
    possible_scores,
)
from fedstrata.common.protocol.messages import Key, Manifest, Result, Task
from fedstrata.common.settings.data import check_alike
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.training.scores import (
    TARGETS_MOST,
    ScoredModels,
    ScoreSums,
    bytes_most,
    distribution,
    packed,
    packed_sums,
    summed,
    sums_fit,
    unpacked,
)
from fedstrata.deploy.local.direct import run_in_process
from fedstrata.deploy.local.replay import replayed
from fedstrata.deploy.results.compare import groups_of, table, to_json
from fedstrata.deploy.results.device_scores import figures
from fedstrata.deploy.results.page import compose
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.score_curves import curves
from fedstrata.deploy.results.series import series_of
from fedstrata.deploy.results.whole import score_column
from fedstrata.deploy.simulation.hardware import Durations, NullWorkload, SimulatedHardware
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.sweeps.grid import merged
from fedstrata.deploy.sweeps.measures import sign_of, value_of
from fedstrata.deploy.sweeps.sweep_schema import Measure
from tests.helpers import commands
from tests.helpers.commands import invoke
from tests.helpers.direct import events, resumed_run, run_direct
from tests.helpers.examples import PROFILE, examples, slow
from tests.helpers.plain import first_model, trained, trainer_of
from tests.helpers.records import with_work
from tests.simulation.lab import ScenarioLab

LAB: dict[str, Any] = {
    "name": "scored",
    "seed": 5,
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 5},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 50, "learning_rate": 0.05},
    "institution": {"rounds": 2},
}
TESTED = {"at": "both", "data": "test"}
EXTRA_MOST = 200  # bytes for each device and round, without counts of classes


def played(root: Path, *changes: Mapping[str, Any], stop_after: int = 0) -> Path:
    """Run a lab without a network; with `stop_after` kill it after so many global rounds, and
    resume.
    """
    path = run_direct(root, merged(LAB, *changes), until=stop_after)
    return resumed_run(path) if stop_after else path


def rows(folder: Path, name: str = "rounds.csv") -> list[dict[str, str]]:
    return commands.table(folder / name)


def without_seconds(found: list[dict[str, str]]) -> list[dict[str, str]]:
    costs = ("memory_bytes", "joules", "train_joules", "celsius")
    return [
        {key: cell for key, cell in row.items() if not key.endswith("_s") and key not in costs}
        for row in found
    ]


# Sums


NUMBERS = ["r2", "mean_squared_error", "mean_absolute_error", "binary_accuracy"]


def outputs_and_targets(
    scores: list[str], draw: np.random.Generator, count: int, targets: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if "accuracy" in scores:
        return torch.from_numpy(draw.normal(size=(count, 4))), torch.from_numpy(
            draw.integers(0, 4, count)
        )
    outputs, wanted = draw.normal(size=(2, count, targets))
    if "binary_accuracy" in scores:
        wanted = (wanted > 0).astype(float)
    return torch.from_numpy(outputs), torch.from_numpy(wanted.astype(np.float32))


class Outputs(torch.nn.Linear):
    """A model whose outputs are its inputs."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given.float()


@examples(60)
@given(
    scores=st.just(["accuracy"]) | st.lists(st.sampled_from(NUMBERS), min_size=1, unique=True),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    targets=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_the_sums_of_parts_give_the_scores_of_the_whole(
    scores: list[str], sizes: list[int], targets: int, seed: int
) -> None:
    found, wanted = outputs_and_targets(scores, np.random.default_rng(seed), sum(sizes), targets)
    loss, classes = ("cross_entropy", 4) if "accuracy" in scores else ("mean_squared_error", 0)

    def evaluate(outputs: torch.Tensor, targets: torch.Tensor) -> learning.Evaluation:
        return learning.evaluate(
            Outputs(1, 1),
            outputs,
            labels=targets,
            normalise=lambda rows: rows,
            loss=loss,
            scores=scores,
            classes=classes,
        )

    whole = evaluate(found, wanted)
    parts = zip(torch.split(found, sizes), torch.split(wanted, sizes), strict=True)
    total = summed(evaluate(*part).sums for part in parts)
    assert total is not None and total.samples == whole.sums.samples
    assert total.by(scores) == pytest.approx(whole.scores, rel=1e-6, abs=1e-9)
    assert total.mean_loss == pytest.approx(whole.loss, rel=1e-6)
    assert sums_fit(scores, total.scores) and len(total.scores) <= bytes_most(scores)
    if classes:
        right = found.argmax(1) == wanted
        by_hand = [
            (int((wanted == c).sum()), int(right[wanted == c].sum())) for c in range(classes)
        ]
        assert unpacked(total.classes) == [count for pair in by_hand for count in pair]


def test_r2_of_a_constant_target_is_one_if_it_is_met() -> None:
    assert ScoreSums(3, 0.0, packed_sums([0.0, 0.3, 0.03])).by(["r2"]) == [1.0]
    assert ScoreSums(3, 0.0, packed_sums([0.5, 0.3, 0.03])).by(["r2"]) == [0.0]


@given(scores=st.lists(st.floats(0, 1), min_size=1, max_size=40), higher=st.booleans())
def test_the_distribution_is_that_of_a_plain_twin(scores: list[float], higher: bool) -> None:
    found = distribution(scores, higher=higher)
    assert found is not None
    worst = np.sort(scores)[:: 1 if higher else -1][: math.ceil(len(scores) / 10)]
    assert [found.mean, found.worst, found.spread] == pytest.approx(
        [np.mean(scores), np.mean(worst), np.std(scores)]
    )


@given(
    values=st.lists(st.floats(), min_size=8, max_size=8),
    other=st.lists(st.floats(), min_size=8, max_size=8),
)
def test_no_numbers_from_the_network_raise_an_error(
    values: list[float], other: list[float]
) -> None:
    made = ((loss, packed_sums(sums)) for loss, *sums in (values, other))
    one, two = (ScoreSums(1, *each, classes=packed([2**32 - 1, 7])) for each in made)
    total = one + two
    # of two targets
    scores = [score for each in (one, two, total) for score in each.by(["accuracy", "r2"])]
    assert unpacked(total.classes) == [2**32 - 1, 14]
    over = distribution(scores, higher=True)
    assert over is None or isinstance(over.spread, float)


# The wire


MANIFEST = Manifest("0123456789abcdef", 1024, 1024, b"d" * 8, "fp32", "layout")
RESULT = Result(Key(0, 3, 0), MANIFEST, None, Work(120, 0.5, 1, 12, 1.5, 0.1, 0.0), 12, (), "")
SUMS = ScoreSums(2_000_000, 1234.5, packed_sums([1_900_000.0]), 12.5)
SCORED = ChildLimits(scores=("accuracy",))


def test_scores_cost_few_bytes_of_a_device_at_each_hop() -> None:
    for kind in (RESULT, ChildReport("device-12", Work(120, 0.5, 1, 12, 1.5), 1)):
        sizes = []
        for tests in (None, ScoredModels(SUMS), ScoredModels(SUMS, SUMS)):
            report = with_work(kind, tests=tests)
            message = report if isinstance(report, Result) else replace(RESULT, children=(report,))
            sizes.append(len(serialization.encode(message, "s")))
            assert serialization.decode(serialization.encode(message, "s"))[1] == message
        assert 0 < sizes[1] - sizes[0] <= 40 and sizes[2] - sizes[0] <= 80 < EXTRA_MOST


LIES: Final = (
    {"samples": 0},
    {"samples": 10**11, "loss": -math.inf, "scores": packed_sums([1e11])},
    {"samples": 10**13},
    {"seconds": -1.0},
    {"seconds": math.nan},
    {"classes": b"12345678"},
    {"loss": math.nan},
    {"loss": math.inf},
    {"loss": -math.inf},
    {"loss": 1e300},
    {"scores": b""},
    {"scores": b"123456789"},
    {"scores": packed_sums([1.0, 2.0])},
    {"scores": packed_sums([math.nan])},
    {"scores": packed_sums([-1.0])},
    {"scores": packed_sums([2_000_001.0])},
)


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_scores_that_cannot_be_are_left_out_and_named_and_cost_no_model(
    lie: dict[str, Any],
) -> None:
    wrong, tests = replace(SUMS, **lie), {"a": 2_000_000}
    for sent, kept in (
        (ScoredModels(wrong), None),
        (ScoredModels(SUMS, wrong), ScoredModels(SUMS)),
        (ScoredModels(wrong, SUMS), ScoredModels(None, SUMS)),
        (ScoredModels(SUMS, SUMS), ScoredModels(SUMS, SUMS)),
    ):
        result = with_work(RESULT, tests=sent)
        check_report(result, limits=SCORED)  # which a lie costs no model
        found, unscored = possible_scores({"a": result}, {"a": SCORED}, tests=tests)
        assert found == {"a": with_work(result, tests=kept)}
        assert (unscored == {}) == (sent == kept) and unscored.keys() <= {"a"}
        report = ChildReport("below", Work(tests=sent))
        found, unscored = possible_scores(
            {"a": replace(RESULT, children=(report,))}, {"a": SCORED}, tests=tests
        )
        assert found["a"].children == (with_work(report, tests=kept),) and unscored.keys() == {
            "below"
        } - ({"below"} if sent == kept else set())


def test_scores_of_a_run_whose_devices_score_nothing_are_left_out() -> None:
    result = with_work(RESULT, tests=ScoredModels(SUMS))
    found, unscored = possible_scores({"a": result}, {"a": ChildLimits()}, tests={})
    assert found["a"].work.tests is None and unscored == {
        "a": "no device scores models in this run"
    }


def test_the_devices_below_a_node_have_no_more_test_samples_than_it_published() -> None:
    each = replace(SUMS, samples=60, loss=6.0, scores=packed_sums([30.0]))
    reports = tuple(ChildReport(f"device-{k}", Work(tests=ScoredModels(each))) for k in range(2))
    result = replace(RESULT, children=reports)
    for most, unscored in (
        (120, {}),
        (119, {"a": "the nodes below it report 120 test samples, it has 119"}),
        (0, {}),
    ):
        found, named = possible_scores({"a": result}, {"a": SCORED}, tests={"a": most})
        assert named == unscored
        assert [report.work.tests is None for report in found["a"].children] == [bool(unscored)] * 2


@given(
    samples=st.integers(1, 50), scores=st.permutations(["mean_squared_error", "r2",
    "binary_accuracy"]),
    seed=st.integers(0, 2**32), scale=st.sampled_from([1e-20, 1.0, 1e15]),
)  # fmt: skip
def test_true_sums_are_possible(samples: int, scores: list[str], seed: int, scale: float) -> None:
    draw = np.random.default_rng(seed)
    outputs, wanted = (
        torch.from_numpy(scale * draw.normal(size=(samples, 2)).astype(np.float32))
        for _ in range(2)
    )
    found = learning.evaluate(
        Outputs(1, 1),
        outputs,
        labels=wanted,
        normalise=torch.clone,
        loss="mean_squared_error",
        scores=scores,
    )
    assert found.sums.impossible(scores) == ""


def test_sums_of_r2_have_three_numbers_for_each_target() -> None:
    fits = [
        count
        for count in range(20)
        if sums_fit(["mean_squared_error", "r2"], packed_sums([0.0] * count))
    ]
    assert fits == [4, 7, 10, 13, 16, 19]
    assert not sums_fit(["r2"], packed_sums([0.0] * 3 * (TARGETS_MOST + 1)))


def test_counts_of_classes_are_bounded_by_the_experiment() -> None:
    counted = with_work(RESULT, tests=ScoredModels(replace(SUMS, classes=packed([5, 4] * 10))))
    limits = limits_below(parse({**LAB, "evaluation": {**TESTED, "per_class": True}}), CLOUD)[
        "institution-0"
    ]
    for bounds, unscored in (
        (limits, {}),
        (SCORED, {"a": "its counts of classes are not possible"}),
    ):
        assert possible_scores({"a": counted}, {"a": bounds}, tests={})[1] == unscored
    wrong = with_work(RESULT, tests=ScoredModels(replace(SUMS, samples=-1)))
    with pytest.raises(WireError):
        serialization.decode(serialization.encode(wrong, "s"))


def test_a_task_without_epochs_is_one_of_runs_whose_devices_score() -> None:
    task = Task(Key(1, 3, 0), 0, MANIFEST, None)
    TaskLimits(3, 2, 5, scored=True).check(task)
    for limits, wrong in (
        (TaskLimits(3, 2, 5), task),
        (TaskLimits(2, 2, 5, scored=True), task),
        (TaskLimits(3, 2, 5, scored=True), replace(task, key=Key(1, 3, 1))),
        (TaskLimits(3, 2, 5, scored=True), replace(task, epochs=1)),
    ):
        with pytest.raises(RefusedModel):
            limits.check(wrong)


# Samples


def test_held_out_samples_are_never_trained_on() -> None:
    lab = parse(merged(LAB, {"evaluation": {"at": "devices", "held_out": 0.2}}))
    split = splits.split_of(lab)
    for name, part in zip(lab.tree.devices, split.partitions, strict=True):
        trainer = trainer_of(lab, name)
        local = trainer._prepared.local
        assert local.tests is not None
        trained, tested = set(local.samples.tolist()), set(local.tests.samples.tolist())
        assert not trained & tested and trained | tested == set(part.tolist())
        assert len(tested) == trainer.facts.tests == round(0.2 * len(part))
    again = parse(merged(LAB, {"evaluation": {"at": "devices", "held_out": 0.2}, "seed": 6}))
    assert splits.split_of(again).digest != split.digest  # everything is drawn from the seed


def test_a_device_with_one_sample_trains_on_it() -> None:
    settings = parse({"evaluation": {"at": "devices"}}).evaluation
    assert [settings.taken_of(samples) for samples in (1, 2, 3, 10, 100)] == [0, 1, 1, 1, 10]
    assert len(splits.taken_of(np.array([7]), evaluation=settings, seed=1, node="device-0")) == 0


@given(count=st.integers(0, 200), devices=st.integers(1, 30), seed=st.integers(0, 99))
def test_each_test_sample_is_on_one_device(count: int, devices: int, seed: int) -> None:
    parts = [
        splits.tests_of(count, devices=devices, place=place, seed=seed) for place in range(devices)
    ]
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# Runs


def drawn(seed: int) -> dict[str, Any]:
    """Return a random lab of two to four layers, whose devices have the test set."""
    draw = np.random.default_rng(seed)
    data = {"partition": str(draw.choice(["iid", "quantity", "dirichlet"])), "min_samples": 2}
    made: dict[str, Any] = {
        "seed": int(draw.integers(1000)),
        "rounds": int(draw.integers(1, 4)),
        "data": data,
        "evaluation": {**TESTED, "every": int(draw.integers(1, 3))},
        "model": {"name": str(draw.choice(["mlp_digits", "cnn_digits"]))},
        "training": LAB["training"],
    }
    layers, aggregation = (
        int(draw.integers(2, 5)),
        {"name": str(draw.choice(["fedavg", "fedexp", "median"]))},
    )
    if layers == 2:
        return made | {"topology": {"institutions": 0, "devices": int(draw.integers(1, 9))}}
    if layers == 3:
        institutions = int(draw.integers(1, 4))
        devices = institutions + int(draw.integers(0, 5))
        made["institution"] = {"rounds": int(draw.integers(1, 3)), "aggregation": aggregation}
        return made | {"topology": {"institutions": institutions, "devices": devices}}
    names = [("world", "region"), ("country", "institution"), ("lan", "device")]
    numbers = np.cumsum(draw.integers(1, 3, 3))
    return made | {
        "tiers": [
            {
                "name": name,
                "children": children,
                "number": int(number),
                "rounds": 1 if name == "world" else 2,
            }
            for (name, children), number in zip(names, numbers, strict=True)
        ]
    }


@pytest.mark.parametrize(
    "seed", slow(range(100 if PROFILE == "thorough" else 8), but=[0, 1, 2, 3, 5])
)
def test_devices_with_the_test_set_find_what_the_cloud_finds(seed: int, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse(drawn(seed)), direct=True)
    run_in_process(folder, resume=False, accelerator="cpu", observe=lambda event, facts: None)
    found = rows(folder.path)
    last = len(found)
    for row in found:
        due = (
            int(row["global_round"]) % folder.experiment.evaluation.every == 0
            or int(row["global_round"]) == last
        )
        assert bool(row["accuracy"]) == bool(row["devices_score"]) == due
        assert row["devices_score"] == row["accuracy"]
        if due:
            assert row["devices_samples"] == "359"
            assert float(row["devices_loss"]) == pytest.approx(float(row["loss"]), abs=2e-6)
    for event in events(folder.path, "evaluated"):
        assert event["devices_score"] == event["score"]  # the same number of right ones
        assert event["devices_loss"] == pytest.approx(event["loss"], abs=1e-6)


def test_the_tables_agree_and_training_is_not_changed(tmp_path: Path) -> None:
    plain, scored = played(tmp_path / "plain"), played(tmp_path / "scored", {"evaluation": TESTED})
    models = [load_file(folder / "model.safetensors") for folder in (plain, scored)]
    assert all(np.array_equal(models[0][name], models[1][name]) for name in models[0])
    assert [row["accuracy"] for row in rows(plain)] == [row["accuracy"] for row in rows(scored)]
    assert not {f"devices_{name}" for name in STATISTICS} & rows(plain)[0].keys()
    assert {row["test_samples"] for row in rows(plain, "devices.csv")} == {""}
    for row in rows(scored):
        each = [
            one for one in rows(scored, "devices.csv") if one["global_round"] == row["global_round"]
        ]
        assert len(each) == int(row["devices_scored"]) == 5
        scores, samples = (
            [float(one[f"test_{name}"]) for one in each] for name in ("score", "samples")
        )
        assert sum(samples) == int(row["devices_samples"])
        assert np.average(scores, weights=samples) == pytest.approx(
            float(row["devices_score"]), abs=1e-5
        )
        assert np.mean(scores) == pytest.approx(float(row["devices_mean"]), abs=1e-5)
        assert np.std(scores) == pytest.approx(float(row["devices_spread"]), abs=1e-5)
        assert min(scores) == pytest.approx(float(row["devices_worst"]), abs=1e-5)
        assert all(float(one["evaluate_s"]) > 0 for one in each)


def test_a_run_goes_by_the_scores_of_its_devices(tmp_path: Path) -> None:
    by = {"evaluation": {"at": "devices", "data": "test"}, "rounds": 8}
    whole = played(tmp_path / "whole", by)
    course = [float(row["accuracy"]) for row in rows(whole)]
    assert [row["accuracy"] for row in rows(whole)] == [row["devices_score"] for row in rows(whole)]
    reached = next(r for r, score in enumerate(course) if score >= 0.7)
    stop = {"stop": {"target": 0.7, "best": True}}
    run = Run(played(tmp_path / "stopped", by, stop))
    assert len(run.rounds) == min(reached + 2, 8)  # one more, which brought that score
    assert [row.score for row in run.rounds] == pytest.approx(course[: len(run.rounds)], abs=1e-6)
    (finished,) = events(run.path, "finished")
    assert finished["stopped"] == "target" and finished["best_round"] == 1 + int(
        np.argmax(course[: len(run.rounds)])
    )
    assert (run.path / "best.safetensors").exists()


@pytest.mark.parametrize(("at", "every"), slow([("devices", 1), ("both", 2)], but=[("both", 2)]))
def test_a_resumed_run_has_the_tables_of_an_undisturbed_one(
    at: str, every: int, tmp_path: Path
) -> None:
    changes = {
        "evaluation": {"at": at, "participation": 0.6, "per_class": True, "personalised": True},
        "rounds": 4,
        "cloud": {"checkpoint_every": every},
        "stop": {"best": True},
    }
    folders = [played(tmp_path / str(k), changes, stop_after=k) for k in (0, 1, 3, 4)]
    models = [load_file(folder / "model.safetensors") for folder in folders]
    for folder, model in zip(folders, models, strict=True):
        assert all(np.array_equal(model[name], models[0][name]) for name in model)
        for name in ("rounds.csv", "devices.csv"):
            assert without_seconds(rows(folder, name)) == without_seconds(rows(folders[0], name)), (
                name
            )


def test_devices_that_are_drawn_to_score_are_named(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "evaluation": {"at": "devices", "participation": 0.4, "per_class": True}
    }
    folder = played(tmp_path, changes)
    lab = parse(merged(LAB, changes))
    for row in rows(folder):
        r = int(row["global_round"])
        each = [one for one in rows(folder, "devices.csv") if int(one["global_round"]) == r]
        scored = [one["node"].rpartition("/")[2] for one in each if one["test_samples"]]
        assert scored == [
            n for n in lab.tree.devices if lab.scores(n, global_round=r, local_round=0, last=True)
        ]
        assert len(scored) == int(row["devices_scored"]) == 2
    counts = [(sum(e["samples"]), sum(e["right"])) for e in events(folder, "classes")]
    right = [
        round(float(row["devices_score"]) * int(row["devices_samples"])) for row in rows(folder)
    ]
    assert counts == [
        (int(row["devices_samples"]), hits) for row, hits in zip(rows(folder), right, strict=True)
    ]


def test_devices_without_a_task_have_a_row_if_they_score(tmp_path: Path) -> None:
    selected = {"cloud": {"participation": 0.5}, "institution": {"participation": 0.5}}
    folder = played(tmp_path, selected, {"evaluation": {"at": "devices"}})
    found = rows(folder, "devices.csv")
    scored = [row for row in found if row["test_samples"]]
    assert {int(row["global_round"]) for row in scored} == {1, 2, 3}
    assert any(row["local_rounds"] == "0" for row in scored)


def trained_alone(lab: Experiment, node: str) -> tuple[float, float]:
    """Return score and loss of a device's first training on its test samples, in plain PyTorch."""
    trainer = trainer_of(lab, node)
    layout = trainer.layout
    out, _ = trained(trainer, first_model(lab), epochs=lab.training.epochs)
    data = datasets.load(lab.data)
    module = models.of(lab, inputs=data.inputs).eval()
    module.load_state_dict(
        {name: torch.from_numpy(view.copy()) for name, view in layout.views(out).items()}
    )
    place = lab.tree.devices.index(node)
    tests = splits.tests_of(
        len(data.test_labels), devices=len(lab.tree.devices), place=place, seed=lab.seed
    )
    logits, labels = module(data.normaliser()(data.test_images[tests])), data.test_labels[tests]
    loss = functional.cross_entropy(logits, labels)
    return (logits.argmax(1) == labels).float().mean().item(), loss.item()


def test_devices_score_the_models_that_they_trained(tmp_path: Path) -> None:
    flat = {
        "topology": {"institutions": 0, "devices": 3},
        "institution": {"rounds": 1},
        "rounds": 1,
    }
    changes = {**flat, "evaluation": {"at": "devices", "data": "test", "personalised": True}}
    folder = played(tmp_path / "fedavg", changes)
    lab, found = Run(folder).experiment, rows(folder, "devices.csv")
    for row in found:
        score, loss = trained_alone(lab, row["node"].rpartition("/")[2])
        assert float(row["personalised_score"]) == pytest.approx(score, abs=1e-5)
        assert float(row["personalised_loss"]) == pytest.approx(loss, abs=1e-5)
        assert float(row["personalised_s"]) > 0
        assert row["personalised_score"] != row["test_score"]  # of the global model
    (row,) = rows(folder)
    scores, samples = (
        [float(one[name]) for one in found] for name in ("personalised_score", "test_samples")
    )
    assert (row["personalised_scored"], row["personalised_samples"]) == ("3", "359")
    assert float(row["personalised_score"]) == pytest.approx(
        np.average(scores, weights=samples), abs=1e-5
    )
    expected = [np.mean(scores), min(scores), np.std(scores)]
    assert [float(row[f"personalised_{name}"]) for name in STATISTICS[-3:]] == pytest.approx(
        expected, abs=1e-5
    )
    personal = played(tmp_path / "fedper", changes, {"model": {"personal": ["fc2.*"]}})
    cells = [
        [each["personalised_loss"] for each in rows(one, "devices.csv")]
        for one in (folder, personal)
    ]
    assert cells[0] == cells[1]  # in the first round FedPer trains what FedAvg trains


def test_trained_models_are_scored_in_the_last_local_round_of_those_that_are_drawn(
    tmp_path: Path,
) -> None:
    evaluation = {"at": "devices", "participation": 0.4, "every": 2, "personalised": True}
    changes = {"evaluation": evaluation, "model": {"personal": ["fc2.*"]}}
    lab, folder = parse(merged(LAB, changes)), played(tmp_path, changes)
    for row in rows(folder, "devices.csv"):
        r, node = int(row["global_round"]), row["node"].rpartition("/")[2]
        tasks = {i: lab.scores_trained(node, global_round=r - 1, local_round=i) for i in range(2)}
        assert tasks == {0: False, 1: bool(row["personalised_score"])}
        drawn = lab.scores(node, global_round=r, local_round=0, last=r == 3)
        assert drawn == bool(row["test_score"]) == bool(row["personalised_score"])
    assert [row["personalised_scored"] for row in rows(folder)] == ["0", "2", "2"]


def test_charts_and_tables_name_the_score_with_personal_parts(tmp_path: Path) -> None:
    changes = {"evaluation": {"at": "devices"}, "model": {"personal": ["fc2.*"]}}
    plain, personal = (
        Run(played(tmp_path / name, some)) for name, some in (("plain", {}), ("own", changes))
    )
    drawn = [*curves(series_of([personal])), *figures(personal)]
    scores = [figure.title for figure in drawn if figure.title.startswith("Accuracy")]
    assert len(scores) >= 5 and all(
        title.startswith("Accuracy with personal parts ") for title in scores
    )
    assert score_column([personal]) == "test accuracy with personal parts"
    assert score_column([plain, personal]) == "test accuracy or accuracy with personal parts"


def test_further_scores_have_columns_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "second_choice.py").write_text(
        "def top2(outputs, targets): return float((outputs.argsort(1)[:, -2:] == targets[:, "
        "None]).any(1).mean())\n"
        "def wrong(outputs, targets): return float((outputs.argmax(1) != targets).mean())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {
        "evaluation": {**TESTED, "personalised": True}, "rounds": 2,
        "score": {"also": ["second_choice:top2", "second_choice:wrong"]},
    }  # fmt: skip
    folder = played(tmp_path / "runs", changes)
    for row in rows(folder):
        assert float(row["score_wrong"]) == pytest.approx(1 - float(row["accuracy"]), abs=1e-5)
        assert float(row["score_top2"]) > float(row["accuracy"])
        for kind in ("devices", "personalised"):
            assert float(row[f"{kind}_score_wrong"]) == pytest.approx(
                1 - float(row[f"{kind}_score"]), abs=1e-5
            )
        assert float(row["devices_score_top2"]) == pytest.approx(float(row["score_top2"]), abs=1e-5)
    for row in rows(folder, "devices.csv"):
        for kind in ("test", "personalised"):
            assert float(row[f"{kind}_score_wrong"]) == pytest.approx(
                1 - float(row[f"{kind}_score"]), abs=1e-5
            )
    (finished,) = events(folder, "finished")
    assert finished["score_wrong"] == pytest.approx(1 - finished["accuracy"])
    assert Run(folder).experiment.code_at("device-0")["score.also[0]"] == "second_choice:top2"
    resumed = played(tmp_path / "again", changes, stop_after=1)
    assert without_seconds(rows(resumed)) == without_seconds(rows(folder))


def test_several_models_are_named_as_dispatched(tmp_path: Path) -> None:
    rule = {"cloud": {"aggregation": {"name": "fedcross", "alpha": 0.9}}}
    folder = played(tmp_path, rule, {"evaluation": TESTED})
    for row in rows(folder):
        assert {
            f"dispatched_{name}" for name in STATISTICS
        } <= row.keys() and "devices_score" not in row
        assert row["dispatched_samples"] == "359"
    assert Run(folder).rounds[-1].of_devices("samples") == 359


def test_a_replay_scores_alike(tmp_path: Path) -> None:
    selection = {"cloud": {"selection": {"name": "power_of_choice"}, "participation": 0.5}}
    folder = played(
        tmp_path / "runs", selection, {"evaluation": {"at": "devices", "personalised": True}}
    )
    again = replayed(
        Run(folder), tmp_path / "again", accelerator="cpu", observe=lambda event, facts: None
    )
    for name in ("rounds.csv", "devices.csv"):
        assert without_seconds(rows(again, name)) == without_seconds(rows(folder, name))


def test_numbers_are_scored_by_their_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(300, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.1 * draw.normal(size=300) + 3
    lines = "".join(
        f"{a},{b},{c},{target},{a - c}\n" for (a, b, c), target in zip(x, y, strict=True)
    )
    (tmp_path / "t.csv").write_text(f"a,b,c,y,z\n{lines}")
    (tmp_path / "linear_scored.py").write_text(
        "from torch import nn\ndef build(*, shape, outputs): return nn.Linear(shape[0], outputs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = {
        "dataset": "t.csv",
        "root": str(tmp_path),
        "target_column": ["y", "z"],
        "targets": "numbers",
    }
    lab = (
        LAB
        | {"score": {"also": ["mean_squared_error"]}}
        | {"data": data, "model": {"name": "linear_scored:build"}, "evaluation": TESTED}
    )
    folder = RunFolder.create(tmp_path / "runs", parse(lab), direct=True)
    run_in_process(folder, resume=False, accelerator="cpu", observe=lambda event, facts: None)
    for row in rows(folder.path):
        assert row["accuracy"] == "" and row["score"]
        assert float(row["devices_score"]) == pytest.approx(float(row["score"]), abs=1e-5)
        squared = row["devices_score_mean_squared_error"], row["score_mean_squared_error"]
        assert float(squared[0]) == pytest.approx(float(squared[1]), rel=1e-5)


# Results


def test_reports_comparisons_and_sweeps_have_the_devices_scores(tmp_path: Path) -> None:
    evaluation = {"at": "devices", "personalised": True}
    runs = [Run(played(tmp_path, {"evaluation": evaluation, "seed": seed})) for seed in (1, 2)]
    page = compose(runs[:1])
    (course, order) = (figure for figure in page.figures if figure.name.startswith("device-"))
    assert course.title == "Accuracy of devices over global rounds" and order.table is not None
    heads = {"mean over devices", "worst tenth", "spread over devices"}
    heads |= {f"personalised, {head}" for head in heads}
    together = compose(runs)
    assert heads <= {
        column.name
        for table in together.tables
        for column in table.columns
        if table.name == "series"
    }
    groups = groups_of(series_of(runs), 0.3)
    assert heads <= {column.name for column in table(groups).columns}
    worst = [run.of_devices("worst") for run in runs]
    (group,) = to_json(groups, 0.3)["groups"]
    assert group["devices_worst"]["mean"] == pytest.approx(np.mean(worst))
    own = [run.of_devices("worst", personalised=True) for run in runs]
    assert group["personalised_worst"]["mean"] == pytest.approx(np.mean(own)) and own != worst
    rounds = runs[0].rounds
    for of, statistic in (
        ("worst", "worst"),
        ("devices", "mean"),
        ("spread", "spread"),
        ("samples", "score"),
    ):
        found = value_of(rounds, Measure(of=of), target=None, rounds=3)
        assert found == pytest.approx(100 * (rounds[-1].of_devices(statistic) or math.nan))
        found = value_of(rounds, Measure(of=of, personalised=True), target=None, rounds=3)
        assert found == pytest.approx(
            100 * (rounds[-1].of_devices(statistic, personalised=True) or math.nan)
        )
    course_of = [row.of_devices("spread") or math.nan for row in rounds]
    best = value_of(rounds, Measure(of="spread", best=True), target=None, rounds=3)
    assert best == pytest.approx(100 * min(course_of)) and sign_of(Measure(of="spread")) < 0
    with pytest.raises(InvalidExperiment, match=r"^measure\.of"):
        Measure(name="seconds", of="worst")


# Labs in virtual time


def test_a_killed_device_loses_its_own_scores_alone() -> None:
    closing = {"rule": "quorum", "quorum": 2, "deadline_s": 8.0}
    tree = {
        "rounds": 4,
        "topology": {"institutions": 0, "devices": 4},
        "evaluation": {"at": "devices"},
    }
    second, tables = asyncio.Event(), list[list[dict[str, str]]]()

    def observe(event: str, facts: Mapping[str, Any]) -> None:
        if event == "global_round" and facts["global_round"] == 2:
            second.set()

    async def scenario(lab: ScenarioLab) -> None:
        await second.wait()
        lab.kill("device-3")

    def keep(lab: ScenarioLab) -> None:
        (folder,) = lab.agents.runs.glob("*")
        tables.extend([rows(folder), rows(folder, "devices.csv")])

    lab = ScenarioLab(
        parse({**tree, "cloud": {"closing": closing}}),
        seed=3,
        scenario=scenario,
        observe=observe,
        at_end=keep,
    )
    outcome = lab.run()
    assert outcome.ended[CLOUD] == ""
    rounds, devices = tables
    assert [row["devices_scored"] for row in rounds] == ["4", "3", "3", "3"]
    scored = {(row["global_round"], row["node"]) for row in devices if row["test_score"]}
    nodes = [f"cloud/device-{number}" for number in range(4)]
    assert scored == {(str(r), node) for r in range(1, 5) for node in nodes} - {
        (str(r), nodes[3]) for r in (2, 3, 4)
    }
    assert [row["samples"] for row in devices if row["node"] == nodes[3]][1] and (
        "2",
        nodes[3],
    ) not in scored


def tables_of(victim: str = "", global_round: int = 0) -> list[list[dict[str, str]]]:
    """Return the tables of a small lab, in which a node is killed at its task of a global round,
    and comes back.

    The cloud is killed at the first one.
    """
    tables, reached, tasks = list[list[dict[str, str]]](), asyncio.Event(), set[str]()

    def hook(message: Routed) -> None:
        topic = topics.parse(message.topic)
        if message.body and isinstance(topic, topics.InboxTopic) and not reached.is_set():
            _, content = serialization.decode(message.body)
            if isinstance(content, Task) and content.key.global_round == global_round:
                tasks.add(topic.node)
            if tasks & {victim} or (tasks and victim == CLOUD):
                reached.set()

    async def scenario(lab: ScenarioLab) -> None:
        lab.network.hooks.append(hook)
        await reached.wait()
        if victim:
            lab.kill(victim)
            await asyncio.sleep(0.4)
            lab.start(victim)

    def keep(lab: ScenarioLab) -> None:
        (folder,) = lab.agents.runs.glob("*")
        tables.extend(without_seconds(rows(folder, name)) for name in ("rounds.csv", "devices.csv"))

    tree = {
        "rounds": 2,
        "topology": {"institutions": 2, "devices": 3},
        "institution": {"rounds": 2},
    }
    evaluation = {"at": "devices", "per_class": True, "personalised": True}
    tree |= {"links": {"check": "off"}, "evaluation": evaluation}
    lab = ScenarioLab(parse(tree), seed=3, scenario=scenario, at_end=keep)
    assert lab.run().ended[CLOUD] == ""
    return [
        [{key: cell for key, cell in row.items() if "bytes" not in key} for row in table]
        for table in tables
    ]


VICTIMS: Final = (CLOUD, "institution-0", "device-0")


@pytest.mark.parametrize(  # while it is scored with the next task, and alone
    ("victim", "global_round"),
    slow(product(VICTIMS, (1, 2)), but=[(CLOUD, 2), ("institution-0", 1), ("device-0", 2)]),
)
def test_a_node_killed_while_a_model_is_scored_changes_no_score(
    victim: str, global_round: int
) -> None:
    undisturbed = tables_of()
    assert tables_of(victim, global_round) == undisturbed
    rounds, devices = undisturbed
    assert [row["devices_scored"] for row in rounds] == ["3", "3"]
    assert all(row["test_samples"] and row["personalised_score"] for row in devices)
    assert [row["personalised_scored"] for row in rounds] == ["3", "3"]


def test_a_task_that_only_scores_has_no_seconds_of_training() -> None:
    hardware = SimulatedHardware(NullWorkload(10_000), Durations(), 1)
    member = hardware.pool("device-0").member("device-0")
    # as its share of the seconds
    scored = next(x for x in (k * 1e-6 for k in range(1, 1000)) if x * x / x > x)
    (train_s, scored_s), _ = asyncio.run(member.occupy((0.0, scored), lambda done, of: None))
    assert train_s == 0.0 and scored_s == pytest.approx(scored)


# A cloud without PyTorch


def test_the_cloud_needs_neither_pytorch_nor_data(tmp_path: Path) -> None:
    before = played(tmp_path / "before", {"rounds": 1})
    lab = merged(LAB, {"evaluation": {"at": "devices"}, "model": {"initial": str(before)}})
    experiment = parse(lab)
    assert not needs_process(experiment)
    for changes in ({"evaluation": {"at": "both"}}, {"model": {"initial": None}}):
        assert needs_process(parse(merged(lab, changes)))
    evaluator = evaluator_of(experiment, tmp_path)
    beginning = asyncio.run(evaluator.start())
    tester = learning.ModelTester(experiment)
    assert beginning.layout.digest == tester.layout.digest and np.array_equal(
        beginning.row, tester.first
    )
    assert beginning.initial == tester.initial and beginning.partition == ""
    check_alike(experiment.data, "device-0", partition="0123", clouds=beginning.partition)
    code = (
        "import sys; sys.modules['torch'] = None; from fedstrata.common.experiment.reading import "
        "parse\n"
        "import asyncio, pathlib; import fedstrata.deploy.local.beforehand as b\n"
        "from fedstrata.cloud.cloud_agent import evaluator_of\n"
        f"lab = parse({lab!r}); b.check_cloud(lab, None)\n"
        "print(asyncio.run(evaluator_of(lab, pathlib.Path('.')).start()).layout.digest)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tester.layout.digest


def test_another_file_is_no_beginning_without_pytorch(tmp_path: Path) -> None:
    save_file({"weight": np.zeros((2, 2), np.float32)}, tmp_path / "other.safetensors")
    model = {"name": "mlp_digits", "initial": str(tmp_path / "other.safetensors")}
    experiment = parse({"evaluation": {"at": "devices"}, "model": model})
    with pytest.raises(InvalidExperiment, match=r"^model\.initial .* evaluate at the cloud"):
        asyncio.run(evaluator_of(experiment, tmp_path).start())


# The experiment


def test_the_effective_experiment_has_the_keys_that_count() -> None:
    assert parse({}).model_dump()["evaluation"] == {"at": "cloud", "every": 1, "accelerator": "cpu"}
    devices = parse({"evaluation": {"at": "devices"}})
    assert devices.model_dump()["evaluation"].keys() == {
        "at",
        "every",
        "data",
        "held_out",
        "participation",
        "personalised",
        "per_class",
    }
    assert parse(devices.model_dump(mode="json")).digest == devices.digest


def test_the_end_of_a_run_names_the_score_with_personal_parts(tmp_path: Path) -> None:
    model = {"name": "mlp_digits", "personal": ["fc2.*"]}
    tree = {
        "rounds": 1,
        "topology": {"institutions": 0, "devices": 2},
        "model": model,
        "evaluation": {"at": "devices"},
    }
    (file := tmp_path / "lab.toml").write_text(to_toml(parse(tree)))
    done = invoke("run", file, "--direct", "--runs", tmp_path / "runs")
    assert "test accuracy with personal parts" in done.stdout
