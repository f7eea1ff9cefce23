"""Where a run starts from and when it ends: `model.initial` and `[stop]`."""

from __future__ import annotations

import json
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.settings.stopping import Course, Stop, StopReason, as_written
from fedstrata.common.settings.training import Score
from tests.helpers.commands import table
from tests.helpers.direct import direct_run, resumed_run

LAB: dict[str, Any] = {
    "rounds": 12, "topology": {"institutions": 2, "devices": 4}, "model": {"name": "mlp_digits"},
    "data": {"dataset": "digits"}, "training": {"learning_rate": 0.5, "batch_size": 100},
}  # fmt: skip


# The course of the evaluations

EVALUATIONS = st.lists(
    st.tuples(st.sampled_from([0.1, 0.1000001, 0.2, 0.5, nan]), st.floats(0, 9)), max_size=12
)


@given(
    found=EVALUATIONS,
    monitor=st.sampled_from(["score", "loss"]),
    least=st.sampled_from([0.0, 0.05, 0.2]),
    patience=st.integers(1, 4),
    better=st.sampled_from(["higher", "lower"]),
)
def test_a_course_is_its_definition(
    found: list[tuple[float, float]], monitor: Any, least: float, patience: int, better: Any
) -> None:
    score = Score(name="mine:score", better=better)
    course = Course(Stop(monitor=monitor, min_delta=least, patience=patience), score)
    best, value, since, ended = 0, nan, 0, False
    for r, (one, loss) in enumerate(found, 1):
        new = as_written(one if monitor == "score" else loss)
        gain = new - value if monitor == "score" and better == "higher" else value - new
        improved = (best == 0 and not isnan(new)) or gain > least
        best, value, since = (r, new, 0) if improved else (best, value, since + 1)
        assert course.take(r, score=one, loss=loss) is improved
        ended = ended or since >= patience
        assert course.best == best and (course.ended is StopReason.PATIENCE) == ended


def test_a_target_ends_a_run_and_a_resumed_run_decides_by_the_digits_of_its_table() -> None:
    course = Course(Stop(target=0.5), Score())
    course.take(1, score=0.49, loss=1.0)
    assert course.ended is None
    course.take(2, score=0.49999999, loss=1.0)  # 0.5 in rounds.csv
    assert course.ended is StopReason.TARGET


# Runs


def new(root: Path, tree: dict[str, Any], more: dict[str, Any] | None = None) -> RunFolder:
    return RunFolder.create(root, parse(LAB | tree | (more or {})), direct=True)


def rows(folder: RunFolder) -> list[dict[str, str]]:
    return table(folder.path / "rounds.csv")


def finished(folder: RunFolder) -> dict[str, Any]:
    events = map(
        json.loads, (folder.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    )
    found: dict[str, Any] = next(event for event in events if event["event"] == "finished")
    return found


def same_arrays(one: Path, other: Path) -> bool:
    found, wanted = load_file(one), load_file(other)
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name], wanted[name]) for name in found
    )


PATIENT = {"stop": {"patience": 2, "min_delta": 0.02, "best": True}}


def test_patience_ends_a_run_and_its_best_model_stays(tmp_path: Path) -> None:
    whole = direct_run(new(tmp_path / "whole", PATIENT))
    facts, found = finished(whole), rows(whole)
    assert facts["stopped"] == "patience" and len(found) < LAB["rounds"]
    course = Course(Stop.model_validate(PATIENT["stop"]), Score())
    for row in found[:-1]:  # the last one was trained while the decision was made
        assert course.ended is None
        course.take(int(row["global_round"]), score=float(row["accuracy"]), loss=float(row["loss"]))
    assert course.ended is StopReason.PATIENCE
    course.take(len(found), score=float(found[-1]["accuracy"]), loss=float(found[-1]["loss"]))
    assert facts["best_round"] == course.best > 1
    alone = direct_run(new(tmp_path / "alone", {"rounds": course.best}))
    assert same_arrays(whole.path / "best.safetensors", alone.path / "model.safetensors")


def test_a_best_model_that_is_lost_is_named(tmp_path: Path) -> None:
    folder = direct_run(
        new(tmp_path, {"rounds": 3, "stop": {"best": True, "min_delta": 0.9}}), until=3
    )
    for path in folder.checkpoints.glob("best-*"):
        path.unlink()
    warnings: list[Any] = []
    resumed_run(
        folder.path,
        observe=lambda event, facts: (
            warnings.append(facts["reason"]) if event == "warning" else None
        ),
    )
    assert any(
        each.startswith("the best model, of global round 1, is lost: stop.best = ")
        for each in warnings
    )
    assert not (folder.path / "best.safetensors").exists()


# The first model


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return direct_run(new(tmp_path_factory.mktemp("earlier"), {"rounds": 3}))


def test_a_run_starts_from_the_model_of_another(earlier: RunFolder, tmp_path: Path) -> None:
    still = {"rounds": 1, "training": {"learning_rate": 1e-12}}
    of_folder, of_file = (
        direct_run(
            new(tmp_path / name, still, {"model": {"name": "mlp_digits", "initial": str(path)}})
        )
        for name, path in (("folder", earlier.path), ("file", earlier.path / "model.safetensors"))
    )
    (first,), (other,), last = rows(of_folder), rows(of_file), rows(earlier)[-1]
    assert first["accuracy"] == other["accuracy"] == last["accuracy"]
    assert float(first["loss"]) == pytest.approx(float(last["loss"]), rel=1e-4)
    folders = (of_folder, of_file, earlier)
    *noted, without = (
        json.loads((folder.path / "manifest.json").read_text()).get("initial") for folder in folders
    )
    assert (
        without is None
        and noted[0]["content"] == noted[1]["content"]
        and noted[0]["model"] == str(earlier.path)
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda found: found.pop(min(found)), r"not a model of mlp_digits: \S+ is missing"),
        (lambda found: found.update(more=np.zeros(1, np.float32)), "more is unknown"),
        (
            lambda found: found.update({min(found): np.zeros((2, 3), np.float32)}),
            r"float32 \[2, 3\], not float32 \[",
        ),
        (lambda found: found.update({min(found): found[min(found)].astype(np.int16)}), "is int16"),
        (lambda found: found[min(found)].fill(np.nan), "holds NaN or Inf"),
    ],
)
def test_a_file_of_another_model_is_refused(
    change: Any, text: str, earlier: RunFolder, tmp_path: Path
) -> None:
    found = load_file(earlier.path / "model.safetensors")
    change(found)
    save_file(found, tmp_path / "other.safetensors")
    folder = new(
        tmp_path / "runs",
        {"model": {"name": "mlp_digits", "initial": str(tmp_path / "other.safetensors")}},
    )
    with pytest.raises(InvalidExperiment, match=text):
        direct_run(folder)


def test_a_place_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no", Path(__file__)):
        folder = new(tmp_path / "runs", {"model": {"name": "mlp_digits", "initial": str(path)}})
        with pytest.raises(
            InvalidExperiment,
            match=r"model\.initial = .* (cannot be read|has no).* Name a finished run",
        ):
            direct_run(folder)
