"""`topology = "lab"`: the topology of the nodes that are there."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DuplicateName, InvalidExperiment, LeftOut
from common.experiment.reading import parse
from common.experiment.short_form import PresentNode, topology_of
from common.experiment.topology import CLOUD, check_parent


def institution(name: str, parent: str = CLOUD) -> PresentNode:
    return PresentNode(name, "institution", parent, f"host of {name}")


def device(name: str, parent: str = CLOUD) -> PresentNode:
    return PresentNode(name, "device", parent, f"host of {name}")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_lab_that_is_there_is_the_lab_of_as_many_nodes(sizes: list[int], random: Random) -> None:
    """Numbered nodes that answer in any order are those that an experiment gets by their members."""
    nodes, members, number = [], {}, 0
    for i, size in enumerate(sizes):
        members[f"institution-{i}"] = [f"device-{number + k}" for k in range(size)]
        number += size
    for name, devices in members.items():
        nodes += [institution(name), *(device(each, name) for each in devices)]
    random.shuffle(nodes)
    found, left_out = topology_of(nodes)
    counted = {"institutions": len(sizes), "devices": number, "members": members}
    assert parse({"topology": found}).tree.children == parse({"topology": counted}).tree.children
    assert found["devices"] == [f"device-{k}" for k in range(number)] and left_out == []


def test_names_are_in_the_order_of_their_numbers() -> None:
    names = ["pi-2", "pi-10", "gpu", "pi-2b", "pi-1-12", "pi-1-3"]
    found, _ = topology_of([device(name) for name in names])
    assert found == {"institutions": 0, "devices": ["gpu", "pi-1-3", "pi-1-12", "pi-2", "pi-2b", "pi-10"]}


def test_nodes_without_a_place_are_left_out_and_named() -> None:
    nodes = [institution("b"), institution("a"), institution("lost", "region"), device("x", "a"), device("y", "nobody")]
    found, left_out = topology_of(nodes)
    assert found == {"institutions": ["a"], "devices": ["x"], "members": {"a": ["x"]}}
    assert left_out == [
        "lost is left out: its parent 'region' is not there",
        "y is left out: its parent 'nobody' is not there",
        "b is left out: it has no device",
    ]


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], "no device is there"),
        ([institution("a")], "no device is there"),
        ([institution("a"), device("x", "b")], "no device is there"),
        ([institution("a"), device("x", "a"), device("y"), device("z")], r"others below the cloud \(y, z\)"),
        ([institution("r"), institution("a", "r"), device("x", "a")], r"a is below r.*\[\[tiers\]\]"),
    ],
)
def test_labs_that_are_no_topology_are_refused(nodes: list[PresentNode], text: str) -> None:
    with pytest.raises(InvalidExperiment, match=text):
        topology_of(nodes)


def test_two_nodes_of_one_name_are_refused_with_their_hosts() -> None:
    twice = [device("x"), PresentNode("x", "device", CLOUD, "pi-7")]
    with pytest.raises(DuplicateName, match="2 nodes of the lab are called 'x', on host of x and pi-7"):
        topology_of(twice)


def test_only_a_cloud_knows_which_nodes_are_there() -> None:
    with pytest.raises(InvalidExperiment, match="topology = 'lab': only `fedstrata cloud` can ask") as refused:
        parse({"topology": "lab"})
    assert refused.value.exit_code == 4


def test_a_device_that_came_after_the_roll_is_left_out_and_one_of_another_parent_is_refused() -> None:
    there = [institution("i"), institution("j"), device("a", "i"), device("b", "j")]
    tree = parse({"topology": topology_of(there)[0]}).tree
    with pytest.raises(LeftOut, match="late is not there: no device of this experiment"):
        check_parent(tree, "late", "i", role="device", among=tree.devices)
    with pytest.raises(InvalidExperiment, match="b is not there: it belongs to j") as refused:
        check_parent(tree, "b", "i", role="device", among=tree.devices)
    assert not isinstance(refused.value, LeftOut)
