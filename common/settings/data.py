"""The data and the model of an experiment.

The formulas and their sources are in `common/learning/`: `datasets.py`, `splits.py`, `models.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.examination import Finding
from fedstrata.common.settings import own
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.tables import (
    Count,
    EffectiveTable,
    Positive,
    Refused,
    Text,
    check_table,
    form,
    proposal,
)

DATASETS: Final = (
    "digits", "mnist", "fashionmnist", "cifar10", "cifar100", "femnist",
    "shakespeare", "sent140", "motions", "folder", "synthetic",
)  # fmt: skip
TEXTS: Final = ("shakespeare", "sent140")
WITH_USERS: Final = ("femnist", "motions", *TEXTS)
FOLDERS: Final = MappingProxyType(  # of each set's files, below `root`
    {
        "mnist": "MNIST",
        "fashionmnist": "FashionMNIST",
        "cifar10": "cifar-10-batches-py",
        "cifar100": "cifar-100-python",
        "femnist": "femnist",
        "shakespeare": "shakespeare",
        "sent140": "sent140",
        "motions": "motions",
    }
)
# for training in each set; of LEAF's in all of it, which its options may reduce
SAMPLES: Final = MappingProxyType(
    {
        "digits": 1_438,
        "mnist": 60_000,
        "fashionmnist": 60_000,
        "cifar10": 50_000,
        "cifar100": 50_000,
        "femnist": 805_263,
        "shakespeare": 4_226_158,
        "sent140": 1_600_498,
        "motions": 2_854,
    }
)
SHAPES: Final = MappingProxyType(  # of the sets whose images have one size: channels, height, width
    {
        **dict.fromkeys(("mnist", "fashionmnist", "femnist"), (1, 28, 28)),
        **dict.fromkeys(("cifar10", "cifar100"), (3, 32, 32)),
        "digits": (1, 8, 8),
        "motions": (6, 1, 128),
    }
)
# of `folder`, tables and own data, of which only a device knows the size
OWN_MOST: Final = 1_000_000_000
TABLE: Final = r"^[^./\\][^/\\]*\.(csv|npz)$"
TableName = Annotated[str, form(TABLE, "NAME.csv or NAME.npz, without slashes")]
Column = Annotated[str, Field(min_length=1)]
CLASSES: Final = "classes"  # the values of `data.targets`
NUMBERS: Final = "numbers"
SKEWED: Final = (
    "dirichlet",
    "dirichlet_overlap",
    "shards",
    "institution_dirichlet",
    "institution_shards",
)
DRAWN: Final = ("dirichlet", "institution_dirichlet", "quantity")  # with `min_samples`
SHAPED: Final = ("folder", "synthetic")  # the data sets with `image_shape`
FolderName = Annotated[
    str, form(r"^[^./\\][^/\\]*$", "the name of a folder, without a dot first and without slashes")
]


class Accepted(NamedTuple):
    """The samples that a model accepts: text, images, or arrays of one shape."""

    channels: tuple[int, ...] | None = None  # of images; None: any
    sides: Container[int] = ()
    text: bool = False
    shape: tuple[int, ...] | None = None

    def takes(self, shape: Sequence[int], *, text: bool) -> bool:
        """Return whether the model accepts samples of a shape."""
        if self.shape is not None:
            return tuple(shape) == self.shape and not text
        if self.text or text or len(shape) != 3:
            return self.text and text
        channels, *sides = shape
        if self.channels is not None and channels not in self.channels:
            return False
        return all(side in self.sides for side in sides)


_FROM_16 = range(16, 4096)
_FROM_32 = range(32, 4096)
MODELS: Final = MappingProxyType(
    {
        "linear_digits": Accepted((1,), (8,)),
        "mlp_digits": Accepted((1,), (8,)),
        "cnn_digits": Accepted((1,), (8,)),
        "lenet5": Accepted((1,), (28,)),
        "lenet_cifar": Accepted((3,), (32,)),
        "cnn_femnist": Accepted((1,), (28,)),
        "cnn_fedavg": Accepted(None, _FROM_16),
        "cnn_fedavg_padded": Accepted(None, _FROM_16),
        "resnet20": Accepted(None, _FROM_16),
        "resnet20_b": Accepted(None, _FROM_16),
        "resnet20_preact": Accepted(None, _FROM_16),
        "resnet18_cifar": Accepted(None, _FROM_16),
        "vgg16_bn": Accepted(None, (32,)),
        "vgg16": Accepted(None, _FROM_32),
        "vgg_femnist": Accepted((1,), _FROM_16),
        "cnn_motions": Accepted(shape=SHAPES["motions"]),
        "char_lstm": Accepted(text=True),
        "sent_lstm": Accepted(text=True),
    }
)


OWN_FORM: Final = "package.module:function"
PARTS: Final = ("frozen", "personal")  # of a model, the others are exchanged
Pattern = Annotated[str, Field(min_length=1, max_length=512)]
PUBLISHED: Final = "published"
OWN: Final = "own"
NONE: Final = "none"
NUMBERED_ALIKE: Final = "all nodes must number the classes in the same way"  # a problem


class Data(EffectiveTable):
    """The data set and how it is split over the devices.

    A key that does nothing with the data set and the partition chosen is an error, which names what
    it belongs to.
    """

    # One of fedstrata's; a table, `NAME.csv` or `NAME.npz` below `root`; or a function of your own,
    # `package.module:function`.
    dataset: Annotated[str, Field(json_schema_extra={"enum": [*DATASETS]})] = "digits"
    # The folder of data sets, on a device relative to its host's `--data-root`, and never outside
    # it; `{node}` in it is the name of the node that reads, `cloud` for the test set.
    root: Text = "data"
    labels: Literal["fine", "coarse"] = "fine"  # of `cifar100`: its 100 classes or their 20 groups
    # What a model predicts of a sample, of tables and own data: its class, or numbers (regression;
    # 0 and 1 for labels).
    targets: Literal["classes", "numbers"] = CLASSES
    # Of `folder`: the classes' folders, in order; of `synthetic`: how many. Of tables and own data:
    # how many, or their names in a CSV file, in order; without it all that occur.
    classes: Count | list[FolderName] | None = None
    # Of `folder` and `synthetic`: channels, height, width; the images of `folder` are scaled to it.
    image_shape: Annotated[list[Count], Field(min_length=3, max_length=3)] = Field(
        default_factory=lambda: [3, 32, 32]
    )
    samples: Count = 10_000  # of `synthetic`: training samples
    test_samples: Count = 1_000  # of `synthetic`: test samples
    # of a CSV file: the column to predict, or several of numbers
    target_column: Column | list[Column] | None = None
    # of a CSV file: whose sample it is, for `partition = "natural"`
    user_column: Column | None = None
    # of a CSV file: those that are no feature
    ignored_columns: list[Column] = Field(default_factory=list)
    # Of a CSV file: what is done with a row that lacks a value. Rows that are left out are counted
    # by class.
    missing: Literal["error", "drop"] = "error"
    # Of a CSV file: shift and scale each feature to mean 0 and deviation 1 over the training rows.
    standardise: bool = True
    # of a CSV file's numbers: they are divided by it, and errors are in units of it
    target_scale: Positive = 1.0
    test_file: TableName | None = None  # of a CSV file: the test samples, in a file beside it
    # Of a table without a test file: this share of its rows, always the same ones.
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    # Standard deviation of Gaussian noise on images, pixels 0 to 1; not clipped.
    noise: Annotated[float, Field(ge=0)] = 0.0
    # Mean and deviation of pixels in 0 to 1, which are subtracted and divided by. `published`: the
    # constants of each data set in the papers' public code, see docs/data.md; `own`: those of the
    # training samples, by channel; `none`: pixels stay in 0 to 1. Or two lists, `[[0.286],
    # [0.353]]`: of one number, or of one for each channel.
    normalise: Literal["published", "own", "none"] | list[list[float]] = PUBLISHED
    # How the training samples are split over the devices.
    partition: Literal[
        "iid", "dirichlet", "dirichlet_overlap", "shards", "quantity", "natural", "private",
        "institution_dirichlet", "institution_shards",
    ] = "iid"  # fmt: skip
    # Of `targets = "numbers"`: quantiles of the target that stand for classes in the partitions by
    # class.
    bins: Annotated[int, Field(ge=2)] | None = None
    # of the Dirichlet partitions and of `quantity`; smaller is more skewed
    concentration: Positive = 1.0
    # of the shard partitions: pieces of the sorted labels for each device, or each institution
    shards: Count = 2
    # Of the `institution_` partitions: the split over its devices.
    within: Literal["iid", "dirichlet", "shards"] = "iid"
    within_concentration: Positive = 1.0  # of `within = "dirichlet"`
    # Least samples of each device under a Dirichlet partition, or `quantity`.
    min_samples: Annotated[int, Field(ge=0)] = 10
    partition_size: Count = 600  # of `dirichlet_overlap`: samples of each device
    # Training samples held out before the partition, the same for all aggregating nodes: for rules
    # that need data.
    node_samples: Annotated[int, Field(ge=0)] = 0

    @property
    def unused(self) -> Set[str]:
        """The keys that have no effect with the data set and the partition."""
        return {key for key, use in _USES.items() if not use.counts(self)}

    @property
    def from_all_samples(self) -> Sequence[str]:
        """The keys by which something is computed from all training samples before the training."""
        found = []
        if self.standardise and "standardise" not in self.unused:
            found.append("data.standardise: mean and deviation of each feature")
        if self.normalise == OWN:
            found.append('data.normalise = "own": mean and deviation of the samples')
        if _own(self) and self.targets == CLASSES and self.classes is None:
            found.append("data.classes is not set: the classes that occur")
        return found

    @property
    def private(self) -> bool:
        """Whether every node has samples of its own, and nothing is split."""
        return self.partition == "private" or (
            self.dataset == "folder" and self.partition == "natural"
        )


class _Use(NamedTuple):
    """The settings a key belongs to, and whether it has an effect on an experiment's data."""

    belongs: str
    counts: Callable[[Data], bool]


