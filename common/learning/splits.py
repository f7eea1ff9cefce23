"""The whole split of a run's data: computed by every node from its own files, compared by digest, kept in files."""

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
from common.learning import datasets, partitions
from common.learning.partitions import Indices

ARRAYS: Final = "partition.npz"
FACTS: Final = "partition.json"


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The devices' `parts` of the training samples, in order, whose `labels` int64 [N] are below `classes`.

    `digest` names parts and labels: other files, or another release's draws, give another.
    """

    labels: Indices
    classes: int
    parts: list[Indices]
    digest: str


def split_of(experiment: schema.Experiment, *, node: str = CLOUD) -> Split:
    """Return the split as the node's files give it; nodes of this process that share their files share it too.

    Raises InvalidExperiment, also where every device has images of its own and nothing is split.
    """
    if experiment.data.dataset == "folder":
        raise InvalidExperiment(
            "data.dataset", "folder", "every device has its own images, nothing is split", "Use another data.dataset."
        )
    home = node if "{node}" in experiment.data.root else CLOUD  # whose files
    with _SPLITTING:  # one of a process's many devices splits, the others take it from the cache
        return _split(experiment.to_json(), home)


def keep(experiment: schema.Experiment, folder: Path) -> str:
    """Write the cloud's split into the run's folder and return its digest; nothing and '' where nothing is split.

    Raises InvalidExperiment, also where the run was begun with another split.
    """
    if experiment.data.dataset == "folder":
        return ""
    split = split_of(experiment)
    facts = folder / FACTS
    if facts.exists() and (begun := json.loads(facts.read_text(encoding="utf-8"))["digest"]) != split.digest:
        problem = f"it was begun with other data or another split of them, digest {begun}; now it is {split.digest}"
        raise InvalidExperiment("--resume", str(folder), problem, "Restore the files of the data set.")
    write(experiment, split, folder)
    return split.digest


def write(experiment: schema.Experiment, split: Split, folder: Path) -> dict[str, Any]:
    """Write each device's indices, int64, and the facts about them into two files; return the facts. Raises OSError."""
    names = experiment.topology.device_names()
    homes = {name: home for home, members in experiment.topology.children().items() for name in members}
    facts: dict[str, Any] = {
        "digest": split.digest,
        "seed": experiment.seed,
        "data": experiment.data.model_dump(mode="json"),
        "devices": {
            name: {
                "institution": homes[name],
                "samples": len(part),
                "by_class": np.bincount(split.labels[part], minlength=split.classes).tolist(),
            }
            for name, part in zip(names, split.parts, strict=True)
        },
    }
    with zipfile.ZipFile(folder / ARRAYS, "w", zipfile.ZIP_DEFLATED) as archive:  # numpy's savez knows no name `file`
        for name, part in zip(names, split.parts, strict=True):
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, part)
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


_SPLITTING = threading.Lock()


@lru_cache(maxsize=4)
def _split(experiment_json: str, node: str) -> Split:
    experiment = reading.parse(experiment_json)
    dataset = datasets.load(experiment.data, node=node)
    labels = dataset.train_labels.numpy()
    parts = partitions.split(
        labels, data=experiment.data, topology=experiment.topology, seed=experiment.seed, owners=dataset.owners
    )
    return Split(labels, dataset.classes, parts, partitions.digest(parts, labels=labels))
