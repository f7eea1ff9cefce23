"""The data and the model of an experiment.

The formulas and their sources are in `common/learning/`: `datasets.py`, `partitions.py`, `models.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from common.errors import InvalidExperiment
from common.experiment import own
from common.experiment.own import is_own
from common.experiment.tables import Count, Positive, SettingsTable, form, proposal
from common.host.examination import Finding

DATASETS: Final = (
    "digits", "mnist", "fashionmnist", "cifar10", "cifar100", "femnist",
    "shakespeare", "sent140", "folder", "synthetic",
)  # fmt: skip
TEXTS: Final = ("shakespeare", "sent140")
WITH_USERS: Final = ("femnist", *TEXTS)
FOLDERS: Final = MappingProxyType(  # of each set's files, below `root`
    {
        "mnist": "MNIST",
        "fashionmnist": "FashionMNIST",
        "cifar10": "cifar-10-batches-py",
        "cifar100": "cifar-100-python",
        "femnist": "femnist",
        "shakespeare": "shakespeare",
        "sent140": "sent140",
    }
)
SAMPLES: Final = MappingProxyType(  # for training in each set; of LEAF's in all of it, which its options may reduce
    {
        "digits": 1_438,
        "mnist": 60_000,
        "fashionmnist": 60_000,
        "cifar10": 50_000,
        "cifar100": 50_000,
        "femnist": 805_263,
        "shakespeare": 4_226_158,
        "sent140": 1_600_498,
    }
)
OWN_MOST: Final = 1_000_000_000  # of `folder` and of own data, of which only a device knows the size
FolderName = Annotated[str, form(r"^[^./\\][^/\\]*$", "the name of a folder, without a dot first and without slashes")]

MODELS: Final = (
    "mlp_digits", "cnn_digits", "lenet5", "lenet_cifar", "cnn_femnist", "cnn_fedavg", "cnn_fedavg_padded",
    "resnet20", "resnet20_b", "resnet20_preact", "resnet18_cifar", "vgg16_bn", "vgg16", "vgg_femnist",
    "char_lstm", "sent_lstm",
)  # fmt: skip


OWN_FORM: Final = "package.module:function"


class Data(SettingsTable):
    """The data set and how it is split over the devices.

    A key that does nothing with the data set and the partition chosen is an error, which names what it belongs to.
    """

    # One of fedstrata's, or a function of one's own, `package.module:function`.
    dataset: Annotated[str, Field(json_schema_extra={"enum": [*DATASETS]})] = "digits"
    # The folder of data sets, on a device relative to its host's `--data-root`, and never outside it; `{node}` in it is
    # the name of the node that reads, `cloud` for the test set.
    root: str = "data"
    labels: Literal["fine", "coarse"] = "fine"  # of `cifar100`: its 100 classes or their 20 groups
    # Of `folder`: the classes' folders, in order; of `synthetic`: how many.
    classes: Count | list[FolderName] | None = None
    # Of `folder` and `synthetic`: channels, height, width.
    image_shape: Annotated[list[Count], Field(min_length=3, max_length=3)] = Field(default_factory=lambda: [3, 32, 32])
    samples: Count = 10_000  # of `synthetic`: training samples
    test_samples: Count = 1_000  # of `synthetic`: test samples
    # Standard deviation of Gaussian noise on images, pixels 0 to 1; not clipped.
    noise: Annotated[float, Field(ge=0)] = 0.0
    # How the training samples are split over the devices.
    partition: Literal[
        "iid", "dirichlet", "dirichlet_overlap", "shards", "natural", "institution_dirichlet", "institution_shards"
    ] = "iid"
    concentration: Positive = 1.0  # of the Dirichlet partitions; smaller is more skewed
    shards: Count = 2  # of the shard partitions: pieces of the sorted labels for each device, or each institution
    # Of the `institution_` partitions: the split over its devices.
    within: Literal["iid", "dirichlet", "shards"] = "iid"
    within_concentration: Positive = 1.0  # of `within = "dirichlet"`
    min_samples: Annotated[int, Field(ge=0)] = 10  # least samples of each device under a Dirichlet partition
    partition_size: Count = 600  # of `dirichlet_overlap`: samples of each device
    # Training samples held out before the partition, the same for all aggregating nodes: for rules that need data.
    node_samples: Annotated[int, Field(ge=0)] = 0

    @model_serializer(mode="wrap")
    def _in_effect(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = {key for key, use in _USES.items() if not use.counts(self)}
        unused |= set() if self.node_samples else {"node_samples"}
        return {key: value for key, value in dump(self).items() if key not in unused}


class _Use(NamedTuple):
    """The settings a key belongs to, and whether it has an effect on an experiment's data."""

    belongs: str
    counts: Callable[[Data], bool]