def _within(data: Data, kind: str) -> bool:
    return data.partition.startswith("institution_") and data.within == kind


def _own(data: Data) -> bool:
    return is_own(data.dataset) or is_table(data.dataset)


def _csv(data: Data) -> bool:
    return is_csv(data.dataset)


_CSV: Final = _Use("a data.dataset of the form NAME.csv", _csv)
_SPLIT_CSV: Final = _Use(
    "a data.dataset of the form NAME.csv that is split",
    lambda data: _csv(data) and not data.private,
)
_SYNTHETIC: Final = _Use("data.dataset synthetic", lambda data: data.dataset == "synthetic")
_USES: Final = {
    "labels": _Use("data.dataset cifar100", lambda data: data.dataset == "cifar100"),
    "classes": _Use(
        "data.dataset folder and synthetic, and to tables and own data with data.targets classes",
        lambda data: data.dataset in SHAPED or (_own(data) and data.targets == CLASSES),
    ),
    "image_shape": _Use("data.dataset folder and synthetic", lambda data: data.dataset in SHAPED),
    "target_column": _CSV,
    "user_column": _CSV,
    "ignored_columns": _CSV,
    "missing": _CSV,
    "standardise": _SPLIT_CSV,
    "target_scale": _Use(
        "a data.dataset of the form NAME.csv with data.targets numbers",
        lambda data: _csv(data) and data.targets == NUMBERS,
    ),
    "test_file": _SPLIT_CSV,
    "test_share": _Use(
        "a table that is split, without data.test_file",
        lambda data: is_table(data.dataset) and not data.private and data.test_file is None,
    ),
    "bins": _Use(
        "data.targets numbers and a partition by class",
        lambda data: data.targets == NUMBERS and data.partition in SKEWED,
    ),
    "normalise": _Use(
        "images, arrays and own data; data.standardise to tables",
        lambda data: data.dataset not in TEXTS and not _csv(data),
    ),
    "samples": _SYNTHETIC,
    "test_samples": _SYNTHETIC,
    "concentration": _Use(
        "data.partition dirichlet, dirichlet_overlap, institution_dirichlet and quantity",
        lambda data: data.partition == "dirichlet_overlap" or data.partition in DRAWN,
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
        "data.partition dirichlet, institution_dirichlet and quantity, and data.within dirichlet",
        lambda data: data.partition in DRAWN or _within(data, "dirichlet"),
    ),
    "partition_size": _Use(
        "data.partition dirichlet_overlap", lambda data: data.partition == "dirichlet_overlap"
    ),
}


