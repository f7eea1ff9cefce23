"""The data sets that fedstrata knows by name, and whether their files are there.

- the digits that come with fedstrata, and synthetic images of any size
- MNIST's format: `<root>/<name>/raw/train-images-idx3-ubyte` etc., or .gz
- CIFAR's Python version, pickles: `<root>/cifar-10-batches-py/data_batch_1` ..., `<root>/cifar-100-python/train`
- motions of a watch: `<root>/motions/watch_dataset.npy`, or that of the installed package seglearn
- LEAF's JSON: FEMNIST, Shakespeare, Sent140, as `<root>/<name>/data/{train,test}/*.json`

A file of LEAF is {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}. `num_samples`
is ignored: in Shakespeare's test files it exceeds the actual numbers. Files are read one at a time, in any order. Users
are sorted; those without training samples have no device.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment
from common.experiment.data import FOLDERS, Data, seglearn_file
from common.experiment.topology import CLOUD
from common.learning.readers.parts import MOST_BYTES, Labels, Parts, Samples
from common.randomness import Purpose, generator

DIGITS = Path(__file__).with_name("digits.csv.gz")
DIGITS_TEST = 359
SHAPE = (3, 32, 32)
CIFAR: Final = {  # its files: those for training, then that for testing
    "cifar10": (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    "cifar100": ("train", "test"),
}
GROUPS = {"fine": 100, "coarse": 20}
MAX_BYTES = 1 << 30

# In LEAF's order; every other character is read as a space.
ALPHABET: Final = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
CHARACTERS: Final = 80  # per text of Shakespeare; by chance also the size of the alphabet
WORDS: Final = 25
TEXT: Final = 4  # index of the text in a tweet: id, date, query, user, text, source
OPTIONS: Final = {
    "femnist": "-s niid --sf 0.05 -k 100 -t sample",
    "shakespeare": "-s niid --sf 1.0 -k 0 -t sample -tf 0.8",
    "sent140": "-s niid --sf 1.0 -k 0 -t sample",
}

MOTIONS: Final = "watch_dataset.npy"
WINDOW: Final = 128  # of 50 samples a second
STEP: Final = 64  # from one window to the next
TRAIN_SHARE: Final = 0.8  # of each recording: its beginning

_Token = re.compile(r"[\w']+|[.,!?;]")
Encode = Callable[[list[Any]], Samples]


def check_files(data: Data, *, node: str = CLOUD) -> None:
    """Raise InvalidExperiment, as the reader does, if a node's files are missing."""
    name, root = data.dataset, Path(data.root.replace("{node}", node))
    if name in ("mnist", "fashionmnist"):
        _find_mnist_like(root, FOLDERS[name])
    elif name in CIFAR:
        _find_cifar(root, name)
    elif name == "motions":
        _find_motions(root)
    elif name in ("femnist", "shakespeare", "sent140"):
        for part in ("train", "test"):
            _leaf_paths(root, name, part)
    elif name == "folder" and not (folder := root / ("test" if node == CLOUD else "train")).is_dir():
        problem, remedy = f"not found: {folder.absolute()}", "Put this node's own images there."
        raise InvalidExperiment("data.root", str(root), problem, remedy)


def read_digits() -> Parts:
    """Split the digits by class, always in the same way: the test set must not depend on the run's seed.

    The file is scikit-learn's copy of the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
    C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0): 1,797 rows of 64 pixels in 0 to 16 and the class.
    """
    rows = np.loadtxt(DIGITS, np.uint8, delimiter=",")
    images = rows[:, :64].reshape(-1, 1, 8, 8)
    labels = rows[:, 64].astype(np.int64)
    order = generator(0, Purpose.PARTITION, "digits").permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # Sorted by class, the i-th of n samples is for testing where i * DIGITS_TEST / n passes an integer.
    passed = np.arange(len(order) + 1) * DIGITS_TEST // len(order)
    is_test = np.diff(passed) > 0
    train, test = np.sort(order[~is_test]), np.sort(order[is_test])
    return Parts(images[train], labels[train], images[test], labels[test], classes=10)


