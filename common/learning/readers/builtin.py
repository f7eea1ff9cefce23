"""The data sets that fedstrata knows by name, and whether their files are there.

- the digits that come with fedstrata, and synthetic images of any size
- MNIST's format: `<root>/<name>/raw/train-images-idx3-ubyte` etc., or .gz
- CIFAR's Python version, pickles: `<root>/cifar-10-batches-py/data_batch_1` ...,
  `<root>/cifar-100-python/train`
- motions of a watch: `<root>/motions/watch_dataset.npy`, or that of the installed package seglearn
- LEAF's JSON: FEMNIST, Shakespeare, Sent140 (`leaf.py`)
"""

from __future__ import annotations

import gzip
import pickle
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.learning.readers import leaf
from fedstrata.common.learning.readers.data_files import damaged, find
from fedstrata.common.learning.readers.reader_result import MOST_BYTES, Labels, Parts, Samples
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.data import FOLDERS, Data, seglearn_file
from fedstrata.common.settings.topology import CLOUD

DIGITS = Path(__file__).with_name("digits.csv.gz")
DIGITS_TEST = 359
SHAPE = (3, 32, 32)
CIFAR: Final = {  # its files: those for training, then that for testing
    "cifar10": (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    "cifar100": ("train", "test"),
}
GROUPS = {"fine": 100, "coarse": 20}
MAX_BYTES = 1 << 30

MOTIONS: Final = "watch_dataset.npy"
WINDOW: Final = 128  # of 50 samples a second
STEP: Final = 64  # from one window to the next
TRAIN_SHARE: Final = 0.8  # of each recording: its beginning


def check_files(data: Data, *, node: str = CLOUD) -> None:
    """Raise InvalidExperiment, as the reader does, if a node's files are missing."""
    name = data.dataset
    root = Path(data.root.replace("{node}", node))
    if name in ("mnist", "fashionmnist"):
        _find_mnist_like(root, FOLDERS[name])
    elif name in CIFAR:
        _find_cifar(root, name)
    elif name == "motions":
        _find_motions(root)
    elif name in leaf.OPTIONS:
        for part in ("train", "test"):
            leaf.paths_of(root, name, part)
    elif name == "folder":
        part = "test" if node == CLOUD else "train"
        if not (root / part).is_dir():
            problem = f"not found: {(root / part).absolute()}"
            remedy = "Put this node's own images there."
            raise InvalidExperiment("data.root", str(root), problem, remedy)


def read_digits() -> Parts:
    """Split the digits by class, always in the same way: the test set must not depend on the run's
    seed.

    The file is scikit-learn's copy of the test set of "Optical Recognition of Handwritten Digits"
    (E. Alpaydin and
    C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0): 1,797 rows of 64 pixels in 0 to 16
    and the class.
    """
    rows = np.loadtxt(DIGITS, np.uint8, delimiter=",")
    images = rows[:, :64].reshape(-1, 1, 8, 8)
    labels = rows[:, 64].astype(np.int64)
    order = generator(0, Purpose.PARTITION, "digits").permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # Sorted by class, the i-th of n samples is for testing where i * DIGITS_TEST / n passes an
    # integer.
    passed = np.arange(len(order) + 1) * DIGITS_TEST // len(order)
    is_test = np.diff(passed) > 0
    train = np.sort(order[~is_test])
    test = np.sort(order[is_test])
    return Parts(images[train], labels[train], images[test], labels[test], classes=10)


def make_synthetic(data: Data) -> Parts:
    """Generate images for benchmarks: a pattern per class plus noise, the classes in turn.

    They are the same for every seed of an experiment, and a prefix of a larger set. Raises
    InvalidExperiment.
    """
    shape = tuple(data.image_shape)
    classes = data.classes if isinstance(data.classes, int) else 0
    counts = {"samples": data.samples, "test_samples": data.test_samples, "classes": classes}
    images = sum(counts.values())
    if (size := images * prod(shape)) > MOST_BYTES:
        most = max(counts, key=lambda name: counts[name])
        problem = f"{images} images and patterns of {list(shape)} take {size / 1e9:.0f} GB"
        raise InvalidExperiment(
            f"data.{most}", counts[most], problem, "Use fewer or smaller images."
        )
    patterns = generator(0, Purpose.PARTITION, "synthetic").integers(
        0, 128, (classes, *shape), np.uint8
    )

    def part(name: str, samples: int) -> tuple[npt.NDArray[np.uint8], Labels]:
        labels = np.arange(samples, dtype=np.int64) % classes
        images = generator(0, Purpose.PARTITION, name).integers(0, 128, (samples, *shape), np.uint8)
        for start in range(0, samples, 4096):  # all patterns at once would double the memory
            images[start : start + 4096] += patterns[labels[start : start + 4096]]
        return images, labels

    return Parts(
        *part("synthetic train", data.samples),
        *part("synthetic test", data.test_samples),
        classes=classes,
    )


def read_mnist_like(root: Path, folder: str) -> Parts:
    """Read the four files. Raises InvalidExperiment."""
    paths = _find_mnist_like(root, folder)
    dimensions = (3, 1, 3, 1)
    train, labels, test, test_labels = map(_idx_array, paths, dimensions)
    return Parts(
        train[:, None],
        labels.astype(np.int64),
        test[:, None],
        test_labels.astype(np.int64),
        classes=10,
    )


def _find_mnist_like(root: Path, folder: str) -> list[Path]:
    raw = root / folder / "raw"
    names = [
        f"{part}-{kind}-ubyte"
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    ]
    candidates = [(raw / name, raw / f"{name}.gz") for name in names]
    return find(root, candidates, fetch=_torchvision_fetches(root, folder))


def _idx_array(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or .gz, with this number of dimensions.

    Format: two zero bytes, 0x08 for uint8, the number of dimensions; each dimension as a big-endian
    uint32; the bytes in row-major order. Raises InvalidExperiment.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if magic != bytes((0, 0, 8, dimensions)):
                begin = magic.hex() or "nothing"
                raise damaged(path, f"begins with {begin}, not 0000080{dimensions}")
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise damaged(path, "ends inside its header")
            shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
            size = prod(shape)
            if size > MAX_BYTES:
                raise damaged(path, f"claims {size} bytes of data")
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"cannot be read ({error})") from None
    if len(body) != size:
        held = "more" if len(body) > size else str(len(body))
        raise damaged(path, f"holds {held} than the {size} bytes it announces")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()


def read_cifar10(root: Path) -> Parts:
    """Read the five training batches and the test batch. Raises InvalidExperiment."""
    *train, (test, test_labels) = (
        _cifar_batch(path, "labels") for path in _find_cifar(root, "cifar10")
    )
    images = np.concatenate([batch[0] for batch in train])
    labels = np.concatenate([batch[1] for batch in train])
    return Parts(images, labels, test, test_labels, classes=10)


def read_cifar100(root: Path, *, labels: str) -> Parts:
    """Read with the `fine` labels, 100 classes, or the `coarse` ones, their 20 groups. Raises
    InvalidExperiment.
    """
    (train, train_labels), (test, test_labels) = (
        _cifar_batch(path, f"{labels}_labels") for path in _find_cifar(root, "cifar100")
    )
    return Parts(train, train_labels, test, test_labels, classes=GROUPS[labels])


def _find_cifar(root: Path, name: str) -> list[Path]:
    files = [(root / FOLDERS[name] / file,) for file in CIFAR[name]]
    return find(root, files, fetch=_torchvision_fetches(root, name.upper()))


def _cifar_batch(path: Path, key: str) -> tuple[npt.NDArray[np.uint8], Labels]:
    """Read one batch: images uint8 [N, 3, 32, 32] and the labels under the key, int64 [N].

    Raises InvalidExperiment, also if the pickle refers to anything but arrays.
    """
    try:
        with path.open("rb") as file:
            # Written by Python 2, whose strings, including the pixels, are bytes: numpy expects
            # latin1.
            batch = _ArraysOnly(file, encoding="latin1").load()
        images = np.asarray(batch["data"])
        labels = np.asarray(batch[key])
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise damaged(path, f"is not a CIFAR batch ({type(error).__name__}: {error})") from None
    if (
        images.dtype != np.uint8
        or images.shape != (len(labels), prod(SHAPE))
        or labels.dtype.kind != "i"
    ):
        raise damaged(
            path,
            f"holds data {images.dtype} {images.shape} and {key} {labels.dtype} {labels.shape}",
        )
    return images.reshape(-1, *SHAPE), labels.astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for numpy arrays and Python's basic containers that rejects every other class or
    function.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        # Python 2's bytes, as protocols before 3 have them
        if (module_name, global_name) == ("_codecs", "encode"):
            return _latin1
        if (
            module_name in ("numpy.core.multiarray", "numpy._core.multiarray")
            and global_name == "_reconstruct"
        ):
            return np.ndarray(0).__reduce__()[0]  # its module differs between versions of numpy
        if module_name == "numpy" and global_name in ("ndarray", "dtype"):
            return getattr(np, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the encoding {encoding} is not allowed")
    return text.encode("latin1")


def read_motions(root: Path) -> Parts:
    """Read windows of a watch's motions, float32 [N, 6, 1, 128]: acceleration and rotation in three
    axes, 50 a second.

    140 recordings of ten people, each exercising a shoulder in seven ways on both sides (D. Burns
    et al. 2018, of the package seglearn, BSD). Windows of the first four fifths of a recording are
    for training, those of the rest for testing. The people are the users. Raises InvalidExperiment.
    """
    path = _find_motions(root)
    try:
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("of another version of numpy's format")
            shape, _, kind = np.lib.format.read_array_header_1_0(file)
            if shape != () or kind != np.dtype(object):
                raise ValueError(f"an array {kind} {list(shape)}")
            content = _ArraysOnly(file, encoding="latin1").load().item()
        recordings = [np.asarray(each, np.float32) for each in content["X"]]
        labels, people = (np.asarray(content[key], np.int64) for key in ("y", "subject"))
        if not len(recordings) == len(labels) == len(people) or any(
            each.shape[1:] != (6,) for each in recordings
        ):
            raise ValueError(
                "its recordings are not of six columns, with a label and a subject each"
            )
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise damaged(path, f"is not seglearn's ({type(error).__name__}: {error})") from None
    numbers = sorted(set(people.tolist()))
    parts: dict[str, list[tuple[Samples, int, int]]] = {"train": [], "test": []}
    for motion, label, person in zip(recordings, labels.tolist(), people.tolist(), strict=True):
        end = int(TRAIN_SHARE * len(motion))
        for name, piece in (("train", motion[:end]), ("test", motion[end:])):
            parts[name].append((windows(piece), label, numbers.index(person)))
    (train, train_labels, owners), (test, test_labels, testers) = (
        _joined(each) for each in parts.values()
    )
    users = tuple(f"{number:02d}" for number in numbers)
    return Parts(
        train,
        train_labels,
        test,
        test_labels,
        classes=7,
        users=users,
        owners=owners,
        test_owners=testers,
    )


def _find_motions(root: Path) -> Path:
    places = [root / FOLDERS["motions"] / MOTIONS]
    installed = seglearn_file()
    if installed is not None:
        places.append(installed)
    return find(root, [places], fetch="pip install seglearn, on each host that reads it")[0]


def windows(motion: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a recording, float32 [T, 6], as windows that overlap by half, [N, 6, 1, 128]."""
    if len(motion) < WINDOW:
        return np.empty((0, motion.shape[1], 1, WINDOW), np.float32)
    found = np.lib.stride_tricks.sliding_window_view(motion, WINDOW, axis=0)[::STEP]
    return np.ascontiguousarray(found)[:, :, None]


def _joined(pieces: Sequence[tuple[Samples, int, int]]) -> tuple[Samples, Labels, Labels]:
    """Return the windows of recordings with the label and the owner of each."""
    samples, labels, owners = zip(*pieces, strict=True)
    counts = list(map(len, samples))
    return (
        np.concatenate(samples),
        np.repeat(np.array(labels), counts).astype(np.int64),
        np.repeat(np.array(owners), counts).astype(np.int64),
    )


def _torchvision_fetches(root: Path, dataset: str) -> str:
    """Return the command that fetches a data set of `torchvision.datasets`."""
    return (
        f'python -c "import torchvision; torchvision.datasets.{dataset}({str(root)!r}, '
        'download=True)"'
    )
