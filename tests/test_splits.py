"""The split of a run's data: alike at every node or the run does not begin, and left in the run's folder."""

from __future__ import annotations

import json
import struct
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cloud import evaluator_process
from common.errors import InvalidExperiment
from common.experiment.data import check_alike
from common.experiment.reading import parse, to_toml
from common.experiment.schema import Experiment
from common.host.subprocess_channel import Record, error_in
from common.learning import splits
from deploy.simulation.hardware import NullWorkload
from device.training.trainer import Trainer
from tests.helpers.commands import fedstrata


def experiment(*devices: str, **data: Any) -> Experiment:
    tree: dict[str, Any] = {"topology": {"devices": list(devices) or ["device-0", "device-1"]}, "data": data}
    return parse(tree | {"model": {"name": "lenet5"}} if data.get("dataset") == "mnist" else tree)


def mnist(root: Path, *, labels: list[int]) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        count = len(labels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(labels))
        head = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + bytes(count * 784))


def copies(root: Path, *, other: str) -> Experiment:
    """Give cloud and devices files of their own, whose labels are the same but for one node's last."""
    for node in ("cloud", "device-0", "device-1"):
        mnist(root / node, labels=[*range(9), *range(9), 9, 8 if node == other else 9])
    return experiment(dataset="mnist", root=str(root / "{node}"))


def test_nodes_that_share_their_files_share_the_split() -> None:
    lab = experiment()
    assert splits.split_of(lab, node="device-0") is splits.split_of(lab)
    assert splits.split_of(lab).digest != splits.split_of(parse({"seed": 2, "topology": {"devices": 2}})).digest


def test_a_node_with_other_labels_is_reported_though_its_places_are_the_same(tmp_path: Path) -> None:
    lab = copies(tmp_path, other="device-1")
    mine, clouds = splits.split_of(lab, node="device-1"), splits.split_of(lab)
    assert all(np.array_equal(one, other) for one, other in zip(mine.partitions, clouds.partitions, strict=True))
    trainers = [Trainer(lab, node=f"device-{i}", accelerator="cpu") for i in range(2)]
    for trainer in trainers:
        trainer.prepare()
    check_alike(lab.data, "device-0", partition=trainers[0].partition, clouds=clouds.digest)
    with pytest.raises(InvalidExperiment) as reported:
        check_alike(lab.data, "device-1", partition=trainers[1].partition, clouds=clouds.digest)
    for word in ("data.root", "device-1", mine.digest, clouds.digest, "the same files", "the same release"):
        assert word in str(reported.value)


def test_a_runs_split_is_kept_and_a_resumed_run_must_have_the_same(tmp_path: Path) -> None:
    lab = experiment("file", "device.1")  # names that are numpy's or a path's
    digest = splits.keep(lab, tmp_path)
    assert digest == splits.split_of(lab).digest == splits.keep(lab, tmp_path)
    with np.load(tmp_path / "partition.npz") as arrays:
        assert arrays["file"].dtype == np.int64
        for name, part in zip(("file", "device.1"), splits.split_of(lab).partitions, strict=True):
            assert np.array_equal(arrays[name], part)
    facts = json.loads((tmp_path / "partition.json").read_text())
    assert facts["digest"] == digest and set(facts["devices"]) == {"file", "device.1"}
    other = parse({"seed": 2, "topology": {"devices": ["file", "device.1"]}})
    with pytest.raises(InvalidExperiment, match=rf"--resume.*{digest}.*Restore") as reported:
        splits.keep(other, tmp_path)
    assert reported.value.exit_code == 4


def test_folders_have_no_split_and_nothing_to_compare(tmp_path: Path) -> None:
    lab = experiment(dataset="folder", classes=["a"], partition="natural", root=str(tmp_path / "{node}"))
    assert splits.keep(lab, tmp_path) == "" and not any(tmp_path.iterdir())
    check_alike(lab.data, "device-0", partition="", clouds="")


def fake_channel(sent: list[Record], **ends: Any) -> SimpleNamespace:
    """Return the process's end of a channel without an agent."""
    return SimpleNamespace(send=lambda **record: sent.append(record), busy=nullcontext, moved=lambda: None, **ends)


def test_a_split_that_cannot_be_is_an_invalid_experiment_before_anybody_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, sent = experiment(partition="dirichlet", min_samples=10_000), list[Record]()
    request = {"experiment": lab.to_json(), "folder": str(tmp_path)}
    channel = fake_channel(sent, receive=lambda: request)
    monkeypatch.setattr(evaluator_process, "AgentChannel", lambda: channel)
    evaluator_process.main()
    (record,) = sent
    error = error_in(record)
    assert isinstance(error, InvalidExperiment) and str(error).startswith("data.min_samples = 10000")


def test_the_evaluator_process_passes_the_notes_on_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist(tmp_path, labels=[*range(9), 0])
    for path in (tmp_path / "MNIST" / "raw").glob("t10k-labels*"):
        path.write_bytes(path.read_bytes()[:-1] + bytes([9]))
    lab, sent = experiment(dataset="mnist", root=str(tmp_path)), list[Record]()
    requests: list[Record] = [{"experiment": lab.to_json(), "folder": str(tmp_path)}]
    memory = SimpleNamespace(rows=lambda count, row_bytes: np.zeros((count, row_bytes), np.uint8))
    channel = fake_channel(sent, receive=requests.pop, memory=memory)
    monkeypatch.setattr(evaluator_process, "AgentChannel", lambda: channel)
    with pytest.raises(IndexError):  # no further request
        evaluator_process.main()
    assert json.loads(json.dumps(sent[0]))["notes"] == [
        "mnist: no training sample has these classes of the test samples: 9"
    ]


@pytest.mark.slow
def test_a_lab_with_a_device_of_another_split_ends_with_4_and_names_it(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(to_toml(experiment()))
    done = fedstrata("run", file, "--runs", tmp_path / "runs", null=True, env={"NULL_LAB_SPLIT": "device-1:0ther"})
    assert done.returncode == 4, done.stderr
    said = done.stderr.strip().splitlines()[-1]
    for word in ("device-1", "0ther", NullWorkload.partition, "the same files"):
        assert word in said
    assert "device-0" not in said
    assert not (tmp_path / "runs").exists(), "no global round had begun"