def _made(data: Data) -> bool:
    return data.dataset == "synthetic"


def _within(data: Data, kind: str) -> bool:
    return data.partition.startswith("institution_") and data.within == kind


_SHAPED: Final = _Use("data.dataset folder and synthetic", lambda data: data.dataset in ("folder", "synthetic"))
_USES: Final = {
    "labels": _Use("data.dataset cifar100", lambda data: data.dataset == "cifar100"),
    "classes": _SHAPED,
    "image_shape": _SHAPED,
    "samples": _Use("data.dataset synthetic", _made),
    "test_samples": _Use("data.dataset synthetic", _made),
    "concentration": _Use(
        "data.partition dirichlet, dirichlet_overlap and institution_dirichlet",
        lambda data: data.partition in ("dirichlet", "dirichlet_overlap", "institution_dirichlet"),
    ),
    "shards": _Use(
        "data.partition shards and institution_shards and data.within shards",
        lambda data: data.partition in ("shards", "institution_shards") or _within(data, "shards"),
    ),
    "within": _Use(
        "data.partition institution_dirichlet and institution_shards",
        lambda data: data.partition.startswith("institution_"),
    ),
    "within_concentration": _Use("data.within dirichlet", lambda data: _within(data, "dirichlet")),
    "min_samples": _Use(
        "data.partition dirichlet and institution_dirichlet and data.within dirichlet",
        lambda data: data.partition in ("dirichlet", "institution_dirichlet") or _within(data, "dirichlet"),
    ),
    "partition_size": _Use("data.partition dirichlet_overlap", lambda data: data.partition == "dirichlet_overlap"),
}


class Model(SettingsTable):
    """The model that devices train."""

    name: str = "cnn_digits"  # one of fedstrata's models, or `package.module:function`
    # Features of a projection head before the classifier, as MOON's authors use it; 0 = none.
    projection: Annotated[int, Field(ge=0)] = 0

    @model_serializer(mode="wrap")
    def _in_effect(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value or key == "name"}


def found_in(root: Path) -> list[str]:
    """Return the names of the data sets that have a folder below a root."""
    return [name for name, folder in FOLDERS.items() if (root / folder).is_dir()]


def examine_data(root: Path, *, needed: bool) -> Finding:
    """Return whether a folder of data sets has any. `digits` and `synthetic` need none."""
    found = found_in(root)
    problem = "has no data set" if root.is_dir() else "there is no such folder"
    return Finding("data sets", needed, bool(found), ", ".join(found) if found else f"{root}: {problem}")


