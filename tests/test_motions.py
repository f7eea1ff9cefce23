"""The motions of a watch: seglearn's pickled file, its windows, and a run by user."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning import datasets
from fedstrata.common.learning.readers import builtin
from fedstrata.common.settings import data as settings
from tests.helpers.commands import table
from tests.helpers.direct import run_direct

LENGTHS: Final = (947, 640, 700, 1000, 500, 800)  # of 50 samples a second


@pytest.fixture(autouse=True)
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)


def content(**changes: Any) -> dict[str, Any]:
    """Return what the file holds, of three people with two recordings each."""
    draw = np.random.default_rng(1)
    return {
        "X": [draw.normal(size=(length, 6)) for length in LENGTHS],
        "y": np.array([0, 1, 2, 6, 1, 0]),
        "subject": np.array([10, 2, 7, 10, 2, 7]),
        "side": np.array([0.0, 1.0] * 3),
        "X_labels": ["ax", "ay", "az", "wx", "wy", "wz"],
        "y_labels": ["PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW"],
    } | changes


def save(root: Path, found: Any) -> Path:
    """Write a file as numpy under Python 2 did: protocol 2, whose bytes are texts in latin1."""
    path = root / "motions" / "watch_dataset.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = np.empty((), object)
    whole[()] = found
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(whole))
        pickle.dump(whole, file, protocol=2)
    return path


def test_recordings_become_windows_of_their_people(tmp_path: Path) -> None:
    save(tmp_path, content())
    assert b"_codecs" in (tmp_path / "motions" / "watch_dataset.npy").read_bytes()
    parts = builtin.read_motions(tmp_path)
    ends = [int(0.8 * length) for length in LENGTHS]
    counts = [(end - 128) // 64 + 1 for end in ends]
    left = [
        max(0, (length - end - 128) // 64 + 1) for length, end in zip(LENGTHS, ends, strict=True)
    ]
    assert parts.train.shape == (sum(counts), 6, 1, 128) and parts.test.shape == (
        sum(left),
        6,
        1,
        128,
    )
    assert parts.users == ("02", "07", "10") and parts.owners is not None
    assert parts.owners.tolist() == np.repeat([2, 0, 1, 2, 0, 1], counts).tolist()
    assert parts.train_labels.tolist() == np.repeat([0, 1, 2, 6, 1, 0], counts).tolist()
    first = content()["X"][0].astype(np.float32)
    # the second window begins in mid of the first
    np.testing.assert_array_equal(parts.train[1, :, 0], first[64:192].T)
    np.testing.assert_array_equal(parts.test[0, :, 0], first[ends[0] : ends[0] + 128].T)


class Hostile:
    """What a pickle must not name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1 + 1",)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (content(y=Hostile()), "eval is not allowed"),
        (content(X=[np.zeros((900, 3))] * 6), "not of six columns"),
        (content(y=np.zeros(3)), "with a label"),
        ([1, 2], "is not seglearn's"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, found: Any, problem: str) -> None:
    save(tmp_path, found)
    with pytest.raises(InvalidExperiment, match=problem):
        builtin.read_motions(tmp_path)


def test_the_file_of_the_installed_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InvalidExperiment, match=r"watch_dataset.npy. To fetch them: pip install seglearn"
    ):
        builtin.read_motions(tmp_path)
    path = save(tmp_path, content())
    package = tmp_path / "seglearn"
    (package / "data").mkdir(parents=True)
    path.rename(package / "data" / path.name)

    found = SimpleNamespace(origin=str(package / "__init__.py"))
    wanted = settings.Data(dataset="motions", root=str(tmp_path / "nowhere"))
    assert not settings.is_there(wanted)
    monkeypatch.setattr(settings, "find_spec", lambda name: found if name == "seglearn" else None)
    assert settings.is_there(wanted) and builtin.read_motions(tmp_path / "nowhere").classes == 7


def test_people_train_on_their_own_motions(tmp_path: Path) -> None:
    save(tmp_path, content())
    tree = {
        "rounds": 2,
        "topology": {"institutions": 0, "devices": 3},
        "data": {"dataset": "motions", "partition": "natural", "root": str(tmp_path)},
        "model": {"name": "cnn_motions"},
        "training": {"epochs": 1, "batch_size": 8},
    }
    experiment = parse(tree)
    assert datasets.load(experiment.data).inputs.shape == (6, 1, 128)
    run = run_direct(tmp_path / "runs", tree)
    assert len(table(run / "rounds.csv")) == 2
    facts = json.loads((run / "partition.json").read_text())
    assert [device["samples"] for device in facts["devices"].values()] == [12, 16, 21]
    with pytest.raises(InvalidExperiment, match="motions are no images"):
        parse(tree | {"data": {**tree["data"], "noise": 0.1}})  # type: ignore[dict-item]
    with pytest.raises(InvalidExperiment, match=r"lenet5': does not accept .* Use cnn_motions"):
        settings.check_fits(experiment.data, settings.ModelSettings(name="lenet5"), devices=3)