class ModelSettings(EffectiveTable):
    """The model that devices train.

    `frozen` and `personal` are patterns of the names in its `state_dict`, for instance
    `["conv1.*"]` (`*`, `?` and `[...]` as in a shell). All other arrays are exchanged, except
    parameters with `requires_grad = False`, which are frozen.
    """

    name: str = "cnn_digits"  # one of fedstrata's models, or `package.module:function`
    # Features of a projection head before the classifier, as MOON's authors use it; 0 = none.
    projection: Annotated[int, Field(ge=0)] = 0
    # The first model: that of a run, by its folder, or of a file in safetensors' format, from the
    # folder in which the cloud was started. Not set: one drawn from the seed.
    initial: Text | None = None
    # false: in the first local round of a run each device begins with a model of its own, drawn
    # from the seed and its name, and not with the received one.
    same_initial: bool = True
    # Arrays that are the same everywhere: no device trains them. They go down once, to nodes that
    # build others.
    frozen: list[Pattern] = Field(default_factory=list)
    # Arrays that each device trains and keeps for itself, from its first task to its last. The
    # cloud has none of them.
    personal: list[Pattern] = Field(default_factory=list)

    @property
    def unused(self) -> Set[str]:
        """The keys that most experiments leave as they are."""
        unset = {
            "frozen": not self.frozen,
            "personal": not self.personal,
            "same_initial": self.same_initial,
        }
        return {key for key, is_unset in unset.items() if is_unset}