def make_synthetic(data: Data) -> Parts:
    """Generate images for benchmarks: a pattern per class plus noise, the classes in turn.

    They are the same for every seed of an experiment, and a prefix of a larger set. Raises InvalidExperiment.
    """
    shape, classes = tuple(data.image_shape), data.classes if isinstance(data.classes, int) else 0
    images = data.samples + data.test_samples + classes
    if (size := images * prod(shape)) > MOST_BYTES:
        problem = f"{images} images and patterns of {list(shape)} take {size / 1e9:.0f} GB"
        raise InvalidExperiment("data.samples", data.samples, problem, "Use fewer or smaller images.")
    patterns = generator(0, Purpose.PARTITION, "synthetic").integers(0, 128, (classes, *shape), np.uint8)

    def part(name: str, samples: int) -> tuple[npt.NDArray[np.uint8], Labels]:
        labels = np.arange(samples, dtype=np.int64) % classes
        images = generator(0, Purpose.PARTITION, name).integers(0, 128, (samples, *shape), np.uint8)
        for start in range(0, samples, 4096):  # all patterns at once would double the memory
            images[start : start + 4096] += patterns[labels[start : start + 4096]]
        return images, labels

    return Parts(*part("synthetic train", data.samples), *part("synthetic test", data.test_samples), classes=classes)


def read_mnist_like(root: Path, folder: str) -> Parts:
    """Read the four files. Raises InvalidExperiment."""
    paths = _find_mnist_like(root, folder)
    train, labels, test, test_labels = (_idx_array(path, 3 if "images" in path.name else 1) for path in paths)
    return Parts(train[:, None], labels.astype(np.int64), test[:, None], test_labels.astype(np.int64), classes=10)


def _find_mnist_like(root: Path, folder: str) -> list[Path]:
    raw = root / folder / "raw"
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return _find(root, [(raw / name, raw / f"{name}.gz") for name in names], fetch=_torchvision_fetches(root, folder))


def _idx_array(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or .gz, with this number of dimensions.

    Format: two zero bytes, 0x08 for uint8, the number of dimensions; each dimension as a big-endian uint32; the bytes
    in row-major order. Raises InvalidExperiment.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if magic != bytes((0, 0, 8, dimensions)):
                raise _damaged(path, f"begins with {magic.hex() or 'nothing'}, not 0000080{dimensions}")
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise _damaged(path, "ends inside its header")
            shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
            size = prod(shape)
            if size > MAX_BYTES:
                raise _damaged(path, f"claims {size} bytes of data")
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f"cannot be read ({error})") from None
    if len(body) != size:
        raise _damaged(path, f"holds {'more' if len(body) > size else len(body)} than the {size} bytes it announces")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()


def read_cifar10(root: Path) -> Parts:
    """Read the five training batches and the test batch. Raises InvalidExperiment."""
    *train, (test, test_labels) = (_cifar_batch(path, "labels") for path in _find_cifar(root, "cifar10"))
    images, labels = np.concatenate([batch[0] for batch in train]), np.concatenate([batch[1] for batch in train])
    return Parts(images, labels, test, test_labels, classes=10)


def read_cifar100(root: Path, *, labels: str) -> Parts:
    """Read with the `fine` labels, 100 classes, or the `coarse` ones, their 20 groups. Raises InvalidExperiment."""
    (train, train_labels), (test, test_labels) = (
        _cifar_batch(path, f"{labels}_labels") for path in _find_cifar(root, "cifar100")
    )
    return Parts(train, train_labels, test, test_labels, classes=GROUPS[labels])


def _find_cifar(root: Path, name: str) -> list[Path]:
    files = [(root / FOLDERS[name] / file,) for file in CIFAR[name]]
    return _find(root, files, fetch=_torchvision_fetches(root, name.upper()))


