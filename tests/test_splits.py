"""The split of a run's data: alike at every node, kept and written, with samples held out, and with
test samples.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.cloud import evaluator_process
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import load, parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, splits
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.refiner import NodeSamples
from fedstrata.common.processes.subprocess_channel import Record, error_in
from fedstrata.common.settings.data import check_alike
from fedstrata.deploy.planning import workload
from fedstrata.deploy.results.maps import partition
from fedstrata.deploy.simulation.hardware import NullWorkload
from fedstrata.device.training.batches import load_local_dataset
from fedstrata.device.training.trainer import Trainer
from tests.helpers.commands import fedstrata, invoke, table
from tests.helpers.direct import run_direct
from tests.helpers.figures import boxes_of, drawn, texts, tooltips
from tests.helpers.mnist import write_mnist

pytestmark = pytest.mark.usefixtures("warm")


def experiment(*devices: str, **data: Any) -> Experiment:
    tree: dict[str, Any] = {
        "topology": {"devices": list(devices) or ["device-0", "device-1"]},
        "data": data,
    }
    return parse(tree | {"model": {"name": "lenet5"}} if data.get("dataset") == "mnist" else tree)


def copies(root: Path, *, other: str) -> Experiment:
    """Give cloud and devices files of their own, whose labels are the same but for one node's last."""
    for node in ("cloud", "device-0", "device-1"):
        write_mnist(root / node, [*range(9), *range(9), 9, 8 if node == other else 9])
    return experiment(dataset="mnist", root=str(root / "{node}"))


def test_nodes_that_share_their_files_share_the_split() -> None:
    lab = experiment()
    assert splits.split_of(lab, node="device-0") is splits.split_of(lab)
    assert (
        splits.split_of(lab).digest
        != splits.split_of(parse({"seed": 2, "topology": {"devices": 2}})).digest
    )


def test_a_node_with_other_labels_is_reported_though_its_places_are_the_same(
    tmp_path: Path,
) -> None:
    lab = copies(tmp_path, other="device-1")
    mine, clouds = splits.split_of(lab, node="device-1"), splits.split_of(lab)
    assert all(
        np.array_equal(one, other)
        for one, other in zip(mine.partitions, clouds.partitions, strict=True)
    )
    trainers = [Trainer(lab, node=f"device-{i}", accelerator="cpu") for i in range(2)]
    for trainer in trainers:
        trainer.prepare()
    check_alike(lab.data, "device-0", partition=trainers[0].facts.partition, clouds=clouds.digest)
    with pytest.raises(InvalidExperiment) as reported:
        check_alike(
            lab.data, "device-1", partition=trainers[1].facts.partition, clouds=clouds.digest
        )
    for word in (
        "data.root",
        "device-1",
        mine.digest,
        clouds.digest,
        "the same files",
        "the same release",
    ):
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
    lab = experiment(
        dataset="folder", classes=["a"], partition="natural", root=str(tmp_path / "{node}")
    )
    assert splits.keep(lab, tmp_path) == "" and not any(tmp_path.iterdir())
    check_alike(lab.data, "device-0", partition="", clouds="")


def fake_channel(sent: list[Record], **ends: Any) -> SimpleNamespace:
    """Return the process's end of a channel without an agent."""
    return SimpleNamespace(
        send=lambda **record: sent.append(record), busy=nullcontext, progressed=lambda: None, **ends
    )


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
    assert isinstance(error, InvalidExperiment) and str(error).startswith(
        "data.min_samples = 10000"
    )


def test_the_evaluator_process_passes_the_notes_on_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path, [*range(9)], [*range(10)])
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
    done = fedstrata(
        "run",
        file,
        "--runs",
        tmp_path / "runs",
        null=True,
        env={"NULL_LAB_SPLIT": "device-1:0ther"},
    )
    assert done.returncode == 4, done.stderr
    said = done.stderr.strip().splitlines()[-1]
    for word in ("device-1", "0ther", NullWorkload.partition, "the same files"):
        assert word in said
    assert "device-0" not in said
    assert not (tmp_path / "runs").exists(), "no global round had begun"


