"""The split of a run's data: computed by every node from its files, compared by digest, saved in
the run's folder.

A device's position in `tree.devices` is the number of its partition. All random numbers come from
(seed, PARTITION).
"""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fedstrata.common import randomness
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import reading, schema
from fedstrata.common.host.files import replacing, writing
from fedstrata.common.learning import datasets, stored
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.data import Data
from fedstrata.common.settings.evaluation import EvaluationSettings
from fedstrata.common.settings.topology import CLOUD, Tree, number_of
from fedstrata.common.text import json_text

Indices: TypeAlias = npt.NDArray[np.int64]

ATTEMPTS: Final = 10_000  # of a Dirichlet partition
# random numbers of a split from which on the processes of a host share it: 30 ms
SHARED_DRAWS: Final = 1_000_000
ARRAYS: Final = "partition.npz"
FACTS: Final = "partition.json"
HELD_OUT: Final = "held out"  # no device can have a name with a space


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The devices' `partitions` of the training samples, in order; `labels` int64 [N] are below
    `classes`.

    Of numbers the labels are their bins, all 0 without `data.bins`. `held_out`: the samples of the
    aggregating nodes, which no device has. `digest` identifies partitions, held-out samples and
    labels: other files, or the random numbers of another release, change it.
    """

    labels: Indices
    classes: int
    partitions: list[Indices]
    held_out: Indices
    digest: str
    kind: str = "class"  # what a label is: a class, or a bin of numbers


def split_of(experiment: schema.Experiment, *, node: str = CLOUD) -> Split:
    """Return the split of the node's files; nodes of this process with the same files share one
    object.

    Raises InvalidExperiment, also if every device has its own images and nothing is split.
    """
    if experiment.data.private:
        problem = "every device has samples of its own, nothing is split"
        raise InvalidExperiment(
            "data.partition", experiment.data.partition, problem, "Use another data.partition."
        )
    home = node if "{node}" in experiment.data.root else CLOUD  # the owner of the files
    with _SPLITTING:  # one device of a process computes the split, the others find it in the cache
        return _split(experiment.to_json(), home)


def keep(experiment: schema.Experiment, folder: Path) -> str:
    """Write the cloud's split into the run's folder and return its digest; for private data write
    nothing, return "".

    Raises InvalidExperiment, also if the run was started with another split.
    """
    if experiment.data.private:
        return ""
    split = split_of(experiment)
    facts = folder / FACTS
    if not facts.exists():
        write(experiment, split, folder)
        return split.digest
    try:
        begun = json.loads(facts.read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidExperiment(
            "--resume", str(facts), f"it is damaged: {error!r:.200}", "Remove it."
        ) from None
    if begun != split.digest:
        problem = (
            f"it was started with other data or another split, digest {begun}; now it is "
            f"{split.digest}"
        )
        raise InvalidExperiment(
            "--resume", str(folder), problem, "Restore the files of the data set."
        )
    return split.digest


def write(experiment: schema.Experiment, split: Split, folder: Path) -> dict[str, Any]:
    """Write each device's indices, int64, and facts about them into two files; return the facts.

    Held-out samples have the name `HELD_OUT`. Raises StorageFailed.
    """
    tree = experiment.tree
    facts: dict[str, Any] = {
        "digest": split.digest,
        "seed": experiment.seed,
        "data": experiment.data.model_dump(mode="json"),
        "devices": {
            name: {"parent": tree.parent(name), **_described(split, part)}
            for name, part in zip(tree.devices, split.partitions, strict=True)
        },
    }
    arrays = dict(zip(tree.devices, split.partitions, strict=True))
    kinds = [tier.children for tier in experiment.tiers]
    facts["label_distance"] = dict(zip(kinds, label_distances(split, tree), strict=True))
    if len(split.held_out):
        facts["held_out"] = _described(split, split.held_out)
        arrays[HELD_OUT] = split.held_out
    with writing(folder):
        # savez rejects the name `file`
        with zipfile.ZipFile(folder / ARRAYS, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, part in arrays.items():
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, part)
        with replacing(folder / FACTS) as file:  # last, and whole: this process may be killed
            file.write(json_text(facts, indent=1).encode() + b"\n")
    return facts


_SPLITTING = threading.Lock()


@lru_cache(maxsize=4)
def _split(experiment_json: str, node: str) -> Split:
    experiment = reading.parse(experiment_json)
    dataset = datasets.load(experiment.data, node=node)
    data = experiment.data
    tree = experiment.tree
    seed = experiment.seed
    labels = dataset.train_labels.numpy()
    classes = dataset.classes
    identity = labels
    kind = "class"
    if dataset.inputs.numbers:
        kind = "bin"
        classes = data.bins or 1
        identity = labels.view(np.int32).astype(np.int64).ravel()
        labels = quantiles(labels, bins=classes) if data.bins else np.zeros(len(labels), np.int64)
    if not data.node_samples:
        parts = partition(labels, data=data, tree=tree, seed=seed, owners=dataset.owners)
        digest = digest_of(parts, labels=identity)
        return Split(labels, classes, parts, np.empty(0, np.int64), digest, kind)
    held_out = hold_out(len(labels), data=data, seed=seed)
    rest = np.delete(np.arange(len(labels)), held_out)
    owners = None if dataset.owners is None else dataset.owners[rest]
    parts = [
        rest[part]
        for part in partition(labels[rest], data=data, tree=tree, seed=seed, owners=owners)
    ]
    if not all(map(len, parts)):
        problem = (
            "no sample remains for "
            f"{tree.devices[min(i for i, part in enumerate(parts) if not len(part))]}"
        )
        raise InvalidExperiment(
            "data.node_samples", data.node_samples, problem, "Hold out fewer samples."
        )
    digest = digest_of([*parts, held_out], labels=identity)
    return Split(labels, classes, parts, held_out, digest, kind)


def samples_of(experiment: schema.Experiment, split: Split, *, node: str) -> Indices:
    """Return a device's samples, ascending int64: those of its place among the devices, or of the
    number in its name.

    Of a device that the experiment does not name, the number stands for a user, or for another draw
    of an overlapping partition. Raises InvalidExperiment if it has no share.
    """
    devices = experiment.tree.devices
    data = experiment.data
    if node in devices:
        return split.partitions[devices.index(node)]
    dataset = datasets.load(data, node=node)
    place = -1 if (number := number_of(node)) is None else number
    problem = (
        f"data.partition = {data.partition!r} divides the samples among the devices of the "
        "experiment"
    )
    remedy = "Use 'private', 'natural' or 'dirichlet_overlap'."
    rest = np.setdiff1d(np.arange(len(split.labels)), split.held_out)
    new = place >= len(devices)
    if data.partition == "dirichlet_overlap" and new:
        return np.sort(
            rest[_overlapping(split.labels[rest], data=data, seed=experiment.seed, place=place)]
        )
    if data.partition == "natural" and dataset.owners is not None and new:
        found: Indices = rest[dataset.owners[rest] == place]
        if len(found):
            return found
        problem = f"the data set has no user {place}"
    elif data.partition in ("dirichlet_overlap", "natural"):
        problem = f"a new device needs a number from {len(devices)} on at the end of its name"
        remedy = f"Call it device-{len(devices)}, for instance."
    raise InvalidExperiment("--name", node, problem, remedy)


def own_user(experiment: schema.Experiment, *, node: str) -> tuple[datasets.Dataset, str] | None:
    """Return the samples of a device that is one user, read without those of the others, and the
    split's digest.

    None if it needs others' samples too, or is no user: `split_of` and `samples_of` have all.
    Raises InvalidExperiment.
    """
    devices = experiment.tree.devices
    evaluation = experiment.evaluation
    if evaluation.on_devices and evaluation.data == "test":
        return None
    if node in devices:
        user = devices.index(node)
    else:
        number = number_of(node)
        if number is None or number < len(devices):
            return None
        user = number
    return datasets.load_user(experiment.data, user, devices=len(devices), node=node)


def label_distances(split: Split, tree: Tree) -> list[float]:
    """Return how far the labels of the nodes of each layer below the cloud are from those of all
    devices together.

    sum over classes |p_k - p| (Zhao et al. 2018), from 0 to 2; the mean over the layer's nodes by
    their samples. A node above devices has the samples of all devices below it.
    """
    counts = {
        name: np.bincount(split.labels[part], minlength=split.classes).astype(np.float64)
        for name, part in zip(tree.devices, split.partitions, strict=True)
    }
    for name in reversed(tree.aggregators):
        counts[name] = np.sum([counts[child] for child in tree.children[name]], axis=0)
    found = []
    for layer in tree.layers[1:]:
        counts_NC = np.array([counts[name] for name in layer])
        samples_N = counts_NC.sum(axis=1)
        all_C = counts_NC.sum(axis=0)
        apart_N = np.abs(counts_NC / samples_N[:, None] - all_C / all_C.sum()).sum(axis=1)
        found.append(round(float(samples_N @ apart_N / samples_N.sum()), 6))
    return found


def _described(split: Split, part: Indices) -> dict[str, Any]:
    counts = np.bincount(split.labels[part], minlength=split.classes)
    return {"samples": len(part), f"by_{split.kind}": counts.tolist()}


def partition(
    labels: Indices, *, data: Data, tree: Tree, seed: int, owners: Indices | None = None
) -> list[Indices]:
    """Return the sample indices of each device, ascending int64, in the order of `tree.devices`.

    `labels` and `owners` are int64 [N]; with `natural` the i-th device gets the samples of owner i.
    Every partition has at least one sample, with the Dirichlet splits at least `data.min_samples`.
    Raises InvalidExperiment if such a split is impossible.
    """
    devices = len(tree.devices)
    parts: Iterable[Indices]
    draw = generator(seed, Purpose.PARTITION)
    if data.partition == "dirichlet_overlap":
        return list(_all_overlapping(labels, data=data, seed=seed, devices=devices))
    if data.partition == "natural":
        if owners is None:
            owners = np.empty(0, np.int64)
        parts = _natural(owners, devices)
    elif data.partition in ("dirichlet", "quantity"):
        least = np.full(devices, max(1, data.min_samples))
        split_by = labels if data.partition == "dirichlet" else np.zeros_like(labels)
        parts = _dirichlet(split_by, draw, data=data, concentration=data.concentration, least=least)
    elif data.partition == "shards":
        parts = _shards(labels, draw, parts=devices, each=data.shards)
    elif data.partition == "iid":
        parts = _equal(np.arange(len(labels)), draw, devices)
    else:
        parts = _by_institution(labels, draw, data=data, tree=tree)
    return [np.sort(part) for part in parts]


def quantiles(numbers: npt.NDArray[np.float32], *, bins: int) -> Indices:
    """Return each number's bin, int64 [N] below `bins`, of as many numbers each, within 1;
    `numbers` [N, 1].

    Equal numbers may be in different bins. Raises InvalidExperiment if there are several to
    predict.
    """
    if numbers.shape[1] != 1:
        problem = f"each sample has {numbers.shape[1]} numbers to predict"
        raise InvalidExperiment("data.bins", bins, problem, "Omit it, and use another partition.")
    found = np.empty(len(numbers), np.int64)
    found[np.argsort(numbers[:, 0], kind="stable")] = (
        np.arange(len(numbers)) * bins // max(1, len(numbers))
    )
    return found


def hold_out(count: int, *, data: Data, seed: int) -> Indices:
    """Return the indices of the samples that no device has, ascending int64 [`data.node_samples`],
    of `count` samples.

    Uniform without replacement, from (seed, HELD_OUT). Raises InvalidExperiment if none would
    remain.
    """
    if data.node_samples >= count:
        problem = f"the data set has {count} training samples"
        raise InvalidExperiment(
            "data.node_samples", data.node_samples, problem, "Leave some to the devices."
        )
    return np.sort(
        generator(seed, Purpose.HELD_OUT).choice(count, data.node_samples, replace=False)
    )


def taken_of(samples: Indices, *, evaluation: EvaluationSettings, seed: int, node: str) -> Indices:
    """Return which of a device's samples, ascending int64, it holds out to score models on: from
    (seed, TESTS).
    """
    count = evaluation.taken_of(len(samples))
    return np.sort(generator(seed, Purpose.TESTS, node).choice(samples, count, replace=False))


def tests_of(count: int, *, devices: int, place: int, seed: int) -> Indices:
    """Return the device's part of `count` test samples, ascending int64; sizes differ by at most 1,
    from (seed, TESTS).

    With more devices than samples some have none.
    """
    return np.sort(
        np.array_split(generator(seed, Purpose.TESTS).permutation(count), devices)[place]
    )


def users_of_tests(dataset: datasets.Dataset, name: str) -> Indices:
    """Return whose each test sample is, int64 [N]: the place of a device under `natural`, -1 for a
    user without one.

    `name`: of the data set. Raises InvalidExperiment.
    """
    owners = dataset.test_owners
    problem = f"the test samples of {name} have no users"
    if owners is not None and owners.max(initial=-1) >= 0:
        return owners
    if owners is not None:
        problem = f"no user of the training samples of {name} has test samples"
    raise InvalidExperiment("evaluation.data", "users", problem, "Use held_out.")


def counts_of_tests(
    dataset: datasets.Dataset, experiment: schema.Experiment, *, samples: Sequence[int]
) -> list[int]:
    """Return how many test samples each device has, in order; `samples`: of each, before it holds
    out some.
    """
    evaluation = experiment.evaluation
    devices = len(samples)
    count = len(dataset.test_labels)
    if not evaluation.on_devices:
        return [0] * devices
    if evaluation.data == "held_out":
        return list(map(evaluation.taken_of, samples))
    if evaluation.data == "test":
        return [count // devices + (place < count % devices) for place in range(devices)]
    owners = users_of_tests(dataset, experiment.data.dataset)
    counts: list[int] = np.bincount(owners[owners >= 0], minlength=devices)[:devices].tolist()
    return counts


def digest_of(parts: Sequence[Indices], *, labels: Indices) -> str:
    """Return 16 hexadecimal digits over the labels, int64 [N], or numbers' bits, and the
    partitions, in order.
    """
    total = hashlib.blake2b(digest_size=8)
    for places in (labels, *parts):
        total.update(len(places).to_bytes(8, "little"))
        total.update(np.ascontiguousarray(places, "<i8").tobytes())
    return total.hexdigest()


def _equal(samples: Indices, draw: np.random.Generator, parts: int) -> list[Indices]:
    """Shuffle once and cut into parts whose sizes differ by at most 1."""
    if parts > len(samples):
        problem = f"there are only {len(samples)} samples to distribute"
        raise InvalidExperiment(
            "topology.devices", parts, problem, "Use fewer devices, or another data.dataset."
        )
    return np.array_split(draw.permutation(samples), parts)


def _natural(owners: Indices, devices: int) -> list[Indices]:
    """Give each device one user's samples; users beyond the number of devices are not used."""
    users = int(owners.max(initial=-1)) + 1
    if devices > users:
        problem = f"the data set has {users} users, one for each device"
        remedy = f"Use at most {users} devices"
        raise InvalidExperiment(
            "topology.devices", devices, problem, f"{remedy}, or another data.partition."
        )
    return [np.flatnonzero(owners == user) for user in range(devices)]


