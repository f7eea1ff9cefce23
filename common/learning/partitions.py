"""How the training samples are split over the devices. numpy only.

A device's place in `topology.device_names()` is its part; all draws come from (seed, PARTITION).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from common.data import Data
from common.errors import InvalidExperiment
from common.randomness import Purpose, generator
from common.spec import Topology

Indices: TypeAlias = npt.NDArray[np.int64]

ATTEMPTS = 10_000


def split(labels: Indices, *, data: Data, topology: Topology, seed: int) -> list[Indices]:
    """Return the sample indices of each device, ascending int64, in the order of the topology's devices.

    `labels` is int64 [N]. Every part holds at least one sample, and under the Dirichlet splits at least
    `data.min_samples`. Raises InvalidExperiment where the samples cannot be split so.
    """
    devices = len(topology.device_names())
    draw = generator(seed, Purpose.PARTITION)
    if data.partition == "dirichlet_overlap":
        parts = [_overlapping(labels, data=data, seed=seed, place=place) for place in range(devices)]
    elif data.partition == "dirichlet":
        parts = _dirichlet(labels, draw, data=data, least=np.full(devices, max(1, data.min_samples)))
    elif data.partition == "institution_dirichlet":
        parts = _by_institution(labels, draw, data=data, topology=topology)
    else:
        parts = _equal(np.arange(len(labels)), draw, devices)
    return [np.sort(part) for part in parts]


def digest(parts: Sequence[Indices]) -> str:
    """Return 16 hexadecimal digits over the parts, in order."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(np.ascontiguousarray(part, "<i8").tobytes())
    return total.hexdigest()


def _equal(samples: Indices, draw: np.random.Generator, parts: int) -> list[Indices]:
    """Shuffle once and cut into parts whose sizes differ by at most 1."""
    if parts > len(samples):
        raise InvalidExperiment(
            "topology.devices",
            parts,
            f"there are only {len(samples)} samples to share out",
            "Have fewer devices, or another data.dataset.",
        )
    return np.array_split(draw.permutation(samples), parts)


def _dirichlet(labels: Indices, draw: np.random.Generator, *, data: Data, least: Indices) -> list[Indices]:
    """Split disjointly by class, each part holding at least `least` [parts] samples.

    The split of FedCross and FedMR (their public code): per class, shares q ~ Dir(concentration), where a
    part that already holds its equal share of all samples gets none. Counts are drawn until they suffice,
    indices once.
    """
    sizes = np.bincount(labels)
    counts = _dirichlet_counts(sizes, draw, data=data, least=least)
    parts: list[list[Indices]] = [[] for _ in least]
    for label, counts_of_class in enumerate(counts):
        shuffled = draw.permutation(np.flatnonzero(labels == label))
        for part, piece in zip(parts, np.split(shuffled, np.cumsum(counts_of_class)[:-1]), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _dirichlet_counts(sizes: Indices, draw: np.random.Generator, *, data: Data, least: Indices) -> Indices:
    """Return how many samples of each class each part gets, int64 [classes, parts]."""
    parts, total = len(least), int(sizes.sum())
    if int(least.sum()) <= total:
        alpha = np.full(parts, data.concentration)
        for _ in range(ATTEMPTS):
            counts = np.zeros((len(sizes), parts), np.int64)
            held = np.zeros(parts, np.int64)
            for label, size in enumerate(sizes):
                shares = draw.dirichlet(alpha) * (held * parts < total)
                mass = shares.sum()
                if not mass > 0:  # a tiny concentration put all on parts that are full
                    break
                ends = (np.cumsum(shares / mass) * size).astype(np.int64)
                ends[-1] = size
                counts[label] = np.diff(ends, prepend=0)
                held += counts[label]
            else:
                if (held >= least).all():
                    return counts
    tried = f"none of {ATTEMPTS} draws gave" if int(least.sum()) <= total else f"{total} samples cannot give"
    raise InvalidExperiment(
        "data.min_samples",
        data.min_samples,
        f"{tried} each of {parts} parts its least number of samples at concentration {data.concentration}",
        "Lower data.min_samples, raise data.concentration, or have fewer devices.",
    )


def _by_institution(labels: Indices, draw: np.random.Generator, *, data: Data, topology: Topology) -> list[Indices]:
    """Split over the institutions by Dirichlet, then equally over each one's devices."""
    children = topology.children()
    least = np.array([len(devices) * max(1, data.min_samples) for devices in children.values()])
    parts: dict[str, Indices] = {}
    for devices, samples in zip(children.values(), _dirichlet(labels, draw, data=data, least=least), strict=True):
        parts.update(zip(devices, _equal(samples, draw, len(devices)), strict=True))
    return [parts[device] for device in topology.device_names()]


def _overlapping(labels: Indices, *, data: Data, seed: int, place: int) -> Indices:
    """Draw one device's samples from the whole set without replacement, weighted by its own class shares.

    Tempo's sampling. The `partition_size` largest of log(weight) + Gumbel noise are a draw without
    replacement (Yellott 1977; Efraimidis and Spirakis 2006), in one pass however skewed the weights are.
    """
    draw = generator(seed, Purpose.PARTITION, round_=place + 1)
    shares = draw.dirichlet(np.full(int(labels.max()) + 1, data.concentration))
    with np.errstate(divide="ignore"):
        keys = np.log(shares)[labels] + draw.gumbel(size=len(labels))
    possible = int(np.isfinite(keys).sum())
    if possible < data.partition_size:
        raise InvalidExperiment(
            "data.partition_size",
            data.partition_size,
            f"device {place} of the topology can draw from {possible} samples only (concentration "
            f"{data.concentration}, {len(labels)} samples in all)",
            "Lower data.partition_size or raise data.concentration.",
        )
    return np.argpartition(keys, len(keys) - data.partition_size)[len(keys) - data.partition_size :]
