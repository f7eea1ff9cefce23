"""Devices that score models on the test samples of their users: which those are, by data set, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.learning import datasets, splits
from deploy.planning import workload
from device.training.batches import load_local_dataset
from tests.helpers.commands import table
from tests.helpers.direct import run_direct

CPU = torch.device("cpu")
USERS = {"ann": 3, "bob": 2, "cid": 4}  # test samples of each, who has twice as many for training
OF_USERS = {"at": "both", "data": "users"}


def leaf(root: Path, part: str, users: dict[str, int], *, first: int) -> None:
    """Write FEMNIST images with one dark pixel, whose place is the number of the sample from `first` on."""
    data, place = {}, first
    for user, count in users.items():
        images = [[1.0] * 784 for _ in range(count)]
        for image in images:
            image[place] = 0.0
            place += 1
        data[user] = {"x": images, "y": [n % 5 for n in range(count)]}
    folder = root / "femnist" / "data" / part
    folder.mkdir(parents=True)
    tree = {"users": list(users), "num_samples": list(users.values()), "user_data": data}
    (folder / "all_data.json").write_text(json.dumps(tree))


def experiment(root: Path, dataset: str = "femnist", **tables: Any) -> Experiment:
    tree: dict[str, Any] = {"rounds": 1, "topology": {"institutions": 0, "devices": 3}, "evaluation": OF_USERS}
    tree["model"] = {"name": "cnn_fedavg" if dataset == "femnist" else "mine:Net"}
    tree["data"] = {"dataset": dataset, "root": str(root), "partition": "natural"}
    return parse(tree | tables)


def test_leafs_test_samples_of_a_user_are_those_of_its_device(tmp_path: Path) -> None:
    leaf(tmp_path, "train", {user: 2 * count for user, count in USERS.items()}, first=100)
    leaf(tmp_path, "test", {"zoe": 5, "cid": 4, "ann": 3}, first=0)  # bob has none, zoe no device
    lab = experiment(tmp_path)
    dark = {}
    for node in lab.tree.devices:
        local = load_local_dataset(lab, node, accelerator=CPU)
        assert len(local.samples) == 2 * list(USERS.values())[lab.tree.devices.index(node)]  # all of its own
        found = () if local.tests is None else local.tests.images[local.tests.samples]
        dark[node] = [int(image.flatten().argmin()) for image in found]
    assert dark == {"device-0": [9, 10, 11], "device-1": [], "device-2": [5, 6, 7, 8]}
    work = workload.workload(lab)
    assert work.samples == {"device-0": 6, "device-1": 4, "device-2": 8}
    assert work.tests == {"device-0": 3, "device-1": 0, "device-2": 4}
    path = run_direct(tmp_path / "runs", lab)
    assert [row["test_samples"] for row in table(path / "devices.csv")] == ["3", "", "4"]


def test_test_files_of_other_users_are_refused(tmp_path: Path) -> None:
    leaf(tmp_path, "train", USERS, first=0)
    leaf(tmp_path, "test", {"zoe": 5}, first=50)  # as LEAF's `-t user` writes them
    with pytest.raises(InvalidExperiment, match=r"^evaluation\.data = 'users': no user of the training samples of fem"):
        load_local_dataset(experiment(tmp_path), "device-0", accelerator=CPU)


TABLE = {
    user: [[float(place), float(n)] for n in range(3 * count)] for place, (user, count) in enumerate(USERS.items())
}


def owners_of(dataset: datasets.Dataset, part: str) -> list[str]:
    """Return the user of each sample by its first feature, and check that they are those that the data set names."""
    samples = dataset.train_images if part == "train" else dataset.test_images
    named = dataset.owners if part == "train" else dataset.test_owners
    assert named is not None
    by_feature = sorted(set(samples[:, 0].tolist()))
    places = [by_feature.index(each) for each in samples[:, 0].tolist()]
    assert [list(USERS)[place] for place in places] == [dataset.users[place] for place in named]
    return [list(USERS)[place] for place in places]


def test_the_users_of_a_tables_test_rows_are_read(tmp_path: Path) -> None:
    rows = [(user, *row, n % 2) for user, found in TABLE.items() for n, row in enumerate(found)]
    text = "".join(f"{user},{a},{b},{y}\n" for user, a, b, y in rows)
    (tmp_path / "t.csv").write_text(f"who,a,b,y\n{text}")
    columns = {"target_column": "y", "user_column": "who"}
    data = {"dataset": "t.csv", "root": str(tmp_path), "partition": "natural", **columns}
    lab = experiment(tmp_path, "t.csv", data=data)
    drawn = datasets.load(lab.data)
    assert len(owners_of(drawn, "test")) == 5 and len(owners_of(drawn, "train")) == 22
    (tmp_path / "test.csv").write_text("who,a,b,y\nbob,1.0,9.0,1\nann,0.0,9.0,0\nzoe,7.0,0.0,1\n")
    apart = datasets.load(experiment(tmp_path, "t.csv", data={**data, "test_file": "test.csv"}).data)
    assert apart.test_owners is not None and apart.test_owners.tolist() == [1, 0, -1]


def test_the_users_of_an_npz_files_test_samples_are_read(tmp_path: Path) -> None:
    x = np.array([row for found in TABLE.values() for row in found], np.float32)
    user = np.array([name for name, found in TABLE.items() for _ in found])
    y = np.arange(len(x)) % 2
    np.savez(tmp_path / "drawn.npz", x=x, y=y, user=user)
    drawn = datasets.load(experiment(tmp_path, "drawn.npz").data)
    assert len(owners_of(drawn, "test")) == 5
    np.savez(tmp_path / "own.npz", x=x, y=y, user=user, x_test=x[:2], y_test=y[:2], user_test=np.array(["cid", "zoe"]))
    own = datasets.load(experiment(tmp_path, "own.npz").data)
    assert own.test_owners is not None and own.test_owners.tolist() == [2, -1]
    np.savez(tmp_path / "none.npz", x=x, y=y, user=user, x_test=x[:2], y_test=y[:2])
    lab = experiment(tmp_path, "none.npz")
    with pytest.raises(
        InvalidExperiment, match=r"^evaluation\.data = 'users': the test samples of none\.npz have no us"
    ):
        splits.counts_of_tests(datasets.load(lab.data), lab, samples=[1, 1, 1])


def test_a_function_of_ones_own_names_the_users_of_both_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_sets.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    x, y = np.zeros((6, 2), np.float32), np.arange(6) % 2\n"
        "    return (x, y, [3, 3, 1, 1, 2, 2]), (x[:3], y[:3], [2, 9, 1])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = datasets.load(experiment(tmp_path, "two_sets:load").data)
    assert data.users == ("1", "2", "3") and data.owners is not None and data.test_owners is not None
    assert (data.owners.tolist(), data.test_owners.tolist()) == ([2, 2, 0, 0, 1, 1], [1, -1, 0])
