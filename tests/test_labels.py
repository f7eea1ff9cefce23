"""What runs are called, which of them are one series, and which are of one task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.tables import flat
from fedstrata.deploy.console.tabular import Spread
from fedstrata.deploy.results.pairs import by_seed, paired
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.series import (
    condition_notes,
    conditions,
    differing,
    labels,
    nodes_of,
    series_of,
)

TEMPO = {"cloud": {"epoch_control": {"name": "tempo"}}}


def tiers(rule: str, rounds: int = 1) -> dict[str, Any]:
    wan = {"name": "wan", "children": "region", "fan_out": 2, "aggregation": {"name": rule}}
    metro = {"name": "metro", "children": "institution", "fan_out": 2, "rounds": rounds}
    return {"tiers": [wan, metro, {"name": "lan", "fan_out": 2}]}


def rule(name: str, **keys: Any) -> dict[str, Any]:
    return {"cloud": {"aggregation": {"name": name, **keys}}}


MakeRuns = Callable[..., list[Run]]


@pytest.fixture
def runs_of(tmp_path: Path, make_run: Callable[..., Path]) -> MakeRuns:
    """Makes a run of each tree."""
    return lambda *trees: [Run(make_run(tmp_path, tree)) for tree in trees]


def change(run: Run, **facts: Any) -> Run:
    """Return a run with other facts in its manifest."""
    path = run.path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return Run(run.path)


def test_leaves_have_dotted_keys() -> None:
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": "f"}) == {"a.b": 1, "a.c.d": [2], "e": "f"}
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}]) == ["b"]


def test_a_label_has_the_keys_that_differ_in_short() -> None:
    assert labels([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}]) == ["b 2", "b 3", "b none"]
    assert labels(
        [{"t.rate": 0.5, "u.rate": 1, "on": True}, {"t.rate": 0.25, "u.rate": 1, "on": False}]
    ) == ["t.rate 0.5, on true", "t.rate 0.25, on false"]
    assert labels([{"links.wan.up_mbit": 5.0}, {"links.wan.delay_ms": 0.0}]) == [
        "up_mbit 5, delay_ms none", "up_mbit unlimited, delay_ms 0"
    ]  # fmt: skip


def test_a_name_is_in_a_label_only_if_nothing_else_distinguishes() -> None:
    assert labels([{"name": "x", "b": 2}, {"name": "y", "b": 3}]) == ["b 2", "b 3"]
    assert labels([{"name": "x"}, {"name": "y"}]) == ["name x", "name y"]
    assert labels([{"name": "x", "b": 1}]) == ["x"]
    assert labels([{"name": "x", "b": 1}, {"name": "y", "b": 1}, {"name": "y", "b": 2}]) == [
        "name x, b 1", "name y, b 1", "name y, b 2"
    ]  # fmt: skip


def test_long_labels_are_cut_where_they_still_distinguish() -> None:
    assert (
        labels([dict.fromkeys("abcdef", 1), dict.fromkeys("abcdef", 2)])[0]
        == "a 1, b 1, c 1, d 1, 2 more"
    )
    many = [
        dict.fromkeys("abcdef", 1),
        dict.fromkeys("abcdef", 2),
        {**dict.fromkeys("abcdef", 2), "f": 3},
    ]
    assert labels(many)[1:] == ["a 2, b 2, c 2, d 2, e 2, f 2", "a 2, b 2, c 2, d 2, e 2, f 3"]


@given(
    trees=st.lists(
        st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 2)), min_size=1, max_size=6
    )
)
def test_different_trees_have_different_labels(trees: list[dict[str, int]]) -> None:
    found = labels(trees)
    for mine, own in zip(trees, found, strict=True):
        assert [other == mine for other in trees] == [label == own for label in found]


CROSS, NINE, AVG = rule("fedcross"), rule("fedcross", alpha=0.9), rule("fedavg")
LTE, ITS_RATES = ({"links": {"wan": wan}} for wan in ("lte", {"up_mbit": 5.0, "down_mbit": 5.0}))


@pytest.mark.parametrize(
    ("trees", "wanted"),
    [
        ([AVG, CROSS], ["fedavg", "fedcross"]),
        ([AVG, NINE], ["fedavg", "fedcross, alpha 0.9"]),
        ([AVG, NINE, CROSS], ["fedavg", "fedcross, alpha 0.9", "fedcross"]),
        ([{}, TEMPO], ["fixed", "tempo"]),
        ([{}, {"institution": CROSS["cloud"]}], ["institution fedavg", "institution fedcross"]),
        ([{"training": {"epochs": 2}}, {"training": {"epochs": 4}}], ["epochs 2", "epochs 4"]),
        (
            [LTE, ITS_RATES],
            [
                "up_mbit 6, down_mbit 13, wan.delay_ms 35, profile lte",
                "up_mbit 5, down_mbit 5, wan.delay_ms 0",
            ],
        ),
        (
            [tiers("fedcross"), tiers("fedavg", 2)],
            ["fedcross, region.rounds 1", "fedavg, region.rounds 2"],
        ),
    ],
)
def test_series_are_named_by_rules_and_keys_that_differ(
    trees: list[dict[str, Any]], wanted: list[str], runs_of: MakeRuns
) -> None:
    assert [each.label for each in series_of(runs_of(*trees))] == wanted


def test_runs_that_differ_in_the_seed_alone_are_a_series(runs_of: MakeRuns) -> None:
    trees: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 1, **TEMPO},
        {"seed": 2, "data": {"root": "/else"}},
        {"seed": 2, **TEMPO},
    ]
    found = series_of(runs_of(*trees))
    assert [(each.label, each.whole, each.task) for each in found] == [
        ("fixed", "fixed", ""),
        ("tempo", "tempo", ""),
    ]
    assert [[run.seed for run in each.runs] for each in found] == [[1, 2], [1, 2]]
    assert found[0].names == ["fixed, seed 1", "fixed, seed 2"]
    (twice,) = series_of(runs_of({}, {}))
    assert twice.names == [f"experiment, seed 1 ({run.id[-6:]})" for run in twice.runs]


def test_a_sweep_names_its_series(tmp_path: Path, runs_of: MakeRuns) -> None:
    runs = runs_of(*({"seed": seed, **tree} for tree in ({}, TEMPO) for seed in (1, 2)))
    digests = [run.manifest["experiment_digest"] for run in runs]

    def names(*cells: str) -> list[tuple[str, str]]:
        (tmp_path / "sweep.json").write_text(
            json.dumps({"cells": dict(zip(digests, cells, strict=False))})
        )
        return [(each.label, each.whole) for each in series_of([Run(run.path) for run in runs])]

    assert names("IID, A", "IID, A", "IID, B", "IID, B") == [
        ("IID, A", "IID, A"),
        ("IID, B", "IID, B"),
    ]
    by_keys = [("fixed", "fixed"), ("tempo", "tempo")]
    assert names("A", "A", "A", "A") == names() == by_keys
    assert names("A", "A", "B") == [("A", "A"), ("B", "B")], (
        "a run that no cell names is one of its experiment's"
    )
    assert names("A", "C", "B", "B") == [("fixed", "fixed"), ("B", "B")]
    assert [each.label for each in series_of(runs, ["mine", "other"])] == ["mine", "other"]
    for text in ("{", "[]", '{"cells": 3}'):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(InvalidExperiment, match=r"sweep\.json"):
            series_of([Run(run.path) for run in runs])


def test_a_cell_is_one_series_on_whichever_hosts(tmp_path: Path, runs_of: MakeRuns) -> None:
    one, other, tempo = runs_of({"seed": 1}, {"seed": 2}, TEMPO)
    apart = [change(one, instructions="AVX2"), change(other, instructions="AVX-512")]
    apart.append(change(tempo, instructions="AVX2"))
    assert [len(each.runs) for each in series_of(apart)] == [1, 1, 1]
    cells = {
        run.manifest["experiment_digest"]: name for run, name in zip(apart, "AAB", strict=True)
    }
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": cells}))
    found = series_of([Run(run.path) for run in apart])
    assert [(each.label, each.whole, each.seeds) for each in found] == [
        ("A", "A", ["1", "2"]),
        ("B", "B", ["1"]),
    ]
    assert "A: other hardware than A: instructions: AVX2 and AVX-512" in condition_notes(found)


def test_given_names_win(runs_of: MakeRuns) -> None:
    found = runs_of({}, TEMPO)
    assert [each.label for each in series_of(found, ["one", "two"])] == ["one", "two"]
    with pytest.raises(
        InvalidExperiment, match=r"--label.*1 for 2 series.*one for each of: fixed; tempo"
    ):
        series_of(found, ["one"])


@pytest.mark.parametrize(
    ("tree", "task"),
    [
        (
            {"topology": {"institutions": 1, "devices": 4}},
            ("1 institution, 1 device", "1 institution, 4 devices"),
        ),
        ({"topology": {"institutions": 0}}, ("1 institution, 1 device", "1 device")),
        (tiers("fedcross"), ("1 institution, 1 device", "2 regions, 4 institutions, 8 devices")),
        ({"data": {"noise": 0.2}}, ("noise 0", "noise 0.2")),
        ({"model": {"name": "mlp_digits"}}, ("cnn_digits", "mlp_digits")),
    ],
)
def test_other_data_nodes_or_models_are_another_task(
    runs_of: MakeRuns, tree: dict[str, Any], task: tuple[str, str]
) -> None:
    base = {"model": {"name": "cnn_digits"}}
    found = series_of(runs_of(base, base | tree))
    assert [each.task for each in found] == [each.whole for each in found] == list(task)


def test_a_run_without_a_network_is_another_task(runs_of: MakeRuns) -> None:
    one, other = runs_of({}, {})
    assert [each.task for each in series_of([one, change(other, direct={})])] == [
        "network",
        "no network",
    ]


def test_uneven_parents_are_in_the_name_of_the_nodes(runs_of: MakeRuns) -> None:
    members = {"institution-0": ["device-0"], "institution-1": ["device-1", "device-2", "device-3"]}
    tree = {"topology": {"institutions": 2, "devices": 4, "members": members}}
    uneven, even = runs_of(tree, {"topology": {"institutions": 2, "devices": 5}})
    assert nodes_of(uneven) == "2 institutions, 4 devices (1 + 3)" and nodes_of(even).endswith(
        "5 devices"
    )


def test_one_seed_with_two_splits_is_refused(runs_of: MakeRuns) -> None:
    found = runs_of({"seed": 1}, {"seed": 1}, {"seed": 2})
    for run, digest in zip(found, "aba", strict=True):
        (run.path / "partition.json").write_text(json.dumps({"digest": digest, "devices": {}}))
    with pytest.raises(InvalidExperiment, match="the same seed, but different splits"):
        series_of([Run(run.path) for run in found])
    assert len(series_of([Run(run.path) for run in found[1:]])) == 1


def test_other_conditions_are_found_by_kind(runs_of: MakeRuns) -> None:
    one, other, slower = runs_of({}, {}, {"links": {"wan": {"up_mbit": 5.0}}})
    python, cpus = one.manifest["python"], one.manifest["cpus"]
    assert conditions(one, one) == {}
    assert conditions(one, change(other, cpus=999)) == {"hardware": f"cpus: {cpus} and 999"}
    assert conditions(one, change(other, cpus=cpus, python="2.7")) == {
        "versions": f"python: {python} and 2.7"
    }
    assert conditions(one, slower) == {"links": "links.of.institution-0.up_mbit: none and 5"}


def loaded(runs: list[Run], *loads: float) -> list[Run]:
    """Return runs that began on machines of two cores with these loads."""
    return [change(run, cpus=2, load=load) for run, load in zip(runs, loads, strict=True)]


def test_runs_that_began_on_a_busy_machine_are_named(runs_of: MakeRuns) -> None:
    runs = loaded(runs_of(*({"seed": seed} for seed in range(3))), 0.9, 1.2, 3.0)
    note = "experiment: 2 of 3 runs began on a busy machine: load up to 1.5 a core"
    assert condition_notes(series_of(runs)) == [note]


def test_what_several_series_have_in_common_is_one_note(runs_of: MakeRuns) -> None:
    slow = {"links": {"wan": {"up_mbit": 5.0}}}
    runs, names = runs_of({}, slow, {**slow, **TEMPO}), ["first", "slow", "slow tempo"]
    (links,) = condition_notes(series_of(runs, names))
    assert (
        links
        == "slow; slow tempo: other links than first: links.of.institution-0.up_mbit: none and 5"
    )
    notes = condition_notes(series_of(loaded(runs, 4.0, 6.0, 5.0), names))
    assert notes == [links, "3 of 3 runs began on a busy machine: load up to 3.0 a core"]


VALUES = st.dictionaries(st.sampled_from("123456"), st.floats(1e-3, 1e3), max_size=6)


@given(first=VALUES, other=VALUES)
def test_paired_differences_are_those_of_the_common_seeds(
    first: dict[str, float], other: dict[str, float]
) -> None:
    common = [seed for seed in first if seed in other]
    found = paired(first, other, lambda mine, theirs: theirs - mine).spread
    if not common:
        assert found is None
        return
    apart = np.array([other[seed] - first[seed] for seed in common])
    assert found is not None and found.mean == pytest.approx(apart.mean(), abs=1e-9)
    if len(common) > 1:
        assert found.deviation == pytest.approx(apart.std(ddof=1), abs=1e-9)
    else:
        assert found.deviation is None


def test_values_by_seed_are_means_of_seeds_that_all_have_one(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    seeds, accuracies = (1, 1, 2, 3), ((0.5,), (0.7,), (0.9,), (None,))
    found = [
        Run(make_run(tmp_path, {"seed": seed}, accuracies=each))
        for seed, each in zip(seeds, accuracies, strict=True)
    ]
    assert by_seed(found, lambda run: run.accuracy) == {"1": pytest.approx(0.6), "2": 0.9}
    assert paired({"1": 1.0}, {"2": 1.0}, lambda a, b: a).spread is None and Spread.of([]) is None
