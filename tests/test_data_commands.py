"""`fedstrata data`: roots described, splits written."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from common.experiment.reading import load
from common.learning import datasets, splits
from deploy.results.maps import partition
from tests.helpers.commands import invoke

EXPERIMENT = """
seed = 3
[topology]
devices = 6
institutions = 2
[data]
partition = "institution_dirichlet"
concentration = 0.3
min_samples = 5
"""
SVG = "{http://www.w3.org/2000/svg}"


def mnist(root: Path) -> Path:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 5)):
        head = struct.pack(">BBBBI", 0, 0, 8, 1, count)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + bytes(range(5)) * (count // 5))
        head = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + bytes(count * 784))
    return raw


def test_a_root_is_described(tmp_path: Path) -> None:
    mnist(tmp_path)
    done = invoke("data", "check", "--root", tmp_path, "--format", "json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert len(facts.pop("digest")) == 16
    assert facts == {
        "dataset": "mnist", "train": 20, "test": 5, "shape": [1, 28, 28], "classes": 10, "numbers": 0, "tokens": 0,
        "users": 0,
    }  # fmt: skip
    table = invoke("data", "check", "mnist", "--root", tmp_path).stdout.splitlines()
    assert [line.split("\t")[:3] for line in table] == [["dataset", "train", "test"], ["mnist", "20", "5"]]


def test_what_is_damaged_or_missing_ends_with_4_and_the_rest_is_described(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for root in (good, bad):
        raw = mnist(root)
        (root / "cifar-10-batches-py").mkdir()
    (raw / "t10k-labels-idx1-ubyte").write_bytes(b"")
    done = invoke("data", "check", "--root", good)
    assert done.exit_code == 4 and "mnist\t20" in done.stdout and "data_batch_1" in done.stderr
    done = invoke("data", "check", "--root", bad)
    assert done.exit_code == 4 and "t10k-labels-idx1-ubyte" in done.stderr and "data_batch_1" in done.stderr
    assert invoke("data", "check", "--root", tmp_path / "absent").exit_code == 4
    assert "not read from a root" in invoke("data", "check", "digits", "--root", tmp_path).stderr


def test_the_data_sets_of_a_sweep_are_checked_by_its_name(tmp_path: Path) -> None:
    mnist(tmp_path)
    done = invoke("data", "check", "papers/tempo-table1", "--root", tmp_path)
    assert done.exit_code == 4 and "mnist\t20" in done.stdout
    assert "FashionMNIST/raw" in done.stderr and "cifar-10-batches-py/test_batch" in done.stderr
    missing = invoke("data", "check", "papers/tempo-table7", "--root", tmp_path)
    assert missing.exit_code == 4 and "papers/tempo-table7" in missing.stderr


def test_a_split_is_written_as_the_devices_would_have_it(tmp_path: Path) -> None:
    file, out = tmp_path / "lab.toml", tmp_path / "out"
    file.write_text(EXPERIMENT)
    done = invoke("data", "partition", file, "--out", out, "--set", "seed=4", "--format", "json")
    assert done.exit_code == 0, done.stderr
    experiment = load(file, ["seed=4"])
    labels = datasets.load(experiment.data).train_labels.numpy()
    wanted = splits.partition(labels, data=experiment.data, tree=experiment.tree, seed=4)
    facts = json.loads((out / "partition.json").read_text())
    assert facts == json.loads(done.stdout) and facts["seed"] == 4
    with np.load(out / "partition.npz") as arrays:
        parts = [arrays[name] for name in experiment.tree.devices]
        assert len(arrays) == 6
    assert facts["digest"] == splits.digest_of(parts, labels=labels) == splits.digest_of(wanted, labels=labels)
    for name, part in zip(experiment.tree.devices, parts, strict=True):
        device = facts["devices"][name]
        assert device["samples"] == len(part) and device["by_class"] == np.bincount(labels[part], minlength=10).tolist()
    assert [device["parent"] for device in facts["devices"].values()] == ["institution-0"] * 3 + ["institution-1"] * 3
    every = np.bincount(labels[np.concatenate(parts)], minlength=10)
    homes = {"device": parts, "institution": [np.concatenate(parts[:3]), np.concatenate(parts[3:])]}
    for kind, nodes in homes.items():  # Zhao et al. 2018: sum over classes |p_k(y) - p(y)|
        apart = [abs(np.bincount(labels[own], minlength=10) / len(own) - every / every.sum()).sum() for own in nodes]
        assert facts["label_distance"][kind] == pytest.approx(np.average(apart, weights=[*map(len, nodes)]), abs=1e-6)
    table = invoke("data", "partition", file, "--out", out).stdout.splitlines()
    assert len(table) == 7 and table[1].startswith("device-0\tinstitution-0\t")


def test_the_picture_has_a_cell_for_each_class_that_a_device_has() -> None:
    devices = {"<x>": {"parent": "a", "by_class": [5, 0, 20]}, "y": {"parent": "b", "by_class": [0, 80, 0]}}
    facts = {"digest": "&", "seed": 1, "data": {"dataset": "d", "partition": "iid"}, "devices": devices}
    picture = ElementTree.fromstring(partition(facts).svg())
    cells = [cell for cell in picture.iter(f"{SVG}rect") if cell.find(f"{SVG}title") is not None]
    titles = [cell.findtext(f"{SVG}title") for cell in cells]
    assert titles == ["a / <x>, class 0: 5", "a / <x>, class 2: 20", "b / y, class 1: 80"]
    sides = [float(cell.attrib["width"]) for cell in cells]
    assert sides == pytest.approx([3, 6, 12])  # areas as 1 to 4 to 16
    assert {"25", "80"} <= {text.text for text in picture.iter(f"{SVG}text")}


def test_folders_are_not_split(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text('[data]\ndataset = "folder"\nclasses = ["a"]\npartition = "natural"\n')
    done = invoke("data", "partition", file, "--out", tmp_path / "out")
    assert done.exit_code == 4 and "nothing is split" in done.stderr and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(EXPERIMENT)
    done = invoke("data", "partition", file, "--out", file)
    assert done.exit_code == 4 and "--out" in done.stderr
