"""The split of a run's data: computed by every node from its files, compared by digest, saved in the run's folder."""

from __future__ import annotations

import json
import threading
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.errors import InvalidExperiment
from common.experiment import reading, schema
from common.experiment.topology import CLOUD
from common.host.files import replacing, writing
from common.learning import datasets, partitions
from common.learning.partitions import Indices
from common.text import json_text

ARRAYS: Final = "partition.npz"
FACTS: Final = "partition.json"
HELD_OUT: Final = "held out"  # no device can have a name with a space


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The devices' `partitions` of the training samples, in order; `labels` int64 [N] are below `classes`.

    Of numbers the labels are their bins, all 0 without `data.bins`. `held_out`: the samples of the aggregating nodes,
    which no device has. `digest` identifies partitions, held-out samples and labels: other files, or the random numbers
    of another release, change it.
    """

    labels: Indices
    classes: int
    partitions: list[Indices]
    held_out: Indices
    digest: str
    kind: str = "class"  # what a label is: a class, or a bin of numbers


def split_of(experiment: schema.Experiment, *, node: str = CLOUD) -> Split:
    """Return the split of the node's files; nodes of this process with the same files share one object.

    Raises InvalidExperiment, also if every device has its own images and nothing is split.
    """
    if experiment.data.private:
        problem = "every device has samples of its own, nothing is split"
        raise InvalidExperiment("data.partition", experiment.data.partition, problem, "Use another data.partition.")
    home = node if "{node}" in experiment.data.root else CLOUD  # the owner of the files
    with _SPLITTING:  # one device of a process computes the split, the others find it in the cache
        return _split(experiment.to_json(), home)


def keep(experiment: schema.Experiment, folder: Path) -> str:
    """Write the cloud's split into the run's folder and return its digest; for private data write nothing, return "".

    Raises InvalidExperiment, also if the run was started with another split.
    """
    if experiment.data.private:
        return ""
    split = split_of(experiment)
    facts = folder / FACTS
    if not facts.exists():
        write(experiment, split, folder)
    elif (begun := json.loads(facts.read_text(encoding="utf-8"))["digest"]) != split.digest:
        problem = f"it was started with other data or another split, digest {begun}; now it is {split.digest}"
        raise InvalidExperiment("--resume", str(folder), problem, "Restore the files of the data set.")
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
            name: {
                "parent": tree.parent(name),
                **_described(split, part),
            }
            for name, part in zip(tree.devices, split.partitions, strict=True)
        },
    }
    arrays = dict(zip(tree.devices, split.partitions, strict=True))
    if len(split.held_out):
        facts["held_out"] = _described(split, split.held_out)
        arrays[HELD_OUT] = split.held_out
    with writing(folder):
        with zipfile.ZipFile(folder / ARRAYS, "w", zipfile.ZIP_DEFLATED) as archive:  # savez rejects the name `file`
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
    data, tree, seed = experiment.data, experiment.tree, experiment.seed
    labels = dataset.train_labels.numpy()
    classes, identity, kind = dataset.classes, labels, "class"
    if dataset.inputs.numbers:
        kind = "bin"
        classes, identity = data.bins or 1, labels.view(np.int32).astype(np.int64).ravel()
        labels = partitions.quantiles(labels, bins=classes) if data.bins else np.zeros(len(labels), np.int64)
    if not data.node_samples:
        parts = partitions.split(labels, data=data, tree=tree, seed=seed, owners=dataset.owners)
        digest = partitions.digest(parts, labels=identity)
        return Split(labels, classes, parts, np.empty(0, np.int64), digest, kind)
    held_out = partitions.hold_out(len(labels), data=data, seed=seed)
    rest = np.delete(np.arange(len(labels)), held_out)
    owners = None if dataset.owners is None else dataset.owners[rest]
    parts = [rest[part] for part in partitions.split(labels[rest], data=data, tree=tree, seed=seed, owners=owners)]
    if not all(map(len, parts)):
        problem = f"no sample remains for {tree.devices[min(i for i, part in enumerate(parts) if not len(part))]}"
        raise InvalidExperiment("data.node_samples", data.node_samples, problem, "Hold out fewer samples.")
    digest = partitions.digest([*parts, held_out], labels=identity)
    return Split(labels, classes, parts, held_out, digest, kind)


def _described(split: Split, part: Indices) -> dict[str, Any]:
    counts = np.bincount(split.labels[part], minlength=split.classes)
    return {"samples": len(part), f"by_{split.kind}": counts.tolist()}