# Written by the command

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
    assert (
        facts["digest"]
        == splits.digest_of(parts, labels=labels)
        == splits.digest_of(wanted, labels=labels)
    )
    for name, part in zip(experiment.tree.devices, parts, strict=True):
        device = facts["devices"][name]
        assert (
            device["samples"] == len(part)
            and device["by_class"] == np.bincount(labels[part], minlength=10).tolist()
        )
    assert [device["parent"] for device in facts["devices"].values()] == ["institution-0"] * 3 + [
        "institution-1"
    ] * 3
    every = np.bincount(labels[np.concatenate(parts)], minlength=10)
    homes = {"device": parts, "institution": [np.concatenate(parts[:3]), np.concatenate(parts[3:])]}
    for kind, nodes in homes.items():  # Zhao et al. 2018: sum over classes |p_k(y) - p(y)|
        apart = [
            abs(np.bincount(labels[own], minlength=10) / len(own) - every / every.sum()).sum()
            for own in nodes
        ]
        assert facts["label_distance"][kind] == pytest.approx(
            np.average(apart, weights=[*map(len, nodes)]), abs=1e-6
        )
    table = invoke("data", "partition", file, "--out", out).stdout.splitlines()
    assert len(table) == 7 and table[1].startswith("device-0\tinstitution-0\t")


def test_the_picture_has_a_cell_for_each_class_that_a_device_has() -> None:
    devices = {
        "<x>": {"parent": "a", "by_class": [5, 0, 20]},
        "y": {"parent": "b", "by_class": [0, 80, 0]},
    }
    facts = {
        "digest": "&",
        "seed": 1,
        "data": {"dataset": "d", "partition": "iid"},
        "devices": devices,
    }
    figure = partition(facts)
    canvas = drawn(figure)
    assert tooltips(canvas) == ["a / <x>, class 0: 5", "a / <x>, class 2: 20", "b / y, class 1: 80"]
    boxes = boxes_of(canvas)
    sides = [wide for *_, wide, _ in boxes]
    assert sides == pytest.approx([box[3] for box in boxes]) and sides[0] * 4 == pytest.approx(
        sides[2]
    )
    assert sides[0] * 2 == pytest.approx(sides[1])  # areas as 1 to 4 to 16
    assert {"25", "80", "a / <x>", "b / y"} <= set(texts(figure))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(EXPERIMENT)
    done = invoke("data", "partition", file, "--out", file)
    assert done.exit_code == 4 and "--out" in done.stderr


# Samples held out for the aggregating nodes


def holding(held_out: int, **data: Any) -> Experiment:
    return parse(
        {"topology": {"institutions": 2, "devices": 6}, "data": {"node_samples": held_out, **data}}
    )


FOLDER = {"dataset": "folder", "classes": ["a"], "partition": "natural"}
PARTITIONS = [
    {"partition": "iid"},
    {"partition": "dirichlet", "concentration": 0.5},
    {"partition": "dirichlet_overlap", "partition_size": 1000},
    {"partition": "shards"},
    {"partition": "institution_dirichlet", "within": "shards"},
    {"partition": "institution_shards", "within": "dirichlet", "min_samples": 1},
]


@pytest.mark.parametrize("data", PARTITIONS, ids=lambda data: data["partition"])
def test_no_device_has_a_sample_that_is_held_out(data: dict[str, Any]) -> None:
    experiment = holding(100, **data)
    split = splits.split_of(experiment)
    theirs = np.unique(np.concatenate(split.partitions))
    assert len(split.held_out) == len(np.unique(split.held_out)) == 100
    assert not np.isin(split.held_out, theirs).any()
    if data["partition"] != "dirichlet_overlap":
        assert len(theirs) == len(split.labels) - 100
    others = splits.split_of(holding(100, **PARTITIONS[0]))
    assert np.array_equal(split.held_out, others.held_out)  # from the seed alone
    assert split.digest != others.digest or data == PARTITIONS[0]