def found_in(root: Path) -> list[str]:
    """Return the names of the data sets that have a folder below a root."""
    return [name for name, folder in FOLDERS.items() if (root / folder).is_dir()]


def is_there(data: Data) -> bool:
    """Return whether the data set's files are below the root or installed, or not needed."""
    if data.dataset == "motions" and seglearn_file() is not None:
        return True
    return data.dataset not in FOLDERS or (Path(data.root) / FOLDERS[data.dataset]).is_dir()


def seglearn_file() -> Path | None:
    """Return the file of motions in seglearn, which is not imported, None if it is missing."""
    found = find_spec("seglearn")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent / "data" / "watch_dataset.npy"


def examine_data(root: Path, *, needed: bool) -> Finding:
    """Return whether a folder of data sets has any. `digits` and `synthetic` need none."""
    found = found_in(root)
    text = ", ".join(found)
    if not root.is_dir():
        text = f"{root}: there is no such folder"
    elif not found:
        text = f"{root}: has no data set"
    return Finding("data sets", needed, bool(found), text)


def is_table(name: str) -> bool:
    """Return whether a data set is a file of samples, CSV or npz."""
    return re.match(TABLE, name) is not None


def is_csv(name: str) -> bool:
    """Return whether a data set is a CSV file."""
    return is_table(name) and name.endswith(".csv")


