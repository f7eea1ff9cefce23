"""Partitions: who gets which samples. Properties over drawn data sets, sizes and seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import spec
from common.errors import InvalidExperiment
from common.learning import partitions

Indices = npt.NDArray[np.int64]


def labels_of(samples: int, classes: int = 10) -> Indices:
    return np.random.default_rng(0).integers(0, classes, samples)


def split(
    labels: Indices, partition: str, *, devices: int = 4, institutions: int = 1, seed: int = 1, **data: Any
) -> list[Indices]:
    topology = {"devices": devices, "institutions": institutions}
    experiment = spec.parse({"data": {"partition": partition, **data}, "topology": topology})
    return partitions.split(labels, data=experiment.data, topology=experiment.topology, seed=seed)


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
    parts = split(labels, "dirichlet", devices=devices, seed=seed, concentration=concentration, min_samples=least)
    check_disjoint_cover(parts, samples)
    assert len(parts) == devices and min(len(part) for part in parts) >= max(1, least)


@given(
    devices=st.integers(1, 6),
    seed=st.integers(0, 1000),
    concentration=st.sampled_from([0.1, 1.0, 100.0]),
    size=st.integers(1, 60),
)
def test_overlap_draws_the_exact_size_without_doubles(devices: int, seed: int, concentration: float, size: int) -> None:
    parts = split(
        labels_of(300),
        "dirichlet_overlap",
        devices=devices,
        seed=seed,
        concentration=concentration,
        partition_size=size,
    )
    assert len(parts) == devices
    for part in parts:
        assert len(np.unique(part)) == len(part) == size
        assert part.min() >= 0 and part.max() < 300


@given(devices=st.integers(3, 12), institutions=st.integers(1, 3), seed=st.integers(0, 1000), least=st.integers(0, 10))
def test_institutions_cover_and_share_equally(devices: int, institutions: int, seed: int, least: int) -> None:
    parts = split(
        labels_of(500),
        "institution_dirichlet",
        devices=devices,
        institutions=institutions,
        seed=seed,
        min_samples=least,
    )
    check_disjoint_cover(parts, 500)
    assert min(len(part) for part in parts) >= max(1, least)
    names = spec.Topology(devices=devices, institutions=institutions)
    sizes = dict(zip(names.device_names(), map(len, parts), strict=True))
    for members in names.children().values():
        own = [sizes[member] for member in members]
        assert max(own) - min(own) <= 1


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "dirichlet_overlap", "institution_dirichlet"])
def test_only_the_seed_decides(partition: str) -> None:
    def digest(seed: int) -> str:
        return partitions.digest(split(labels_of(2000), partition, institutions=2, seed=seed, partition_size=50))

    assert digest(1) == digest(1) != digest(2)


def class_shares(labels: Indices, part: Indices) -> npt.NDArray[np.float64]:
    return np.bincount(labels[part], minlength=10) / len(part)


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet_overlap"])
def test_low_concentration_skews_the_devices(partition: str) -> None:
    labels = labels_of(10_000)

    def largest(concentration: float) -> float:
        parts = split(labels, partition, devices=10, concentration=concentration, partition_size=200)
        return float(np.mean([class_shares(labels, part).max() for part in parts]))

    assert largest(0.1) > 0.4
    assert largest(1000.0) < 0.2


def test_institutions_differ_and_their_devices_do_not() -> None:
    labels = labels_of(20_000)
    parts = split(labels, "institution_dirichlet", devices=8, institutions=4, concentration=0.3)
    shares = np.array([class_shares(labels, part) for part in parts]).reshape(4, 2, 10)
    assert np.abs(shares[:, 0] - shares[:, 1]).max() < 0.08
    assert np.abs(shares[:, None, 0] - shares[None, :, 0]).max() > 0.3


def test_institution_membership_is_followed() -> None:
    tree = {
        "data": {"partition": "institution_dirichlet", "concentration": 0.1, "min_samples": 1},
        "topology": {
            "institutions": ["x", "y"],
            "devices": ["a", "b", "c"],
            "members": {"x": ["a", "c"], "y": ["b"]},
        },
    }
    experiment = spec.parse(tree)
    labels = labels_of(3000)
    a, b, c = partitions.split(labels, data=experiment.data, topology=experiment.topology, seed=3)
    assert np.abs(class_shares(labels, a) - class_shares(labels, c)).max() < 0.08
    assert np.abs(class_shares(labels, a) - class_shares(labels, b)).max() > 0.08
    assert abs(len(a) - len(c)) <= 1


def test_overlap_weighs_each_class_as_sequential_draws_would() -> None:
    labels = np.repeat(np.arange(2), [20, 2000])
    drawn = np.array(
        [
            np.bincount(labels[part], minlength=2)
            for part in split(labels, "dirichlet_overlap", devices=300, concentration=1000.0, partition_size=10)
        ]
    )
    # Near equal weights per sample: each sample is as likely as another, so 10 * 20 / 2020 of the first class.
    assert abs(drawn[:, 0].mean() - 10 * 20 / 2020) < 0.06


def test_a_device_may_be_renamed() -> None:
    labels = labels_of(500)
    data = spec.Data(partition="dirichlet_overlap", partition_size=20)
    numbered = partitions.split(labels, data=data, topology=spec.Topology(devices=2), seed=1)
    named = partitions.split(labels, data=data, topology=spec.Topology(devices=["left", "right"]), seed=1)
    assert partitions.digest(numbered) == partitions.digest(named)


def test_too_many_devices() -> None:
    with pytest.raises(InvalidExperiment, match=r"topology\.devices = 11.*10 samples"):
        split(labels_of(10), "iid", devices=11)


@pytest.mark.parametrize(("least", "problem"), [(30, "100 samples cannot give"), (25, "none of 10000 draws")])
def test_impossible_min_samples_says_what_to_change(monkeypatch: pytest.MonkeyPatch, least: int, problem: str) -> None:
    if least == 25:
        monkeypatch.setattr(partitions, "ATTEMPTS", 20)
        problem = "none of 20 draws"
    with pytest.raises(InvalidExperiment, match=rf"data\.min_samples = {least}.*{problem}.*Lower data\.min_samples"):
        split(labels_of(100), "dirichlet", devices=4, min_samples=least, concentration=0.1)


def test_partition_larger_than_the_data() -> None:
    with pytest.raises(InvalidExperiment, match=r"data\.partition_size = 101.*100 samples"):
        split(labels_of(100), "dirichlet_overlap", partition_size=101, concentration=100.0)


def test_digest_sees_order_and_borders() -> None:
    a, b = np.array([1, 2]), np.array([3])
    digests = {partitions.digest(parts) for parts in ([a, b], [b, a], [np.array([1, 2, 3])], [a, b, a[:0]])}
    assert len(digests) == 4