@pytest.mark.parametrize("data", PARTITIONS, ids=lambda data: data["partition"])
def test_without_any_the_split_is_what_it_was(data: dict[str, Any]) -> None:
    experiment = holding(0, **data)
    split = splits.split_of(experiment)
    wanted = splits.partition(
        split.labels, data=experiment.data, tree=experiment.tree, seed=experiment.seed
    )
    assert all(
        np.array_equal(one, other) for one, other in zip(split.partitions, wanted, strict=True)
    )
    assert (
        split.digest == splits.digest_of(wanted, labels=split.labels) and len(split.held_out) == 0
    )


def test_each_node_has_the_held_out_samples_and_no_other() -> None:
    experiment = holding(30)
    loaded, held_out = datasets.load(experiment.data), splits.split_of(experiment).held_out
    for node in ("cloud", "institution-0", "institution-1"):
        samples = NodeSamples(experiment, node)
        assert torch.equal(samples.labels, loaded.train_labels[torch.from_numpy(held_out)])
        assert samples.partition == splits.split_of(experiment).digest
        samples.load(np.zeros(samples.layout.row_bytes, np.uint8))
        assert samples.all_logits().shape == (30, 10)
    assert splits.split_of(holding(30)).digest != splits.split_of(holding(31)).digest


def test_they_are_drawn_uniformly() -> None:
    data = holding(20).data
    counts = sum(
        np.bincount(splits.hold_out(100, data=data, seed=seed), minlength=100)
        for seed in range(500)
    )
    assert abs(np.asarray(counts) - 100).max() < 45  # standard deviation 9


def test_a_user_without_a_sample_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        train_labels=torch.zeros(40, dtype=torch.int64),
        classes=1,
        owners=np.repeat([0, 1], [1, 39]),
        inputs=Inputs((1, 2, 2), 1),
    )
    monkeypatch.setattr(datasets, "load", lambda data, node: found)
    data = {"dataset": "femnist", "partition": "natural", "node_samples": 38}
    for seed in range(3):
        tree = {"seed": seed, "topology": {"devices": 2}, "data": data}
        held_out = splits.hold_out(40, data=parse(tree).data, seed=seed)
        assert 0 in held_out
        with pytest.raises(
            InvalidExperiment, match=r"data\.node_samples = 38: no sample remains for device-0"
        ):
            splits.split_of(parse(tree))


def test_a_runs_folder_and_the_command_show_them(tmp_path: Path) -> None:
    file, out = tmp_path / "lab.toml", tmp_path / "out"
    file.write_text("[topology]\ndevices = 3\n[data]\nnode_samples = 50\n")
    done = invoke("data", "partition", file, "--out", out)
    assert (
        done.exit_code == 0 and "50 samples are held out for the aggregating nodes" in done.stderr
    )
    split = splits.split_of(parse({"topology": {"devices": 3}, "data": {"node_samples": 50}}))
    with np.load(out / "partition.npz") as arrays:
        assert set(arrays) == {"device-0", "device-1", "device-2", splits.HELD_OUT}
        assert np.array_equal(arrays[splits.HELD_OUT], split.held_out)
    facts = json.loads((out / "partition.json").read_text())["held_out"]
    assert facts["samples"] == 50 == sum(facts["by_class"])
    done = invoke("data", "partition", file, "--out", out, "--set", "data.node_samples=0")
    assert "held out" not in done.stderr and "held_out" not in json.loads(
        (out / "partition.json").read_text()
    )


def test_a_data_set_of_ones_own_may_turn_out_too_small() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"data\.node_samples = 20: the data set has 20 training samples"
    ):
        splits.hold_out(20, data=holding(20).data, seed=1)


# Test samples of the devices' users

CPU = torch.device("cpu")
USERS = {"ann": 3, "bob": 2, "cid": 4}  # test samples of each, who has twice as many for training
OF_USERS = {"at": "both", "data": "users"}


def leaf(root: Path, part: str, users: dict[str, int], *, first: int) -> None:
    """Write FEMNIST images with one dark pixel, whose place is the number of the sample from
    `first` on.
    """
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