def _shards(labels: Indices, draw: np.random.Generator, *, parts: int, each: int) -> list[Indices]:
    """Sort by label, cut into parts * each pieces of equal size within 1, and give `each` pieces to
    every part.

    FedCDA's split (section 5 of its paper), before that McMahan et al. (2017).
    """
    if parts * each > len(labels):
        problem = f"{parts} parts with {each} shards each need more than the {len(labels)} samples"
        remedy = "Lower data.shards or use fewer devices."
        raise InvalidExperiment("data.shards", each, problem, remedy)
    shards = np.array_split(np.argsort(labels, kind="stable"), parts * each)
    dealt = draw.permutation(parts * each).reshape(parts, each)
    return [np.concatenate(list(map(shards.__getitem__, mine))) for mine in dealt]


def _dirichlet(
    labels: Indices, draw: np.random.Generator, *, data: Data, concentration: float, least: Indices
) -> list[Indices]:
    """Split disjointly by class, each part having at least `least` [parts] samples.

    The split of FedCross and FedMR (their public code): per class, shares q ~ Dir(concentration),
    where a part that already has its equal share of all samples gets none. Counts are drawn until
    they suffice, indices once.
    """
    sizes = np.bincount(labels)
    counts = _dirichlet_counts(sizes, draw, data=data, concentration=concentration, least=least)
    parts: list[list[Indices]] = [[] for _ in least]
    for label, counts_of_class in enumerate(counts):
        shuffled = draw.permutation(np.flatnonzero(labels == label))
        for part, piece in zip(
            parts, np.split(shuffled, np.cumsum(counts_of_class)[:-1]), strict=True
        ):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _dirichlet_counts(
    sizes: Indices, draw: np.random.Generator, *, data: Data, concentration: float, least: Indices
) -> Indices:
    """Return the number of samples of each class in each part, int64 [classes, parts]."""
    parts = len(least)
    total = int(sizes.sum())
    if int(least.sum()) <= total:
        alpha = np.full(parts, concentration)
        for _ in range(ATTEMPTS):
            counts = np.zeros((len(sizes), parts), np.int64)
            held = np.zeros(parts, np.int64)
            for label, size in enumerate(sizes):
                shares = draw.dirichlet(alpha) * (held * parts < total)
                mass = shares.sum()
                if not mass > 0:  # with a tiny concentration all mass is on parts that are full
                    break
                ends = (np.cumsum(shares / mass) * size).astype(np.int64)
                ends[-1] = size
                counts[label] = np.diff(ends, prepend=0)
                held += counts[label]
            else:
                if (held >= least).all():
                    return counts
    if int(least.sum()) <= total:
        tried = f"none of {ATTEMPTS} draws gave"
    else:
        tried = f"{total} samples cannot give"
    problem = (
        f"{tried} each of {parts} parts its minimum number of samples at concentration "
        f"{concentration}"
    )
    remedy = "Lower data.min_samples, raise the concentration, or use fewer devices."
    raise InvalidExperiment("data.min_samples", data.min_samples, problem, remedy)