def _cifar_batch(path: Path, key: str) -> tuple[npt.NDArray[np.uint8], Labels]:
    """Read one batch: images uint8 [N, 3, 32, 32] and the labels under the key, int64 [N].

    Raises InvalidExperiment, also if the pickle refers to anything but arrays.
    """
    try:
        with path.open("rb") as file:
            # Written by Python 2, whose strings, including the pixels, are bytes: numpy expects latin1.
            batch = _ArraysOnly(file, encoding="latin1").load()
        images, labels = np.asarray(batch["data"]), np.asarray(batch[key])
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise _damaged(path, f"is not a CIFAR batch ({type(error).__name__}: {error})") from None
    if images.dtype != np.uint8 or images.shape != (len(labels), prod(SHAPE)) or labels.dtype.kind != "i":
        raise _damaged(path, f"holds data {images.dtype} {images.shape} and {key} {labels.dtype} {labels.shape}")
    return images.reshape(-1, *SHAPE), labels.astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for numpy arrays and Python's basic containers that rejects every other class or function."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("_codecs", "encode"):  # Python 2's bytes, as protocols before 3 have them
            return _latin1
        if module_name in ("numpy.core.multiarray", "numpy._core.multiarray") and global_name == "_reconstruct":
            return np.ndarray(0).__reduce__()[0]  # its module differs between versions of numpy
        if module_name == "numpy" and global_name in ("ndarray", "dtype"):
            return getattr(np, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the encoding {encoding} is not allowed")
    return text.encode("latin1")


def read_motions(root: Path) -> Parts:
    """Read windows of a watch's motions, float32 [N, 6, 1, 128]: acceleration and rotation in three axes, 50 a second.

    140 recordings of ten people, each exercising a shoulder in seven ways on both sides (D. Burns et al. 2018, of the
    package seglearn, BSD). Windows of the first four fifths of a recording are for training, those of the rest for
    testing. The people are the users. Raises InvalidExperiment.
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
        if not len(recordings) == len(labels) == len(people) or any(each.shape[1:] != (6,) for each in recordings):
            raise ValueError("its recordings are not of six columns, with a label and a subject each")
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise _damaged(path, f"is not seglearn's ({type(error).__name__}: {error})") from None
    numbers = sorted(set(people.tolist()))
    parts: dict[str, list[tuple[Samples, int, int]]] = {"train": [], "test": []}
    for motion, label, person in zip(recordings, labels.tolist(), people.tolist(), strict=True):
        end = int(TRAIN_SHARE * len(motion))
        for name, piece in (("train", motion[:end]), ("test", motion[end:])):
            parts[name].append((windows(piece), label, numbers.index(person)))
    (train, train_labels, owners), (test, test_labels, testers) = (_joined(each) for each in parts.values())
    users = tuple(f"{number:02d}" for number in numbers)
    return Parts(train, train_labels, test, test_labels, classes=7, users=users, owners=owners, test_owners=testers)


def _find_motions(root: Path) -> Path:
    installed = seglearn_file()
    places = [root / FOLDERS["motions"] / MOTIONS, *([installed] if installed is not None else [])]
    return _find(root, [places], fetch="pip install seglearn, on each host that reads it")[0]


def windows(motion: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a recording, float32 [T, 6], as windows that overlap by half, [N, 6, 1, 128]."""
    if len(motion) < WINDOW:
        return np.empty((0, motion.shape[1], 1, WINDOW), np.float32)
    found = np.lib.stride_tricks.sliding_window_view(motion, WINDOW, axis=0)[::STEP]
    return np.ascontiguousarray(found)[:, :, None]


def _joined(pieces: Sequence[tuple[Samples, int, int]]) -> tuple[Samples, Labels, Labels]:
    """Return the windows of recordings with the label and the owner of each."""
    counts = [len(found) for found, _, _ in pieces]
    labels, owners = (np.repeat(np.array([piece[i] for piece in pieces]), counts) for i in (1, 2))
    return np.concatenate([found for found, _, _ in pieces]), labels.astype(np.int64), owners.astype(np.int64)


def read_femnist(root: Path) -> Parts:
    """Read images uint8 [N, 1, 28, 28], white paper = 255; 62 classes: digits, A-Z, a-z. Raises InvalidExperiment."""
    return _read_leaf(root, "femnist", encode=_pixels, labels=_numbers, classes=62, tokens=0)


def read_shakespeare(root: Path) -> Parts:
    """Read texts of 80 characters as int64 [N, 80], labelled with the next character. Raises InvalidExperiment."""
    tokens = len(ALPHABET)
    return _read_leaf(root, "shakespeare", encode=_characters, labels=_next, classes=tokens, tokens=tokens)


def read_sent140(root: Path) -> Parts:
    """Read the first 25 words and punctuation marks as int64 [N, 25]; labels 1 = positive. Raises InvalidExperiment.

    With V words in the vocabulary, V is the value of every other word and of the padding of short texts.
    """
    fetch = f"{_fetch_leaf('sent140')} && cd ../../models/sent140 && ./get_embs.sh"
    where = [root / "sent140" / "embs.json", root.parent / "models" / "sent140" / "embs.json"]
    places = _vocabulary(_find(root, [where], fetch=fetch)[0])

    def words(x: list[Any]) -> Samples:
        rows = np.full((len(x), WORDS), len(places), np.int64)
        for row, tweet in zip(rows, x, strict=True):
            found = [places.get(word, len(places)) for word in _Token.findall(tweet[TEXT])[:WORDS]]
            row[: len(found)] = found
        return rows

    return _read_leaf(root, "sent140", encode=words, labels=_numbers, classes=2, tokens=len(places) + 1)


def _read_leaf(root: Path, name: str, *, encode: Encode, labels: Encode, classes: int, tokens: int) -> Parts:
    train, test = (_merge_leaf(root, name, part, encode=encode, labels=labels) for part in ("train", "test"))
    users = tuple(sorted(train))
    places = {user: place for place, user in enumerate(users)}
    owners, testers = (
        np.repeat([places.get(user, -1) for user in sorted(part)], [len(part[user][1]) for user in sorted(part)])
        for part in (train, test)
    )
    return Parts(
        *_join(train), *_join(test), classes=classes, tokens=tokens, users=users, owners=owners, test_owners=testers
    )


def _join(users: Mapping[str, tuple[Samples, Labels]]) -> tuple[Samples, Labels]:
    ordered = [users[user] for user in sorted(users)]
    return np.concatenate([x for x, _ in ordered]), np.concatenate([y for _, y in ordered])


def _merge_leaf(
    root: Path, name: str, part: str, *, encode: Encode, labels: Encode
) -> dict[str, tuple[Samples, Labels]]:
    """Return each user's samples and labels from all files of `train` or `test`."""
    paths = _leaf_paths(root, name, part)
    merged: dict[str, tuple[Samples, Labels]] = {}
    for path in paths:
        for user, (x, y) in _leaf_users(path).items():
            if user in merged:
                raise _damaged(path, f"has the user {user!r}, which is also in another file beside it")
            try:
                samples, wanted = encode(x), labels(y).astype(np.int64)
            except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
                raise _damaged(path, f"has a sample of {user!r} that does not fit {name} ({error})") from None
            if len(x):
                merged[user] = (samples, wanted)
    if not merged:
        raise _damaged(paths[0], "and those beside it have no sample")
    return merged


def _leaf_paths(root: Path, name: str, part: str) -> list[Path]:
    folder = root / name / "data" / part
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise _missing(root, f"{folder.absolute()}/*.json", fetch=_fetch_leaf(name))
    return paths


def _leaf_users(path: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    try:
        # Pixels have few values: one shared object per value needs a quarter of the memory.
        tree = json.loads(path.read_text(encoding="utf-8"), parse_float=lru_cache(maxsize=1 << 16)(float))
        users = {user: (own["x"], own["y"]) for user, own in tree["user_data"].items()}
        listed = set(tree["users"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"is not one of LEAF's files ({type(error).__name__}: {error})") from None
    if listed != set(users):
        raise _damaged(path, f"lists {len(listed)} users and holds the data of {len(users)}")
    for user, (x, y) in users.items():
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise _damaged(path, f"has not as many x as y of the user {user!r}")
    return users


def _pixels(x: list[Any]) -> Samples:
    pixels = np.asarray(x, np.float64).reshape(len(x), 1, 28, 28)
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError("a pixel is not between 0 and 1")
    return np.rint(pixels * 255).astype(np.uint8)  # LEAF divided bytes by 255


def _numbers(y: list[Any]) -> Samples:
    labels = np.asarray(y, dtype=None if y else np.int64)
    if labels.dtype.kind != "i" or labels.ndim != 1:
        raise ValueError("a label is not a whole number")
    return labels.astype(np.int64)


def _characters(x: list[Any], length: int = CHARACTERS) -> Samples:
    if any(len(row) != length for row in x):
        raise ValueError(f"a text is not of {length} characters")
    codes = np.frombuffer("".join(x).encode("utf-32-le", "surrogatepass"), np.uint32)
    table = np.full(128, ALPHABET.index(" "), np.int64)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return table[np.where(codes < 128, codes, ord(" "))].reshape(len(x), length)


def _next(y: list[Any]) -> Samples:
    return _characters(y, 1)[:, 0]


def _vocabulary(path: Path) -> dict[str, int]:
    """Return the index of each word. `vocab` precedes gigabytes of vectors (`emba`), which are not read."""
    text = ""
    try:
        with path.open(encoding="utf-8") as file:
            while more := file.read(1 << 24):
                text += more
                start = text.find("[", text.find('"vocab"')) if '"vocab"' in text else -1
                try:
                    words = json.JSONDecoder().raw_decode(text, start)[0] if start >= 0 else None
                except json.JSONDecodeError:
                    continue  # the list continues in the next block
                if words and all(isinstance(word, str) for word in words):
                    return {word: place for place, word in enumerate(dict.fromkeys(words))}
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"cannot be read ({error})") from None
    raise _damaged(path, 'has no list of words under "vocab"')


def _fetch_leaf(name: str) -> str:
    clone = "git clone https://github.com/TalwalkarLab/leaf"
    return f"{clone} && cd leaf/data/{name} && ./preprocess.sh {OPTIONS[name]} (then data.root = 'leaf/data')"


def _find(root: Path, candidates: Sequence[Sequence[Path]], *, fetch: str) -> list[Path]:
    """Return the first existing path of each group. Raises InvalidExperiment naming all groups without one."""
    found = [next((path for path in group if path.is_file()), None) for group in candidates]
    lacking = [group for group, path in zip(candidates, found, strict=True) if path is None]
    if lacking:
        names = ", ".join(" or ".join(str(path.absolute()) for path in group) for group in lacking)
        raise _missing(root, names, fetch=fetch)
    return [path for path in found if path is not None]


def _missing(root: Path, names: str, *, fetch: str) -> InvalidExperiment:
    """Return the error for missing files; `fetch` is the command that fetches them."""
    return InvalidExperiment("data.root", str(root), f"not found: {names}", f"To fetch them: {fetch}")


def _damaged(path: Path, problem: str) -> InvalidExperiment:
    """Return the error for a file with invalid content."""
    return InvalidExperiment("data.root", str(path), f"this file {problem}", "Delete it and fetch it again.")


def _torchvision_fetches(root: Path, dataset: str) -> str:
    """Return the command that fetches a data set of `torchvision.datasets`."""
    return f'python -c "import torchvision; torchvision.datasets.{dataset}({str(root)!r}, download=True)"'
