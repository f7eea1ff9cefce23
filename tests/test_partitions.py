"""Partitions: who gets which samples. Properties over drawn data sets, sizes and seeds."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import reading, schema
from fedstrata.common.learning import splits
from fedstrata.common.settings.topology import CLOUD, Tree

Indices = npt.NDArray[np.int64]


def labels_of(samples: int, classes: int = 10) -> Indices:
    return np.random.default_rng(0).integers(0, classes, samples)


def tree_of(devices: int, institutions: int) -> Tree:
    return reading.parse({"topology": {"devices": devices, "institutions": institutions}}).tree


def split(
    labels: Indices,
    partition: str,
    *,
    devices: int = 4,
    institutions: int = 1,
    seed: int = 1,
    **data: Any,
) -> list[Indices]:
    tree = tree_of(devices, institutions)
    return splits.partition(
        labels, data=schema.Data(partition=partition, **data), tree=tree, seed=seed
    )


def check_disjoint_cover(parts: list[Indices], samples: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples))
    for part in parts:
        assert part.dtype == np.int64 and (np.diff(part) > 0).all()


@given(samples=st.integers(20, 400), devices=st.integers(1, 20), seed=st.integers(0, 2**63 - 1))
def test_iid_covers_in_equal_parts(samples: int, devices: int, seed: int) -> None:
    parts = split(labels_of(samples), "iid", devices=devices, seed=seed)
    check_disjoint_cover(parts, samples)
    sizes = [len(part) for part in parts]
    assert len(sizes) == devices and max(sizes) - min(sizes) <= 1


@given(
    samples=st.integers(200, 600),
    devices=st.integers(1, 8),
    seed=st.integers(0, 1000),
    concentration=st.sampled_from([0.1, 0.5, 1.0, 100.0]),
    least=st.integers(0, 10),
)
def test_dirichlet_covers_with_the_least_samples(
    samples: int, devices: int, seed: int, concentration: float, least: int
) -> None:
    labels = labels_of(samples)
    parts = split(
        labels,
        "dirichlet",
        devices=devices,
        seed=seed,
        concentration=concentration,
        min_samples=least,
    )
    check_disjoint_cover(parts, samples)
    assert len(parts) == devices and min(len(part) for part in parts) >= max(1, least)


@given(
    devices=st.integers(1, 6),
    seed=st.integers(0, 1000),
    concentration=st.sampled_from([0.1, 1.0, 100.0]),
    size=st.integers(1, 60),
)
def test_overlap_draws_the_exact_size_without_doubles(
    devices: int, seed: int, concentration: float, size: int
) -> None:
    given_ = {"concentration": concentration, "partition_size": size}
    parts = split(labels_of(300), "dirichlet_overlap", devices=devices, seed=seed, **given_)
    assert len(parts) == devices
    for part in parts:
        assert len(np.unique(part)) == len(part) == size
        assert part.min() >= 0 and part.max() < 300


@given(
    devices=st.integers(3, 12),
    institutions=st.integers(1, 3),
    seed=st.integers(0, 1000),
    least=st.integers(0, 10),
)
def test_institutions_cover_and_share_equally(
    devices: int, institutions: int, seed: int, least: int
) -> None:
    tree = tree_of(devices, institutions)
    data = schema.Data(partition="institution_dirichlet", min_samples=least)
    parts = splits.partition(labels_of(500), data=data, tree=tree, seed=seed)
    check_disjoint_cover(parts, 500)
    assert min(len(part) for part in parts) >= max(1, least)
    sizes = dict(zip(tree.devices, map(len, parts), strict=True))
    for institution in tree.aggregators:
        own = [sizes[member] for member in tree.children[institution]]
        assert max(own) - min(own) <= 1


@given(
    samples=st.integers(40, 400),
    devices=st.integers(1, 10),
    each=st.integers(1, 4),
    seed=st.integers(0, 1000),
    classes=st.integers(1, 12),
)
def test_shards_cover_and_are_runs_of_the_sorted_labels(
    samples: int, devices: int, each: int, seed: int, classes: int
) -> None:
    labels = labels_of(samples, classes)
    parts = split(labels, "shards", devices=devices, seed=seed, shards=each)
    check_disjoint_cover(parts, samples)
    # A plain twin: the sorted samples in equal pieces; every device holds `each` of them, whole.
    ordered = sorted(range(samples), key=lambda i: (labels[i], i))
    pieces = [piece.tolist() for piece in np.array_split(np.array(ordered), devices * each)]
    owner = {int(sample): device for device, part in enumerate(parts) for sample in part}
    dealt = [{owner[sample] for sample in piece} for piece in pieces]
    assert all(len(owners) == 1 for owners in dealt)
    assert sorted(owners.pop() for owners in dealt) == sorted(list(range(devices)) * each)


def by_user(owners: list[int], *, devices: int, seed: int = 1) -> list[Indices]:
    data = reading.parse({"data": {"dataset": "femnist", "partition": "natural"}}).data
    tree, labels = tree_of(devices, 1), labels_of(len(owners))
    return splits.partition(labels, data=data, tree=tree, seed=seed, owners=np.array(owners))


@given(owners=st.lists(st.integers(0, 5), min_size=6, max_size=60), seed=st.integers(0, 9))
def test_natural_gives_each_device_its_user(owners: list[int], seed: int) -> None:
    whose = [*range(6), *owners]
    parts = by_user(whose, devices=4, seed=seed)
    assert [part.tolist() for part in parts] == [
        [i for i, user in enumerate(whose) if user == d] for d in range(4)
    ]


def test_natural_has_as_many_devices_as_users_at_most() -> None:
    with pytest.raises(InvalidExperiment, match=r"topology\.devices = 3.*2 users.*at most 2"):
        by_user([0, 1, 1, 0], devices=3)


@given(
    first=st.sampled_from(["institution_dirichlet", "institution_shards"]),
    within=st.sampled_from(["iid", "dirichlet", "shards"]),
    devices=st.integers(3, 9),
    institutions=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_institutions_are_split_first_and_their_devices_within(
    first: str, within: str, devices: int, institutions: int, seed: int
) -> None:
    labels = labels_of(900)
    given_ = {"min_samples": 3, "concentration": 0.5, "shards": 2, "within_concentration": 0.5}
    parts = split(
        labels,
        first,
        devices=devices,
        institutions=institutions,
        seed=seed,
        within=within,
        **given_,
    )
    check_disjoint_cover(parts, 900)
    assert min(map(len, parts)) >= 3
    # What the devices of an institution hold together does not depend on how it is split among
    # them.
    whole = split(labels, first, devices=devices, institutions=institutions, seed=seed, **given_)
    tree = tree_of(devices, institutions)
    places = {name: place for place, name in enumerate(tree.devices)}
    first_ones = tree.children[tree.aggregators[0]]
    held, wanted = (
        np.sort(np.concatenate([some[places[d]] for d in first_ones])) for some in (parts, whole)
    )
    assert np.array_equal(held, wanted)


def test_institution_shards_leave_an_institution_few_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = split(labels, "institution_shards", devices=10, institutions=5, shards=2)
    for m in range(5):
        together = np.concatenate(parts[2 * m : 2 * m + 2])
        assert np.unique(labels[together]).tolist() == np.unique(labels[parts[2 * m]]).tolist()
        assert len(np.unique(labels[together])) == 2


def test_within_concentration_is_the_devices_own() -> None:
    labels = labels_of(20_000)

    def largest(concentration: float) -> float:
        keys: dict[str, Any] = {
            "within": "dirichlet",
            "concentration": 100.0,
            "within_concentration": concentration,
        }
        return largest_share(
            labels, split(labels, "institution_dirichlet", devices=8, institutions=2, **keys)
        )

    assert largest(0.1) > 0.3 and largest(1000.0) < 0.2


def test_two_hundred_devices_at_a_tenth_need_many_draws_and_get_them() -> None:
    labels = np.repeat(np.arange(10), 5000)  # as CIFAR-10
    parts = split(labels, "dirichlet", devices=200, concentration=0.1, min_samples=10)
    check_disjoint_cover(parts, 50_000)
    assert min(map(len, parts)) >= 10 and splits.ATTEMPTS >= 10_000


KNOWN = {
    "iid": "743d01d011cb09c3",
    "dirichlet": "29634e4bfa22d5bc",
    "dirichlet_overlap": "7f7554e75f9a88b7",
    "shards": "0d3949694ddc64d5",
    "institution_dirichlet": "83ad72c7f6cb51f9",
    "institution_shards": "fc9b34f3b84eb2c8",
}


@pytest.mark.parametrize("partition", KNOWN)
def test_a_release_splits_as_the_one_before_by_the_seed_alone(partition: str) -> None:
    def digest(seed: int) -> str:
        given_ = {"partition_size": 50, "concentration": 0.5}
        parts = split(labels_of(2000), partition, devices=7, institutions=2, seed=seed, **given_)
        return splits.digest_of(parts, labels=labels_of(2000))

    assert digest(5) == KNOWN[partition] != digest(6)


def test_the_processes_of_a_host_share_a_split_of_many_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    draw, drawn = splits._overlapping, list[int]()

    def counted(*given: Any, place: int, **more: Any) -> Indices:
        drawn.append(place)
        return draw(*given, place=place, **more)

    monkeypatch.setattr(splits, "_overlapping", counted)
    facts: dict[str, Any] = {"partition_size": 50, "concentration": 0.5, "devices": 7, "seed": 5}
    changes: list[dict[str, Any]] = [
        {"seed": 6},
        {"devices": 6},
        {"concentration": 0.4},
        {"partition_size": 49},
    ]
    for bound, times in ((splits.SHARED_DRAWS, 2), (0, 1)):
        monkeypatch.setattr(splits, "SHARED_DRAWS", bound)
        drawn.clear()
        found = [split(labels_of(2000), "dirichlet_overlap", **facts) for _ in range(2)]
        assert drawn == list(range(7)) * times
        for parts in found:
            assert splits.digest_of(parts, labels=labels_of(2000)) == KNOWN["dirichlet_overlap"]
    for change in changes:
        drawn.clear()
        split(labels_of(2000), "dirichlet_overlap", **facts | change)
        assert len(drawn) == (facts | change)["devices"]
    drawn.clear()
    split(1 - labels_of(2000, classes=2), "dirichlet_overlap", **facts)
    split(labels_of(2000, classes=2), "dirichlet_overlap", **facts)
    assert len(drawn) == 14
    with pytest.raises(InvalidExperiment, match=r"data\.partition_size"):
        split(labels_of(40), "dirichlet_overlap", **facts)


def class_shares(labels: Indices, part: Indices) -> npt.NDArray[np.float64]:
    return np.bincount(labels[part], minlength=10) / len(part)


def largest_share(labels: Indices, parts: list[Indices]) -> float:
    """Return the mean over the parts of the share of the class that has most."""
    return float(np.mean([class_shares(labels, part).max() for part in parts]))


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet_overlap"])
def test_low_concentration_skews_the_devices(partition: str) -> None:
    labels = labels_of(10_000)

    def largest(concentration: float) -> float:
        parts = split(
            labels, partition, devices=10, concentration=concentration, partition_size=200
        )
        return largest_share(labels, parts)

    assert largest(0.1) > 0.4 and largest(1000.0) < 0.2


def test_institutions_differ_and_their_devices_do_not() -> None:
    labels = labels_of(20_000)
    parts = split(labels, "institution_dirichlet", devices=8, institutions=4, concentration=0.3)
    shares = np.array([class_shares(labels, part) for part in parts]).reshape(4, 2, 10)
    assert np.abs(shares[:, 0] - shares[:, 1]).max() < 0.08
    assert np.abs(shares[:, None, 0] - shares[None, :, 0]).max() > 0.3


def test_institution_membership_is_followed() -> None:
    members = {"x": ["a", "c"], "y": ["b"]}
    topology = {"institutions": ["x", "y"], "devices": ["a", "b", "c"], "members": members}
    tree = reading.parse({"topology": topology}).tree
    data = schema.Data(partition="institution_dirichlet", concentration=0.1, min_samples=1)
    labels = labels_of(3000)
    a, c, b = splits.partition(labels, data=data, tree=tree, seed=3)
    assert np.abs(class_shares(labels, a) - class_shares(labels, c)).max() < 0.08
    assert np.abs(class_shares(labels, a) - class_shares(labels, b)).max() > 0.08
    assert abs(len(a) - len(c)) <= 1


def test_overlapping_partitions_hold_their_own_samples_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels, devices, size = labels_of(20_000), 100, 50
    # as the process that computes them
    monkeypatch.setattr(splits, "SHARED_DRAWS", 1 + devices * len(labels))
    # what is imported is no part of it
    split(labels[:500], "dirichlet_overlap", devices=1, partition_size=1)
    tracemalloc.start()
    try:
        parts = split(labels, "dirichlet_overlap", devices=devices, partition_size=size)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(part.nbytes for part in parts) == devices * size * 8
    assert held < 4 * devices * size * 8  # all indices of all devices take 16 MB
    assert most < 2_000_000


def test_overlap_weighs_each_class_as_sequential_draws_would() -> None:
    labels = np.repeat(np.arange(2), [20, 2000])
    parts = split(labels, "dirichlet_overlap", devices=300, concentration=1000.0, partition_size=10)
    # Near equal weights per sample: each sample is as likely as another, so 10 * 20 / 2020 of the
    # first class.
    assert abs(np.mean([np.sum(labels[part] == 0) for part in parts]) - 10 * 20 / 2020) < 0.06


def test_a_device_may_be_renamed() -> None:
    labels = labels_of(500)
    data = schema.Data(partition="dirichlet_overlap", partition_size=20)
    numbered = splits.partition(
        labels, data=data, tree=Tree([{CLOUD: ["device-0", "device-1"]}]), seed=1
    )
    named = splits.partition(labels, data=data, tree=Tree([{CLOUD: ["left", "right"]}]), seed=1)
    assert splits.digest_of(numbered, labels=labels) == splits.digest_of(named, labels=labels)


@pytest.mark.parametrize(
    ("partition", "keys", "problem"),
    [
        ("iid", {"devices": 101}, r"topology\.devices = 101.*100 samples"),
        ("shards", {"shards": 26}, r"data\.shards = 26.*100 samples.*Lower data\.shards"),
        ("dirichlet_overlap", {"partition_size": 101}, r"data\.partition_size = 101.*100 samples"),
        (
            "dirichlet",
            {"min_samples": 30},
            r"data\.min_samples = 30: 100 samples cannot give.*Lower data\.min_samples",
        ),
        (
            "dirichlet",
            {"min_samples": 25},
            r"data\.min_samples = 25: none of 20 draws.*Lower data\.min_samples",
        ),
    ],
)
def test_an_impossible_split_names_what_to_change(
    partition: str, keys: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "ATTEMPTS", 20)
    with pytest.raises(InvalidExperiment, match=problem):
        split(labels_of(100), partition, **keys)


def test_digest_sees_order_and_borders() -> None:
    a, b, labels = np.array([1, 2]), np.array([3]), np.array([0, 1, 0, 1])
    lists = ([a, b], [b, a], [np.array([1, 2, 3])], [a, b, a[:0]])
    digests = {splits.digest_of(parts, labels=labels) for parts in lists}
    # Other files may give the same places, and their labels tell.
    digests |= {
        splits.digest_of([a, b], labels=other) for other in (1 - labels, labels[:3], labels[:0])
    }
    assert len(digests) == 7
