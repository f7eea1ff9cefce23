"""Samples held out for the aggregating nodes: no device has them, and all nodes have the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.learning import datasets, splits
from common.learning.inputs import Inputs
from common.learning.refiner import NodeSamples
from tests.helpers.commands import invoke


def lab(held_out: int, **data: Any) -> Experiment:
    return parse({"topology": {"institutions": 2, "devices": 6}, "data": {"node_samples": held_out, **data}})


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
    experiment = lab(100, **data)
    split = splits.split_of(experiment)
    theirs = np.unique(np.concatenate(split.partitions))
    assert len(split.held_out) == len(np.unique(split.held_out)) == 100
    assert not np.isin(split.held_out, theirs).any()
    if data["partition"] != "dirichlet_overlap":
        assert len(theirs) == len(split.labels) - 100
    others = splits.split_of(lab(100, **PARTITIONS[0]))
    assert np.array_equal(split.held_out, others.held_out)  # from the seed alone
    assert split.digest != others.digest or data == PARTITIONS[0]


@pytest.mark.parametrize("data", PARTITIONS, ids=lambda data: data["partition"])
def test_without_any_the_split_is_what_it_was(data: dict[str, Any]) -> None:
    experiment = lab(0, **data)
    split = splits.split_of(experiment)
    wanted = splits.partition(split.labels, data=experiment.data, tree=experiment.tree, seed=experiment.seed)
    assert all(np.array_equal(one, other) for one, other in zip(split.partitions, wanted, strict=True))
    assert split.digest == splits.digest_of(wanted, labels=split.labels) and len(split.held_out) == 0


def test_each_node_has_the_held_out_samples_and_no_other() -> None:
    experiment = lab(30)
    loaded, held_out = datasets.load(experiment.data), splits.split_of(experiment).held_out
    for node in ("cloud", "institution-0", "institution-1"):
        samples = NodeSamples(experiment, node)
        assert torch.equal(samples.labels, loaded.train_labels[torch.from_numpy(held_out)])
        assert samples.partition == splits.split_of(experiment).digest
        samples.load(np.zeros(samples.layout.row_bytes, np.uint8))
        assert samples.all_logits().shape == (30, 10)
    assert splits.split_of(lab(30)).digest != splits.split_of(lab(31)).digest


def test_they_are_drawn_uniformly() -> None:
    data = lab(20).data
    counts = sum(np.bincount(splits.hold_out(100, data=data, seed=seed), minlength=100) for seed in range(500))
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
        with pytest.raises(InvalidExperiment, match=r"data\.node_samples = 38: no sample remains for device-0"):
            splits.split_of(parse(tree))


def test_a_runs_folder_and_the_command_show_them(tmp_path: Path) -> None:
    file, out = tmp_path / "lab.toml", tmp_path / "out"
    file.write_text("[topology]\ndevices = 3\n[data]\nnode_samples = 50\n")
    done = invoke("data", "partition", file, "--out", out)
    assert done.exit_code == 0 and "50 samples are held out for the aggregating nodes" in done.stderr
    split = splits.split_of(parse({"topology": {"devices": 3}, "data": {"node_samples": 50}}))
    with np.load(out / "partition.npz") as arrays:
        assert set(arrays) == {"device-0", "device-1", "device-2", splits.HELD_OUT}
        assert np.array_equal(arrays[splits.HELD_OUT], split.held_out)
    facts = json.loads((out / "partition.json").read_text())["held_out"]
    assert facts["samples"] == 50 == sum(facts["by_class"])
    done = invoke("data", "partition", file, "--out", out, "--set", "data.node_samples=0")
    assert "held out" not in done.stderr and "held_out" not in json.loads((out / "partition.json").read_text())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"node_samples": 1438}, "data.node_samples = 1438: digits has 1438 training samples. Leave some"),
        ({"node_samples": 5, "dataset": "synthetic", "classes": 2, "samples": 5}, "synthetic has 5 training samples"),
        (
            {"node_samples": 5, "dataset": "folder", "classes": ["a"], "partition": "natural"},
            "every device has samples of its own",
        ),
        ({"node_samples": -1}, "data.node_samples = -1"),
    ],
)
def test_impossible_numbers_are_refused(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidExperiment) as refused:
        parse({"data": data})
    assert problem in str(refused.value)


def test_a_data_set_of_ones_own_may_turn_out_too_small() -> None:
    with pytest.raises(InvalidExperiment, match=r"data\.node_samples = 20: the data set has 20 training samples"):
        splits.hold_out(20, data=lab(20).data, seed=1)


@pytest.mark.parametrize("tier", ["cloud", "institution"])
@pytest.mark.parametrize("name", ["feddf", "fedbe", "fedlaw"])
def test_a_rule_that_needs_samples_is_refused_without(tier: str, name: str) -> None:
    tree = {"topology": {"institutions": 2, "devices": 4}, tier: {"aggregation": {"name": name}}}
    with pytest.raises(InvalidExperiment) as refused:
        parse(tree)
    assert str(refused.value) == (
        f"{tier}.aggregation.name = {name!r}: needs samples at the node, and data.node_samples is 0. "
        "Set data.node_samples, for instance to 2 % of the training samples."
    )
    assert parse(tree | {"data": {"node_samples": 10}}).data.node_samples == 10
