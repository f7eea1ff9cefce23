"""Data sets, loaded once per process: images as uint8, or float32 with added noise; text as int64.

fedstrata never downloads data: the files are expected below `data.root`, where torchvision or LEAF
put them (`readers/` has each layout). The processes of a host share larger data sets (`stored.py`).

Normalised pixels are (pixel * scale - mean) / deviation, with constants for each channel, or
feature. One that never changes has the deviation 1: that of its rounding errors would make any
other value enormous.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.learning import readers, stored, users
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.readers import builtin, folder, leaf
from fedstrata.common.learning.readers.reader_result import (
    Labels,
    Parts,
    Samples,
    Targets,
    read_own,
    some,
)
from fedstrata.common.learning.readers.table_files import read_csv, read_npz
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.data import (
    FOLDERS,
    NONE,
    NUMBERS,
    OWN,
    PUBLISHED,
    WITH_USERS,
    Data,
    is_csv,
    is_table,
)
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.topology import CLOUD

Constants: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
Normalise = Callable[[Tensor], Tensor]
BLOCK_SAMPLES: Final = 1_000  # converted to float64 at once
# significant ones, as published constants have: sums differ in the last bits between machines
DIGITS: Final = 4
# the deviation, as a part of the mean, up to which it is float32's rounding alone
ROUNDING: Final = 2.0**-23

# Keys that determine the split, or how samples are normalised, not the samples.
_NOT_OF_SAMPLES: Final = {
    "root",
    "partition",
    "concentration",
    "shards",
    "within",
    "within_concentration",
    "min_samples",
    "partition_size",
    "node_samples",
    "bins",
    "normalise",
}


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Normalisation of raw samples on one device: value * factor + offset, per channel or
    feature.
    """

    factor: Tensor
    offset: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Return uint8 or float32 [B, C, ...] as normalised float32 of the same shape, on the same
        device.
        """
        return images.mul(self.factor).add_(self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Samples and labels, int64 [N] or float32 [N, T], all on the CPU and shared: never write into
    them.

    Samples are images, uint8 or, with noise, float32 [N, C, H, W]; or texts, uint8, int32 or int64
    [N, L], with values below `tokens` (0 = images); or of tables and own data float32 [N, ...].
    `scale` maps a pixel into [0,
    1]; `mean` and `std` are per channel or feature, or one for all, after scaling
    (`data.normalise`). If the samples have users, `owners` int64 [N] are the indices in `users` of
    the training samples' users, and if they have some `test_owners` of the test samples', -1 for
    one without training samples. `notes`: what the user should know of the files, a line each; one
    node of a run shows them.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokens: int = 0
    users: tuple[str, ...] = ()
    owners: Labels | None = None
    notes: tuple[str, ...] = ()
    test_owners: Labels | None = None

    @property
    def inputs(self) -> Inputs:
        """The shape of a sample and the number of classes."""
        numbers = self.train_labels.is_floating_point()
        return Inputs(tuple(self.train_images.shape[1:]), self.classes, self.tokens, numbers)

    def normaliser(self, device: torch.device | str = "cpu") -> Normalise:
        """Return (pixel * scale - mean) / std as a function for images on the device; texts become
        int64.

        It returns new tensors always: a user's own model may write into what it is given.
        """
        if self.tokens:
            return partial(torch.Tensor.to, dtype=torch.int64, copy=True)
        if (self.scale, self.mean, self.std) == (_AS_IT_IS.scale, _AS_IT_IS.mean, _AS_IT_IS.std):
            return torch.clone
        mean = torch.tensor(self.mean, dtype=torch.float64)
        std = torch.tensor(self.std, dtype=torch.float64)
        factor = self.scale / std
        offset = -mean / std
        shape = (len(self.mean), *(1 for _ in self.inputs.shape[1:]))
        return Normaliser(
            factor.to(device, torch.float32).reshape(shape),
            offset.to(device, torch.float32).reshape(shape),
        )


def load(data: Data, *, node: str = CLOUD) -> Dataset:
    """Return the node's data set; callers in this process with the same files share one object.

    Of private data a device has only training samples, the cloud only test samples. Raises
    InvalidExperiment naming the files that are missing or damaged, and the command that fetches
    them.
    """
    root = data.root.replace("{node}", node)
    reader = CLOUD if not data.private or node == CLOUD else node if is_own(data.dataset) else ""
    with _LOADING:
        return _load(data.model_dump_json(), root, reader)


# lru_cache alone would allow several devices to load the same files at once
_LOADING = threading.Lock()


@lru_cache(maxsize=2)
def _load(data_json: str, root: str, reader: str) -> Dataset:
    """`reader`: the node that reads, "" for any device."""
    data = Data.model_validate_json(data_json)
    place = Path(root)
    files = list(_files(data, place, reader))
    make = partial(_make_stored, data, place, reader)
    if _size(data, files) < stored.SMALL_BYTES:
        return _dataset(data, make())
    return _dataset(data, stored.shared(_digest(data, files, reader), make))


def load_user(
    data: Data, user: int, *, devices: int, node: str = CLOUD
) -> tuple[Dataset, str] | None:
    """Return the samples of one user alone, and the digest of the split of the first users, one for
    each of `devices`.

    None for a small set, and where they need the samples of others, too: `load` has all. Raises
    InvalidExperiment.
    """
    if data.dataset not in WITH_USERS or data.partition != "natural" or data.node_samples:
        return None
    if data.normalise == OWN or data.noise:
        return None
    root = Path(data.root.replace("{node}", node))
    files = list(_files(data, root, CLOUD))
    if _size(data, files) < stored.SMALL_BYTES:
        return None
    path = stored.file_of(_digest(data, files, CLOUD), partial(_make_stored, data, root, CLOUD))
    try:
        if path is None or (found := users.read(path, user)) is None:
            return None
        digest = users.split_digest(path, devices)
    except (OSError, SafetensorError, ValueError, KeyError, IndexError):
        return None  # `load` creates a damaged file again
    tensors, facts = found
    alone = stored.Stored(tensors, {**facts, "users": [facts["users"][user]], "notes": []})
    if digest is None:
        return None
    return (_dataset(data, alone), digest)


def _digest(data: Data, files: list[Path], reader: str) -> str:
    """Return the digest of a stored set."""
    what = data.model_dump(mode="json", exclude=_NOT_OF_SAMPLES)
    # another release may read the files differently
    code = Path(readers.__file__).parent.rglob("*.py")
    return stored.digest_of([what, reader, np.__version__], [*files, *code])


def _files(data: Data, root: Path, reader: str) -> Iterator[Path]:
    """Yield the files of a data set."""
    if data.dataset == "folder":
        for part in _image_parts(data, reader):
            found = folder.files_of(root / part, _names(data))
            yield from (
                path for path in (*chain(*found.images.values()), *found.others) if path.is_file()
            )
    elif is_table(data.dataset):
        yield from (
            path
            for name in (data.dataset, data.test_file)
            if name and (path := root / name).is_file()
        )
    elif data.dataset in FOLDERS:
        yield from (path for path in (root / FOLDERS[data.dataset]).rglob("*") if path.is_file())
    if data.dataset == "sent140":
        yield from (root.parent / "models" / "sent140").glob("embs.json")


def _size(data: Data, files: list[Path]) -> int:
    """Return the approximate size of a data set in bytes, without reading it."""
    if data.dataset == "synthetic":
        return (data.samples + data.test_samples) * prod(data.image_shape)
    return sum(path.stat().st_size for path in files)


def _make_stored(data: Data, root: Path, reader: str) -> stored.Stored:
    """Read and check a data set."""
    source = _source(data)
    parts = source.read(data, root, reader)
    cloud = reader == CLOUD  # every node has only training or only test samples of private data
    _check(
        data,
        parts.train,
        parts.train_labels,
        classes=parts.classes,
        needed=not (data.private and cloud),
    )
    _check(
        data, parts.test, parts.test_labels, classes=parts.classes, needed=not data.private or cloud
    )
    tensors = {
        "train": _noisy(parts.train, data.noise / source.scale, f"{data.dataset}/train"),
        "train_labels": torch.from_numpy(parts.train_labels),
        "test": _noisy(parts.test, data.noise / source.scale, f"{data.dataset}/test"),
        "test_labels": torch.from_numpy(parts.test_labels),
    }
    for name, owners in zip(users.OWNERS, (parts.owners, parts.test_owners), strict=True):
        if owners is not None:
            tensors[name] = torch.from_numpy(owners)
    notes = [*parts.notes, *_unlearned(data, parts)]
    facts = {"classes": parts.classes, "tokens": parts.tokens, "users": parts.users, "notes": notes}
    facts[users.SPANS] = users.spans_of(tensors, len(parts.users))
    return stored.Stored(tensors, facts)


def _dataset(data: Data, made: stored.Stored) -> Dataset:
    tensors = made.tensors
    floats = tensors["train"].is_floating_point()
    if floats and (is_own(data.dataset) or is_table(data.dataset)):
        source = _AS_IT_IS
    else:
        source = _source(data)
    found = {name: tensors[name].numpy() for name in users.OWNERS if name in tensors}
    owners, test_owners = map(found.get, users.OWNERS)
    published = source.mean, source.std
    samples = tensors["train"] if len(tensors["train"]) else tensors["test"]
    mean, std = constants_of(data, samples, scale=source.scale, published=published)
    return Dataset(
        tensors["train"],
        tensors["train_labels"],
        tensors["test"],
        tensors["test_labels"],
        made.facts["classes"],
        source.scale,
        mean,
        std,
        made.facts["tokens"],
        tuple(made.facts["users"]),
        owners,
        tuple(made.facts["notes"]),
        test_owners,
    )


def constants_of(data: Data, samples: Tensor, *, scale: float, published: Constants) -> Constants:
    """Return mean and deviation by `data.normalise`; `samples` [N, C, ...] are those for training,
    if there are any.

    Raises InvalidExperiment.
    """
    if data.normalise == PUBLISHED:
        return published
    if data.normalise == NONE:
        return (0.0,), (1.0,)
    if data.normalise == OWN:
        return own_constants(samples, scale=scale)
    mean, deviation = (tuple(map(float, each)) for each in data.normalise)
    channels = samples.shape[1]
    if len(mean) not in (1, channels):
        problem = f"the samples have {channels} channels or features"
        raise InvalidExperiment(
            "data.normalise", data.normalise, problem, f"List one number, or {channels}."
        )
    return mean, deviation


def own_constants(train: Tensor, *, scale: float) -> Constants:
    """Return mean and deviation over all samples and places, of each channel [C], to DIGITS digits.

    A mean that is large beside its deviation has as many more digits as it needs.
    """
    count = train[:, 0].numel()
    total, square = torch.zeros(2, train.shape[1], dtype=torch.float64)
    for block in _blocks(train):
        total += block.sum((0, 2))
    mean = total / count
    for block in _blocks(train):
        square += block.sub_(mean[:, None]).square_().sum((0, 2))
    deviation = (square / count).sqrt()
    deviation[deviation <= ROUNDING * mean.abs()] = 1 / scale
    pairs = zip((mean * scale).tolist(), (deviation * scale).tolist(), strict=True)
    means, deviations = zip(*(_rounded(*pair) for pair in pairs), strict=True)
    return means, deviations


def _rounded(mean: float, deviation: float) -> tuple[float, float]:
    more = max(0, math.floor(math.log10(abs(mean) / deviation))) if mean else 0
    return float(f"{mean:.{DIGITS + more}g}"), float(f"{deviation:.{DIGITS}g}")


def _blocks(train: Tensor) -> Iterator[Tensor]:
    """Yield blocks of the samples, float64 [n, C, places]."""
    return (
        block.double().reshape(len(block), block.shape[1], -1)
        for block in torch.split(train, BLOCK_SAMPLES)
    )


def _source(data: Data) -> _Source:
    if is_table(data.dataset):
        if is_csv(data.dataset):
            return _CSV
        return _NPZ
    return _SOURCES.get(data.dataset, _OWN)


def _noisy(samples: Samples, deviation: float, name: str) -> Tensor:
    """Return images with Gaussian noise that is always the same: it belongs to the data, not to a
    run's seed.

    Values are not clipped, so a pixel may leave its range.
    """
    if not deviation:
        return torch.from_numpy(samples)
    noise = generator(0, Purpose.NOISE, name).standard_normal(samples.shape, np.float32)
    noise *= np.float32(deviation)
    noise += samples
    return torch.from_numpy(noise)


def _check(data: Data, samples: Samples, labels: Targets, *, classes: int, needed: bool) -> None:
    right = len(samples) == len(labels) and (len(labels) > 0 or not needed)
    numbers = data.targets == NUMBERS
    if not right or (len(labels) and not numbers and (labels.min() < 0 or labels.max() >= classes)):
        if numbers:
            problem = f"{data.dataset} has {len(samples)} samples, and {len(labels)} targets"
            raise InvalidExperiment("data.root", data.root, problem, "Give this node some.")
        wrong = np.flatnonzero((labels < 0) | (labels >= classes))[:1].tolist()
        which = f", and are {labels[wrong[0]]} too" if wrong else ""
        problem = (
            f"{data.dataset} has {len(samples)} samples, and {len(labels)} labels that "
            "should be 0 to"
        )
        if is_own(data.dataset) or is_table(data.dataset):
            remedy = "Correct the targets."
        else:
            remedy = "Fetch the files again."
        raise InvalidExperiment("data.root", data.root, f"{problem} {classes - 1}{which}", remedy)


def _unlearned(data: Data, parts: Parts) -> list[str]:
    """Return a line if test samples have classes that no training sample has, and one for the
    reverse.
    """
    if data.private or data.targets == NUMBERS:
        return []
    train = np.bincount(parts.train_labels, minlength=parts.classes)
    test = np.bincount(parts.test_labels, minlength=parts.classes)
    lines = []
    for lacking, having, one, other in (
        (train, test, "training", "test"),
        (test, train, "test", "training"),
    ):
        found: list[Any] = np.flatnonzero((lacking == 0) & (having > 0)).tolist()
        if found and len(parts.names) == parts.classes:
            found = [repr(parts.names[label]) for label in found]
        if found:
            problem = f"no {one} sample has these classes of the {other} samples"
            lines.append(f"{data.dataset}: {problem}: {some(found)}")
    return lines


def _own_images(data: Data, root: Path, reader: str) -> Parts:
    shape = tuple(data.image_shape)
    parts = _image_parts(data, reader)
    return folder.read_folder(root, classes=_names(data), shape=shape, parts=parts)


def _image_parts(data: Data, reader: str) -> tuple[str, ...]:
    if not data.private:
        return ("train", "test")
    if reader == CLOUD:
        return ("test",)
    return ("train",)


def _names(data: Data) -> list[str]:
    if isinstance(data.classes, list):
        return data.classes
    return []


@dataclass(frozen=True, slots=True)
class _Source:
    """The reader of a data set (its last argument: the node that reads), and the scaling of its
    pixels.
    """

    read: Callable[[Data, Path, str], Parts]
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


_OWN = _Source(read_own)
_CSV = _Source(lambda data, root, reader: read_csv(data, root, test=reader == CLOUD))
_NPZ = _Source(lambda data, root, reader: read_npz(data, root, test=reader == CLOUD))
_AS_IT_IS = _Source(_OWN.read, 1.0, (0.0,), (1.0,))
_GREY: Final = 1 / 255, (0.1307,), (0.3081,)  # of MNIST and FashionMNIST
_SOURCES = MappingProxyType(
    {
        "digits": _Source(lambda *_: builtin.read_digits(), 1 / 16, (0.305,), (0.376,)),
        "mnist": _Source(lambda _, root, __: builtin.read_mnist_like(root, "MNIST"), *_GREY),
        "fashionmnist": _Source(
            lambda _, root, __: builtin.read_mnist_like(root, "FashionMNIST"), *_GREY
        ),
        "cifar10": _Source(
            lambda _, root, __: builtin.read_cifar10(root),
            1 / 255,
            (0.5, 0.5, 0.5),
            (0.5, 0.5, 0.5),
        ),
        "cifar100": _Source(
            lambda data, root, _: builtin.read_cifar100(root, labels=data.labels),
            1 / 255,
            (0.4914, 0.4822, 0.4465),
            (0.2023, 0.1994, 0.2010),
        ),
        # (0.5 - x) / 0.5 as in FedCross's code: ink is 1, paper -1.
        "femnist": _Source(lambda _, root, __: leaf.read_femnist(root), 1 / 255, (0.5,), (-0.5,)),
        "shakespeare": _Source(lambda _, root, __: leaf.read_shakespeare(root)),
        "sent140": _Source(lambda _, root, __: leaf.read_sent140(root)),
        "motions": _Source(
            lambda _, root, __: builtin.read_motions(root),
            1.0,
            (-0.00636, 0.3783, -0.1502, 0.02194, -0.001566, 0.0103),
            (0.898, 0.4919, 0.537, 0.9706, 2.492, 1.034),
        ),
        "folder": _Source(_own_images),
        "synthetic": _Source(lambda data, *_: builtin.make_synthetic(data)),
    }
)