def of_users(root: Path, dataset: str = "femnist", **tables: Any) -> Experiment:
    tree: dict[str, Any] = {
        "rounds": 1,
        "topology": {"institutions": 0, "devices": 3},
        "evaluation": OF_USERS,
    }
    tree["model"] = {"name": "cnn_fedavg" if dataset == "femnist" else "mine:Net"}
    tree["data"] = {"dataset": dataset, "root": str(root), "partition": "natural"}
    return parse(tree | tables)


def test_leafs_test_samples_of_a_user_are_those_of_its_device(tmp_path: Path) -> None:
    leaf(tmp_path, "train", {user: 2 * count for user, count in USERS.items()}, first=100)
    leaf(tmp_path, "test", {"zoe": 5, "cid": 4, "ann": 3}, first=0)  # bob has none, zoe no device
    lab = of_users(tmp_path)
    dark = {}
    for node in lab.tree.devices:
        local = load_local_dataset(lab, node, accelerator=CPU)
        # all of its own
        assert len(local.samples) == 2 * list(USERS.values())[lab.tree.devices.index(node)]
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
    with pytest.raises(
        InvalidExperiment,
        match=r"^evaluation\.data = 'users': no user of the training samples of fem",
    ):
        load_local_dataset(of_users(tmp_path), "device-0", accelerator=CPU)


TABLE = {
    user: [[float(place), float(n)] for n in range(3 * count)]
    for place, (user, count) in enumerate(USERS.items())
}


def owners_of(dataset: datasets.Dataset, part: str) -> list[str]:
    """Return the user of each sample by its first feature, and check that they are those that the
    data set names.
    """
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
    lab = of_users(tmp_path, "t.csv", data=data)
    drawn = datasets.load(lab.data)
    assert len(owners_of(drawn, "test")) == 5 and len(owners_of(drawn, "train")) == 22
    (tmp_path / "test.csv").write_text("who,a,b,y\nbob,1.0,9.0,1\nann,0.0,9.0,0\nzoe,7.0,0.0,1\n")
    apart = datasets.load(of_users(tmp_path, "t.csv", data={**data, "test_file": "test.csv"}).data)
    assert apart.test_owners is not None and apart.test_owners.tolist() == [1, 0, -1]


def test_the_users_of_an_npz_files_test_samples_are_read(tmp_path: Path) -> None:
    x = np.array([row for found in TABLE.values() for row in found], np.float32)
    user = np.array([name for name, found in TABLE.items() for _ in found])
    y = np.arange(len(x)) % 2
    np.savez(tmp_path / "drawn.npz", x=x, y=y, user=user)
    drawn = datasets.load(of_users(tmp_path, "drawn.npz").data)
    assert len(owners_of(drawn, "test")) == 5
    np.savez(
        tmp_path / "own.npz",
        x=x,
        y=y,
        user=user,
        x_test=x[:2],
        y_test=y[:2],
        user_test=np.array(["cid", "zoe"]),
    )
    own = datasets.load(of_users(tmp_path, "own.npz").data)
    assert own.test_owners is not None and own.test_owners.tolist() == [2, -1]
    np.savez(tmp_path / "none.npz", x=x, y=y, user=user, x_test=x[:2], y_test=y[:2])
    lab = of_users(tmp_path, "none.npz")
    with pytest.raises(
        InvalidExperiment, match=r"^evaluation\.data = .*the test samples of none\.npz have no us"
    ):
        splits.counts_of_tests(datasets.load(lab.data), lab, samples=[1, 1, 1])


def test_a_function_of_ones_own_names_the_users_of_both_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_sets.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    x, y = np.zeros((6, 2), np.float32), np.arange(6) % 2\n"
        "    return (x, y, [3, 3, 1, 1, 2, 2]), (x[:3], y[:3], [2, 9, 1])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = datasets.load(of_users(tmp_path, "two_sets:load").data)
    assert (
        data.users == ("1", "2", "3") and data.owners is not None and data.test_owners is not None
    )
    assert (data.owners.tolist(), data.test_owners.tolist()) == ([2, 2, 0, 0, 1, 1], [1, -1, 0])