def _by_institution(
    labels: Indices, draw: np.random.Generator, *, data: Data, tree: Tree
) -> list[Indices]:
    """Split over the institutions by Dirichlet or shards, then within each over its devices
    following `data.within`.
    """
    homes = [tree.children[parent] for parent in tree.layers[-2]]
    least = np.array([len(devices) * max(1, data.min_samples) for devices in homes])
    if data.partition == "institution_shards":
        shares = _shards(labels, draw, parts=len(homes), each=data.shards)
    else:
        shares = _dirichlet(labels, draw, data=data, concentration=data.concentration, least=least)
    parts: dict[str, Indices] = {}
    for devices, samples in zip(homes, shares, strict=True):
        parts.update(
            zip(
                devices,
                _within(labels, samples, draw, data=data, devices=len(devices)),
                strict=True,
            )
        )
    return [parts[device] for device in tree.devices]


def _within(
    labels: Indices, samples: Indices, draw: np.random.Generator, *, data: Data, devices: int
) -> list[Indices]:
    if data.within == "iid":
        return _equal(samples, draw, devices)
    own = labels[samples]
    if data.within == "shards":
        places = _shards(own, draw, parts=devices, each=data.shards)
    else:
        least = np.full(devices, max(1, data.min_samples))
        places = _dirichlet(
            own, draw, data=data, concentration=data.within_concentration, least=least
        )
    return [samples[part] for part in places]