def samples_most(data: Data, *, devices: int) -> int:
    """Return the most training samples that one of so many devices can have."""
    total = _samples(data) - data.node_samples
    if data.partition == "iid":
        return -(-total // devices)
    if data.partition == "dirichlet_overlap":
        return min(total, data.partition_size)
    return min(total, data.shards * -(-total // (devices * data.shards))) if data.partition == "shards" else total


def _samples(data: Data) -> int:
    """Return the most training samples that a data set can have."""
    return data.samples if data.dataset == "synthetic" else SAMPLES.get(data.dataset, OWN_MOST)


def check(data: Data, model: Model) -> None:
    """Check the values that types alone cannot check. Raises InvalidExperiment."""
    _check_named("model.name", model.name, MODELS, what="model")
    _check_named("data.dataset", data.dataset, DATASETS, what="data set")
    if data.noise and data.dataset in TEXTS:
        raise InvalidExperiment("data.noise", data.noise, f"{data.dataset} is text", "Omit it.")
    if data.noise and is_own(data.dataset):
        raise InvalidExperiment("data.noise", data.noise, "own data has its own", "Add it in the function.")
    if data.partition == "natural" and data.dataset not in (*WITH_USERS, "folder") and not is_own(data.dataset):
        problem = f"the samples of {data.dataset} have no users"
        raise InvalidExperiment("data.partition", "natural", problem, "Use iid, dirichlet or shards.")
    if data.dataset == "folder" and data.partition != "natural":
        problem = "every device has its own images in its folder, so there is nothing to split"
        raise InvalidExperiment("data.partition", data.partition, problem, "Set data.partition = 'natural'.")
    if data.dataset == "folder" and not (
        isinstance(data.classes, list) and len(set(data.classes)) == len(data.classes)
    ):
        problem = "all devices must number the classes in the same way"
        raise InvalidExperiment("data.classes", data.classes, problem, "List the folders of the classes, each once.")
    if data.dataset == "folder" and data.image_shape[0] not in (1, 3):
        raise InvalidExperiment(
            "data.image_shape", data.image_shape, "images in files have 1 or 3 channels", "Begin with 1 or 3."
        )
    if model.projection and is_own(model.name):
        problem, remedy = "a model of one's own has no head of fedstrata's", "Build the layers in its function."
        raise InvalidExperiment("model.projection", model.projection, problem, remedy)
    if data.dataset == "synthetic" and not isinstance(data.classes, int):
        raise InvalidExperiment("data.classes", data.classes, "synthetic needs a number", "Write for instance 10.")
    if data.node_samples and data.dataset == "folder":
        problem = "every device has its own images, so there are none to hold out"
        raise InvalidExperiment("data.node_samples", data.node_samples, problem, "Omit it, or use another data set.")
    if data.node_samples >= _samples(data):
        problem = f"{data.dataset} has {_samples(data)} training samples"
        raise InvalidExperiment("data.node_samples", data.node_samples, problem, "Leave some to the devices.")
    for key in sorted(data.model_fields_set & _USES.keys()):
        if not _USES[key].counts(data):
            problem = f"no effect with data.dataset {data.dataset} and data.partition {data.partition}"
            remedy = f"Omit it; it belongs to {_USES[key].belongs}."
            raise InvalidExperiment(f"data.{key}", getattr(data, key), problem, remedy)


def _check_named(key: str, name: str, known: Sequence[str], *, what: str) -> None:
    if is_own(name):
        if not re.fullmatch(own.FORM, name):
            raise InvalidExperiment(key, name, f"not of the form {OWN_FORM}", "Write for instance nets.own:build.")
    elif name not in known:
        raise InvalidExperiment(key, name, f"no such {what}", proposal(name, [*known, OWN_FORM], what="There are"))


def root_below(data: Data, node: str, *, allowed: Path) -> str:
    """Return where a host reads the data of an experiment that comes from another one.

    `allowed`: the folder of which it may read, to which `data.root` is relative. Raises InvalidExperiment.
    """
    if data.dataset not in (*FOLDERS, "folder") and not is_own(data.dataset):
        return data.root  # no file is read
    root = allowed / data.root
    try:
        inside = Path(str(root).replace("{node}", node)).resolve().is_relative_to(allowed.resolve())
    except (OSError, ValueError, RuntimeError):  # no path, or links that go round
        inside = False
    if not inside:
        problem = f"outside {allowed.absolute()}, the folder of which the host of {node} may read"
        remedy = "Write a path below it, or start the device with --data-root DIR or --data DIR."
        raise InvalidExperiment("data.root", data.root, problem, remedy)
    return str(root)


def check_alike(data: Data, node: str, *, partition: str, clouds: str) -> None:
    """Compare the digests of the node's and the cloud's split, "" where nothing is split. Raises InvalidExperiment."""
    if partition != clouds:
        raise InvalidExperiment(
            "data.root",
            data.root,
            f"{node} splits the data differently than the cloud: digest {partition} instead of {clouds}",
            "Give all nodes the same files (see `fedstrata data check`) and the same release of fedstrata and numpy.",
        )
