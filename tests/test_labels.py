"""What runs are called, which of them are one series, and which are of one task."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidExperiment
from deploy.console.tabular import Spread
from deploy.results.run import Run
from deploy.results.series import (
    by_seed,
    condition_notes,
    conditions,
    differing,
    flat,
    labels,
    nodes_of,
    paired,
    series_of,
)

MakeRun = Callable[..., Path]
TEMPO = {"cloud": {"epoch_control": {"name": "tempo"}}}
TIERS = {
    "tiers": [
        {"name": "wan", "children": "region", "fan_out": 2, "aggregation": {"name": "fedcross"}},
        {"name": "metro", "children": "institution", "fan_out": 2},
        {"name": "lan", "fan_out": 2},
    ]
}


def rule(name: str, **keys: Any) -> dict[str, Any]:
    return {"cloud": {"aggregation": {"name": name, **keys}}}


def named(root: Path, make_run: MakeRun, *trees: dict[str, Any]) -> list[str]:
    return [each.label for each in series_of([Run(make_run(root, tree)) for tree in trees])]


def test_leaves_have_dotted_keys() -> None:
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": "f"}) == {"a.b": 1, "a.c.d": [2], "e": "f"}
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}]) == ["b"]


def test_a_label_has_the_keys_that_differ_in_short() -> None:
    assert labels([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}]) == ["b 2", "b 3", "b none"]
    assert labels([{"t.rate": 0.5, "u.rate": 1, "on": True}, {"t.rate": 0.25, "u.rate": 1, "on": False}]) == [
        "t.rate 0.5, on true", "t.rate 0.25, on false"
    ]  # fmt: skip
    assert labels([{"links.wan.up_mbit": 5.0}, {"links.wan.delay_ms": 0.0}]) == [
        "wan.up_mbit 5, wan.delay_ms none", "wan.up_mbit unlimited, wan.delay_ms 0"
    ]  # fmt: skip


def test_a_name_is_in_a_label_only_if_nothing_else_distinguishes() -> None:
    assert labels([{"name": "x", "b": 2}, {"name": "y", "b": 3}]) == ["b 2", "b 3"]
    assert labels([{"name": "x"}, {"name": "y"}]) == ["name x", "name y"]
    assert labels([{"name": "x", "b": 1}]) == ["x"]
    assert labels([{"name": "x", "b": 1}, {"name": "y", "b": 1}, {"name": "y", "b": 2}]) == [
        "name x, b 1", "name y, b 1", "name y, b 2"
    ]  # fmt: skip


def test_long_labels_are_cut_where_they_still_distinguish() -> None:
    assert labels([dict.fromkeys("abcdef", 1), dict.fromkeys("abcdef", 2)])[0] == "a 1, b 1, c 1, d 1, 2 more"
    many = [dict.fromkeys("abcdef", 1), dict.fromkeys("abcdef", 2), {**dict.fromkeys("abcdef", 2), "f": 3}]
    assert labels(many)[1:] == ["a 2, b 2, c 2, d 2, e 2, f 2", "a 2, b 2, c 2, d 2, e 2, f 3"]


@given(trees=st.lists(st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 2)), min_size=1, max_size=6))
def test_different_trees_have_different_labels(trees: list[dict[str, int]]) -> None:
    found = labels(trees)
    for mine, own in zip(trees, found, strict=True):
        assert [other == mine for other in trees] == [label == own for label in found]


def test_rules_are_named_by_their_names_and_by_what_is_set(tmp_path: Path, make_run: MakeRun) -> None:
    cross, nine, avg = rule("fedcross"), rule("fedcross", alpha=0.9), rule("fedavg")
    assert named(tmp_path, make_run, avg, cross) == ["fedavg", "fedcross"]
    assert named(tmp_path, make_run, avg, nine) == ["fedavg", "fedcross, alpha 0.9"]
    assert named(tmp_path, make_run, avg, nine, cross) == ["fedavg", "fedcross, alpha 0.9", "fedcross, alpha 0.99"]
    assert named(tmp_path, make_run, {}, TEMPO) == ["fixed", "tempo"]
    assert named(tmp_path, make_run, {}, {"institution": rule("fedcross")["cloud"]}) == [
        "institution fedavg", "institution fedcross"
    ]  # fmt: skip
    assert named(tmp_path, make_run, {"training": {"epochs": 2}}, {"training": {"epochs": 4}}) == [
        "epochs 2", "epochs 4"
    ]  # fmt: skip


def test_a_profile_stands_for_its_numbers(tmp_path: Path, make_run: MakeRun) -> None:
    lte, own = {"links": {"wan": "lte"}}, {"links": {"wan": {"up_mbit": 5.0, "down_mbit": 5.0}}}
    assert named(tmp_path, make_run, lte, own) == [
        "wan lte", "wan.up_mbit 5, wan.down_mbit 5, wan.delay_ms 0"
    ]  # fmt: skip


def test_runs_that_differ_in_the_seed_alone_are_a_series(tmp_path: Path, make_run: MakeRun) -> None:
    trees: list[dict[str, Any]] = [{"seed": 1}, {"seed": 1, **TEMPO}, {"seed": 2, "data": {"root": "/else"}},
                                   {"seed": 2, **TEMPO}]  # fmt: skip
    found = series_of([Run(make_run(tmp_path, tree)) for tree in trees])
    assert [(each.label, each.whole, each.task) for each in found] == [("fixed", "fixed", ""), ("tempo", "tempo", "")]
    assert [[run.seed for run in each.runs] for each in found] == [[1, 2], [1, 2]]
    assert found[0].names == ["fixed, seed 1", "fixed, seed 2"]
    (twice,) = series_of([Run(make_run(tmp_path, {})) for _ in range(2)])
    assert twice.names == [f"experiment, seed 1 ({run.id[-6:]})" for run in twice.runs]


def test_a_sweep_names_its_series(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [Run(make_run(tmp_path, {"seed": seed, **tree})) for tree in ({}, TEMPO) for seed in (1, 2)]
    digests = [run.manifest["experiment_digest"] for run in runs]

    def names(*cells: str) -> list[tuple[str, str]]:
        (tmp_path / "sweep.json").write_text(json.dumps({"cells": dict(zip(digests, cells, strict=False))}))
        return [(each.label, each.whole) for each in series_of([Run(run.path) for run in runs])]

    assert names("IID, A", "IID, A", "IID, B", "IID, B") == [("IID, A", "IID, A"), ("IID, B", "IID, B")]
    by_keys = [("fixed", "fixed"), ("tempo", "tempo")]
    assert names("A", "A", "A", "A") == names("A", "A", "B") == names("A", "C", "B", "B") == names() == by_keys
    assert [each.label for each in series_of(runs, ["mine", "other"])] == ["mine", "other"]
    for text in ("{", "[]", '{"cells": 3}'):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(InvalidExperiment, match=r"sweep\.json"):
            series_of([Run(run.path) for run in runs])


def test_long_names_are_numbered(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [Run(make_run(tmp_path, {"seed": 1, **tree})) for tree in ({}, TEMPO)]
    assert [each.short for each in series_of(runs, ["a" * 24, "b"])] == ["a" * 24, "b"]
    assert [each.short for each in series_of(runs, ["a" * 25, "b"])] == ["#1", "#2"]
    assert [each.names for each in series_of(runs, ["a" * 25, "b"])] == [["#1"], ["#2"]]
    assert [each.short for each in series_of(runs[:1], ["a" * 25])] == ["a" * 25]  # nothing to tell apart


def test_given_names_win(tmp_path: Path, make_run: MakeRun) -> None:
    found = [Run(make_run(tmp_path, tree)) for tree in ({}, TEMPO)]
    assert [each.label for each in series_of(found, ["one", "two"])] == ["one", "two"]
    with pytest.raises(InvalidExperiment, match=r"--label.*1 for 2 series.*one for each of: fixed; tempo"):
        series_of(found, ["one"])


@pytest.mark.parametrize(
    ("tree", "task"),
    [
        ({"topology": {"institutions": 1, "devices": 4}}, ("1 institution, 1 device", "1 institution, 4 devices")),
        ({"topology": {"institutions": 0}}, ("1 institution, 1 device", "1 device")),
        (TIERS, ("1 institution, 1 device", "2 regions, 4 institutions, 8 devices")),
        ({"data": {"noise": 0.2}}, ("noise 0", "noise 0.2")),
        ({"model": {"name": "mlp_digits"}}, ("cnn_digits", "mlp_digits")),
    ],
)
def test_other_data_nodes_or_models_are_another_task(
    tmp_path: Path, make_run: MakeRun, tree: dict[str, Any], task: tuple[str, str]
) -> None:
    base = {"model": {"name": "cnn_digits"}}
    found = series_of([Run(make_run(tmp_path, each)) for each in (base, base | tree)])
    assert [each.task for each in found] == [each.whole for each in found] == list(task)


def test_a_run_without_a_network_is_another_task(tmp_path: Path, make_run: MakeRun) -> None:
    paths = [make_run(tmp_path, {}) for _ in range(2)]
    manifest = json.loads((paths[1] / "manifest.json").read_text())
    (paths[1] / "manifest.json").write_text(json.dumps({**manifest, "direct": {}}))
    assert [each.task for each in series_of([Run(path) for path in paths])] == ["network", "no network"]


def test_tiers_have_the_keys_of_the_short_form(tmp_path: Path, make_run: MakeRun) -> None:
    one, other = {**TIERS, "rounds": 3}, json.loads(json.dumps({**TIERS, "rounds": 3}))
    other["tiers"][0]["aggregation"] = {"name": "fedavg"}
    other["tiers"][1]["rounds"] = 2
    assert named(tmp_path, make_run, one, other) == ["fedcross, region.rounds 1", "fedavg, region.rounds 2"]


def test_uneven_parents_are_in_the_name_of_the_nodes(tmp_path: Path, make_run: MakeRun) -> None:
    members = {"institution-0": ["device-0"], "institution-1": ["device-1", "device-2", "device-3"]}
    tree = {"topology": {"institutions": 2, "devices": 4, "members": members}}
    assert nodes_of(Run(make_run(tmp_path, tree))) == "2 institutions, 4 devices (1 + 3)"
    assert nodes_of(Run(make_run(tmp_path, {"topology": {"institutions": 2, "devices": 5}}))).endswith("5 devices")


def test_one_seed_with_two_splits_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    found = [make_run(tmp_path, {"seed": seed}) for seed in (1, 1, 2)]
    for path, digest in zip(found, "aba", strict=True):
        (path / "partition.json").write_text(json.dumps({"digest": digest, "devices": {}}))
    with pytest.raises(InvalidExperiment, match="the same seed, but different splits"):
        series_of([Run(path) for path in found])
    assert len(series_of([Run(path) for path in found[1:]])) == 1


def test_other_conditions_are_found_by_kind(tmp_path: Path, make_run: MakeRun) -> None:
    one = Run(make_run(tmp_path, {}))
    assert conditions(one, one) == {}
    for kind, change, text in (
        ("hardware", {"cpus": 999}, f"cpus: {one.manifest['cpus']} and 999"),
        ("versions", {"python": "2.7"}, f"python: {one.manifest['python']} and 2.7"),
    ):
        other = make_run(tmp_path, {})
        (other / "manifest.json").write_text(json.dumps({**one.manifest, **change}))
        assert conditions(one, Run(other)) == {kind: text}
    slower = Run(make_run(tmp_path, {"links": {"wan": {"up_mbit": 5.0}}}))
    assert conditions(one, slower) == {"links": "links.of.institution-0.up_mbit: none and 5"}


def test_runs_that_began_on_a_busy_machine_are_named(tmp_path: Path, make_run: MakeRun) -> None:
    paths = [make_run(tmp_path, {"seed": seed}) for seed in range(3)]
    for path, load in zip(paths, (0.9, 1.2, 3.0), strict=True):
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "cpus": 2, "load": load}))
    note = "experiment: 2 of 3 runs began on a busy machine: load up to 1.5 a core"
    assert condition_notes(series_of([Run(path) for path in paths])) == [note]


def test_what_several_series_have_in_common_is_one_note(tmp_path: Path, make_run: MakeRun) -> None:
    slow = {"links": {"wan": {"up_mbit": 5.0}}}
    paths = [make_run(tmp_path, tree) for tree in ({}, slow, {**slow, **TEMPO})]
    names = ["first", "slow", "slow tempo"]
    (links,) = condition_notes(series_of([Run(path) for path in paths], names))
    assert links == "slow; slow tempo: other links than first: links.of.institution-0.up_mbit: none and 5"
    for path, load in zip(paths, (4.0, 6.0, 5.0), strict=True):
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "cpus": 2, "load": load}))
    notes = condition_notes(series_of([Run(path) for path in paths], names), attrgetter("short"))
    assert notes == [links, "3 of 3 runs began on a busy machine: load up to 3.0 a core"]


VALUES = st.dictionaries(st.sampled_from("123456"), st.floats(1e-3, 1e3), max_size=6)


@given(first=VALUES, other=VALUES)
def test_paired_differences_are_those_of_the_common_seeds(first: dict[str, float], other: dict[str, float]) -> None:
    common = [seed for seed in first if seed in other]
    found = paired(first, other, lambda mine, theirs: theirs - mine)
    if not common:
        assert found is None
        return
    apart = np.array([other[seed] - first[seed] for seed in common])
    assert found is not None and found.mean == pytest.approx(apart.mean(), abs=1e-9)
    if len(common) > 1:
        assert found.deviation == pytest.approx(apart.std(ddof=1), abs=1e-9)
    else:
        assert found.deviation is None


def test_values_by_seed_are_means_of_seeds_that_all_have_one(tmp_path: Path, make_run: MakeRun) -> None:
    seeds, accuracies = (1, 1, 2, 3), ((0.5,), (0.7,), (0.9,), (None,))
    found = [
        Run(make_run(tmp_path, {"seed": seed}, accuracies=each)) for seed, each in zip(seeds, accuracies, strict=True)
    ]
    assert by_seed(found, lambda run: run.accuracy) == {"1": pytest.approx(0.6), "2": 0.9}
    assert paired({"1": 1.0}, {"2": 1.0}, lambda a, b: a) is None and Spread.of([]) is None