def _all_overlapping(labels: Indices, *, data: Data, seed: int, devices: int) -> Indices:
    """Return each device's partition, [devices, `partition_size`]; if they need many draws, once
    for all of a host.
    """

    def make() -> stored.Stored:
        # One at a time: each keeps the indices of all samples alive until it is copied.
        parts = (
            np.sort(_overlapping(labels, data=data, seed=seed, place=place))
            for place in range(devices)
        )
        return stored.Stored({"parts": torch.from_numpy(np.stack(list(parts)))}, {})

    if devices * len(labels) < SHARED_DRAWS:
        made = make()
    else:
        settings = [data.concentration, data.partition_size, seed, devices, np.__version__]
        what = [
            hashlib.blake2b(np.ascontiguousarray(labels).data, digest_size=16).hexdigest(),
            *settings,
        ]
        made = stored.shared(
            stored.digest_of(what, map(Path, (__file__, randomness.__file__))), make
        )
    parts_DS: Indices = made.tensors["parts"].numpy()
    return parts_DS


def _overlapping(labels: Indices, *, data: Data, seed: int, place: int) -> Indices:
    """Sample one device's partition from all samples without replacement, weighted by its own class
    shares.

    Tempo's sampling. The `partition_size` largest values of log(weight) + Gumbel noise are a sample
    without replacement (Yellott 1977; Efraimidis and Spirakis 2006), in one pass even for very
    skewed weights.
    """
    draw = generator(seed, Purpose.PARTITION, round_number=place + 1)
    shares = draw.dirichlet(np.full(int(labels.max()) + 1, data.concentration))
    with np.errstate(divide="ignore"):
        keys = np.log(shares)[labels] + draw.gumbel(size=len(labels))
    possible = int(np.isfinite(keys).sum())
    if possible < data.partition_size:
        problem = f"device {place} of the topology has only {possible} samples to choose from"
        problem += f" (concentration {data.concentration}, {len(labels)} samples in total)"
        remedy = "Lower data.partition_size or raise data.concentration."
        raise InvalidExperiment("data.partition_size", data.partition_size, problem, remedy)
    return np.argpartition(keys, len(keys) - data.partition_size)[len(keys) - data.partition_size :]
