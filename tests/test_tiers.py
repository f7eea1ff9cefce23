"""Tiers as data: any number of layers, in the general form and in the short one of one and two
tiers.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import lint
from fedstrata.common.experiment.reading import load, parse, to_toml
from fedstrata.common.settings.topology import Tree

REGIONS: list[dict[str, Any]] = [
    {"name": "core", "children": "region", "fan_out": 2, "link": "wan-200mbit"},
    {
        "name": "wan",
        "children": "institution",
        "fan_out": 2,
        "rounds": 3,
        "transfer": {"up": "fp16"},
    },
    {
        "name": "lan",
        "fan_out": 2,
        "rounds": 2,
        "aggregation": {"name": "fedcross"},
        "link": {"up_mbit": 5.0},
    },
]


def test_the_tree_has_every_node_once_and_its_path() -> None:
    experiment = parse({"tiers": REGIONS})
    tree = experiment.tree
    assert [len(layer) for layer in tree.layers] == [1, 2, 4, 8]
    assert (
        tree.path("device-7") == "cloud/region-1/institution-3/device-7"
        and tree.path("cloud") == "cloud"
    )
    assert (
        tree.children["institution-2"] == ["device-4", "device-5"]
        and tree.parent("region-1") == "cloud"
    )
    assert list(tree.below("region-0")) == [
        "institution-0", "institution-1", "device-0", "device-1", "device-2", "device-3"
    ]  # fmt: skip
    assert tree.aggregators == ["region-0", "region-1", *(f"institution-{i}" for i in range(4))]
    assert experiment.count_by_kind() == {"regions": 2, "institutions": 4, "devices": 8}


def test_a_tier_has_its_own_settings_and_rounds() -> None:
    experiment = parse({"tiers": REGIONS})
    assert experiment.tier_names == ["core", "wan", "lan"]
    assert [experiment.rounds_of(depth) for depth in range(3)] == [
        1,
        3,
        6,
    ] and experiment.device_rounds == 6
    assert (experiment.link("region-0").up_mbit, experiment.link("device-3").up_mbit) == (
        200.0,
        5.0,
    )
    assert experiment.link("institution-0").up_mbit is None
    assert experiment.tiers[1].transfer.up.name == "fp16"


def test_the_general_form_is_written_and_read_again() -> None:
    experiment = parse({"tiers": REGIONS, "links": {"of": {"region-1": "lte"}}})
    text = to_toml(experiment)
    assert parse(tomllib.loads(text)) == experiment == parse(experiment.to_json())
    assert text.count("[[tiers]]") == 3 and "[topology]" not in text and "[institution]" not in text


def test_the_short_form_has_the_same_tiers() -> None:
    short = parse(
        {
            "topology": {"institutions": 2, "devices": 4},
            "institution": {"rounds": 3, "participation": 0.5},
            "links": {"wan": {"up_mbit": 2.0}, "lan": "lte"},
            "transfer": {"lan": {"up": "fp16"}},
            "cloud": {"aggregation": {"name": "fedmr"}},
        }
    )
    general = parse(
        {
            "tiers": [
                {
                    "name": "wan",
                    "children": "institution",
                    "fan_out": 2,
                    "aggregation": {"name": "fedmr"},
                    "link": {"up_mbit": 2.0},
                },
                {
                    "name": "lan",
                    "fan_out": 2,
                    "rounds": 3,
                    "participation": 0.5,
                    "link": "lte",
                    "transfer": {"up": "fp16"},
                },
            ]
        }
    )
    assert short.tree.children == general.tree.children and short.sizes() == general.sizes()
    ways = {"fan_out", "number"}
    assert [t.model_dump(exclude=ways) for t in short.tiers] == [
        t.model_dump(exclude=ways) for t in general.tiers
    ]
    assert lint.warnings(short) == [
        reason.replace("tiers.lan", "institution") for reason in lint.warnings(general)
    ]


def test_without_institutions_the_devices_are_below_the_cloud() -> None:
    experiment = parse(
        {"topology": {"institutions": 0, "devices": 3}, "links": {"wan": {"up_mbit": 2.0}}}
    )
    assert experiment.tree.children == {"cloud": ["device-0", "device-1", "device-2"]}
    assert experiment.tier_names == ["wan"] and experiment.link("device-1").up_mbit == 2.0
    assert experiment.device_rounds == 1 and experiment.sizes() == [[3]]
    assert "[[tiers]]" not in to_toml(experiment)


@given(fan_outs=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_every_node_has_one_parent_one_layer_up(fan_outs: list[int], data: st.DataObject) -> None:
    tiers = [
        {"name": f"t{i}", "children": f"kind{i}", "fan_out": size}
        for i, size in enumerate(fan_outs)
    ]
    tree = parse({"tiers": tiers}).tree
    node = data.draw(st.sampled_from(tree.nodes))
    assert (
        tree.depth(tree.parent(node)) == tree.depth(node) - 1
        and node in tree.children[tree.parent(node)]
    )
    assert tree.path(node) == f"{tree.path(tree.parent(node))}/{node}"
    assert sorted(tree.below("cloud")) == sorted(tree.nodes) and set(tree.devices) == set(
        tree.layers[-1]
    )
    assert sum(map(len, tree.children.values())) == len(tree.nodes)


def test_devices_and_their_partitions_are_in_the_order_of_the_tree() -> None:
    members = {"b": ["device-0", "device-1"], "a": ["device-2"]}
    tree = parse({"topology": {"institutions": ["a", "b"], "devices": 3, "members": members}}).tree
    assert tree.devices == ["device-2", "device-0", "device-1"]


@given(parents=st.integers(1, 12), more=st.integers(0, 60))
def test_a_number_of_children_is_shared_out_among_the_parents(parents: int, more: int) -> None:
    tiers = [
        {"name": "top", "children": "site", "fan_out": parents},
        {"name": "low", "number": parents + more},
    ]
    experiment = parse({"tiers": tiers})
    assert experiment.tree.devices == [f"device-{i}" for i in range(parents + more)]
    sizes = experiment.sizes()[-1]
    assert [len(experiment.tree.children[f"site-{i}"]) for i in range(parents)] == sizes
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "topology",
    [
        {"institutions": 3, "devices": 10},
        {"institutions": 0, "devices": 4},
        {"institutions": 0, "devices": ["a", "b"]},
        {"institutions": ["x", "y"], "devices": 5},
        {"institutions": 2, "devices": ["a", "b", "c"]},
        {
            "institutions": ["x", "y"],
            "devices": ["a", "b", "c"],
            "members": {"y": ["a", "c"], "x": ["b"]},
        },
    ],
)
def test_a_short_form_is_written_as_it_was_given(topology: dict[str, Any]) -> None:
    experiment = parse({"topology": topology, "cloud": {"participation": 0.5}})
    written = tomllib.loads(to_toml(experiment))
    assert {key: written["topology"][key] for key in ("institutions",)} == {
        "institutions": topology["institutions"]
    }
    assert parse(written) == experiment == parse(experiment.to_json())
    assert parse(written).digest == experiment.digest and "tiers" not in written


SETTINGS = {
    "rounds=2": "institution.rounds=2",
    "aggregation=fedmr": "institution.aggregation=fedmr",
    "aggregation.name=fedmr": "institution.aggregation.name=fedmr",
    "link=lte": "links.lan=lte",
    "link.up_mbit=3": "links.lan.up_mbit=3",
    "transfer.up=fp16": "transfer.lan.up=fp16",
}


@pytest.mark.parametrize(("below", "short"), SETTINGS.items())
def test_a_tiers_key_is_set_by_its_name_in_both_forms(
    tmp_path: Path, below: str, short: str
) -> None:
    file = tmp_path / "it.toml"
    file.write_text("[topology]\ndevices = 8\ninstitutions = 2\n", encoding="utf-8")
    assert load(file, [f"tiers.lan.{below}"]) == load(file, [short]) != load(file)
    tiers = (
        '[[tiers]]\nname = "top"\nchildren = "site"\nfan_out = 2\n[[tiers]]\nname = '
        '"low"\nfan_out = 4\n'
    )
    file.write_text(tiers, encoding="utf-8")
    changed, plain = load(file, [f"tiers.low.{below}"]), load(file)
    assert changed.tiers[0] == plain.tiers[0] and changed.tiers[1] != plain.tiers[1]


def test_more_nodes_than_have_names_can_only_be_planned() -> None:
    experiment = parse({"topology": {"institutions": 1000, "devices": 10_000_000}})
    assert experiment.sizes() == [[1000], [10_000] * 1000]
    with pytest.raises(
        InvalidExperiment, match=r"topology = 10001000: too many nodes .* at most 1,000,000"
    ):
        _ = experiment.tree


def test_a_tree_knows_nobody_else() -> None:
    tree = Tree([{"cloud": ["a"]}])
    assert "a" in tree and "b" not in tree and tree.aggregators == []
    with pytest.raises(KeyError):
        tree.parent("cloud")