def samples_most(data: Data, *, devices: int) -> int:
    """Return the most training samples that one of so many devices can have."""
    total = _samples(data) - data.node_samples
    if data.partition == "iid":
        return -(-total // devices)
    if data.partition == "dirichlet_overlap":
        return min(total, data.partition_size)
    if data.partition == "shards":
        return min(total, data.shards * -(-total // (devices * data.shards)))
    return total


def _samples(data: Data) -> int:
    """Return the most training samples that a data set can have."""
    if data.dataset == "synthetic":
        return data.samples
    return SAMPLES.get(data.dataset, OWN_MOST)


def check_data(data: Data, model: ModelSettings) -> None:
    """Check the values that types alone cannot check. Raises InvalidExperiment."""
    _check_named("model.name", model.name, MODELS, what="model")
    if not is_table(data.dataset):
        known = (*DATASETS, "NAME.csv", "NAME.npz")
        _check_named("data.dataset", data.dataset, known, what="data set")
    for refused in (_refused_noise, _refused_of_own, _refused_constants, _refused_of_folder):
        check_table("data", data, refused(data))
    check_table("model", model, _refused_of_model(model))
    check_table("data", data, _refused(data))


def _refused_noise(data: Data) -> Refused:
    if not data.noise:
        return
    if data.dataset in TEXTS:
        yield "noise", f"{data.dataset} is text", "Omit it."
    if data.dataset == "motions":
        yield "noise", "motions are no images", "Omit it."
    if _own(data):
        yield "noise", "own data has its own", "Add it to the samples."


def _refused_of_folder(data: Data) -> Refused:
    if data.dataset != "folder":
        return
    names = data.classes
    if not isinstance(names, list) or len(set(names)) < len(names):
        yield "classes", NUMBERED_ALIKE, "List the folders of the classes, each once."
    if data.image_shape[0] not in (1, 3):
        yield "image_shape", "images in files have 1 or 3 channels", "Begin with 1 or 3."


def _refused_of_model(model: ModelSettings) -> Refused:
    if model.projection and is_own(model.name):
        problem = "a model of your own has no head of fedstrata's"
        yield "projection", problem, "Build the layers in its function."
    if model.initial is not None and not model.same_initial:
        yield "same_initial", "devices begin with model.initial", "Omit one of the two."


def _refused(data: Data) -> Refused:
    if data.dataset == "synthetic" and not isinstance(data.classes, int):
        yield "classes", "synthetic needs a number", "Write for instance 10."
    if data.node_samples and data.private:
        problem = "every device has samples of its own, so there are none to hold out"
        yield "node_samples", problem, "Omit it, or use another data set."
    if data.node_samples >= _samples(data):
        problem = f"{data.dataset} has {_samples(data)} training samples"
        yield "node_samples", problem, "Leave some to the devices."
    for key in sorted(data.model_fields_set & data.unused):
        problem = f"no effect with data.dataset {data.dataset} and data.partition {data.partition}"
        yield key, problem, f"Omit it; it belongs to {_USES[key].belongs}."


def check_fits(data: Data, model: ModelSettings, *, devices: int) -> None:
    """Check a data set known without its files: shape and number. Raises InvalidExperiment."""
    shape: Sequence[int] = SHAPES.get(data.dataset, ())
    if data.dataset in SHAPED:
        shape = data.image_shape
    if data.dataset in TEXTS:
        check_accepted(model.name, (), text=True, what="text")
    elif shape:
        check_accepted(model.name, shape, text=False, what=f"images of {[*shape]}")
    total = _samples(data) - data.node_samples
    least, key = _least(data)
    if devices * least > total:
        problem = f"{data.dataset} has {total:,} training samples, and each device needs {least}"
        most = total // least
        remedy = f"Use at most {most:,} devices"
        if not most:
            remedy = f"Lower {key}"
        elif least > 1:
            remedy += f", or lower {key}"
        raise InvalidExperiment("topology.devices", devices, problem, f"{remedy}.")


def check_accepted(model: str, shape: Sequence[int], *, text: bool, what: str) -> None:
    """Check that a model of fedstrata's accepts samples of a shape. Raises InvalidExperiment."""
    if is_own(model) or MODELS[model].takes(shape, text=text):
        return
    fitting = [name for name, accepted in MODELS.items() if accepted.takes(shape, text=text)]
    use = " or ".join(fitting) or "a model of your own, package.module:function"
    remedy = f"Use {use}, or another data.dataset."
    raise InvalidExperiment("model.name", model, f"does not accept {what} of the data set", remedy)


def _least(data: Data) -> tuple[int, str]:
    """Return the training samples that each device needs for itself, and the key of that number."""
    if data.private or data.partition == "dirichlet_overlap":
        return 0, ""
    if data.partition == "shards" or _within(data, "shards"):
        return data.shards, "data.shards"
    if data.partition in DRAWN or _within(data, "dirichlet"):
        return max(1, data.min_samples), "data.min_samples"
    return 1, "data.min_samples"


def _refused_of_own(data: Data) -> Refused:
    """Yield the keys of folders, tables and own data."""
    own = _own(data)
    csv = _csv(data)
    in_classes = data.targets == CLASSES
    with_users = data.dataset in (*WITH_USERS, "folder") or (own and not csv)
    if data.partition == "natural" and not with_users and data.user_column is None:
        remedy = "Use iid, dirichlet or shards."
        if csv:
            remedy = "Set data.user_column, or use another partition."
        yield "partition", f"the samples of {data.dataset} have no users", remedy
    if data.partition == "private" and data.dataset != "folder" and not own:
        problem = f"{data.dataset} is the same on every node"
        yield "partition", problem, "Use iid, dirichlet or shards."
    if not in_classes and not own:
        problem = f"the samples of {data.dataset} have classes"
        yield "targets", problem, "Omit it, or use a table or own data."
    if not in_classes and data.partition in SKEWED and data.bins is None:
        remedy = "Set data.bins, for instance to 10 quantiles of the target, or use iid, quantity"
        problem = "the targets are numbers, which have no classes"
        yield "partition", problem, f"{remedy} or natural."
    if csv and not data.target_column:
        yield "target_column", "not set", "Name the column that the model predicts."
    if csv and in_classes and isinstance(data.target_column, list):
        remedy = "Name one, or set data.targets = 'numbers'."
        yield "target_column", "a class is one column", remedy
    of_table = own and not is_own(data.dataset)
    if of_table and data.private and in_classes and data.classes is None:
        yield "classes", NUMBERED_ALIKE, "Set their number, or list their names."
    if own and not csv and isinstance(data.classes, list):
        yield "classes", "not a number", "Set the number of classes."


def _refused_constants(data: Data) -> Refused:
    if data.normalise == OWN and data.private:
        problem = "every device has samples of its own, and would have other constants"
        yield "normalise", problem, "List mean and deviation, the same for all."
    if isinstance(data.normalise, list) and not _are_constants(data.normalise):
        problem = "not two lists of one length, of deviations that are not 0"
        yield "normalise", problem, "Write for instance [[0.5], [0.5]]."


def _are_constants(given: list[list[float]]) -> bool:
    if len(given) != 2:
        return False
    mean, deviation = given
    return 0 < len(mean) == len(deviation) and all(deviation)


def _check_named(key: str, name: str, known: Collection[str], *, what: str) -> None:
    if is_own(name):
        own.check_form(key, name, OWN_FORM, "Write for instance nets.own:build.")
    elif name not in known:
        remedy = proposal(name, [*known, OWN_FORM], what="There are")
        raise InvalidExperiment(key, name, f"no such {what}", remedy)


def root_below(data: Data, node: str, *, allowed: Path) -> str:
    """Return where a host reads the data of another's experiment. Raises InvalidExperiment.

    `allowed`: the folder of which it may read, to which `data.root` is relative.
    """
    if data.dataset not in (*FOLDERS, "folder") and not _own(data):
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
    """Compare digests of two splits, the cloud's "" where it has none. Raises InvalidExperiment."""
    if clouds and partition != clouds:
        digests = f"digest {partition} instead of {clouds}"
        problem = f"{node} splits the data differently than the cloud: {digests}"
        remedy = "Give all nodes the same files (see `fedstrata data check`) and the same release"
        at = "data.root"
        raise InvalidExperiment(at, data.root, problem, f"{remedy} of fedstrata and numpy.")
