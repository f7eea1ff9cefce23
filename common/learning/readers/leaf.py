"""LEAF's JSON: FEMNIST, Shakespeare, Sent140, as `<root>/<name>/data/{train,test}/*.json`.

A file is {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}.
`num_samples` is ignored: in Shakespeare's test files it exceeds the actual numbers. Files are read
one user at a time, in any order. Users are sorted; those without training samples have no device.
Their samples go through files without a name, so that reading takes the memory of the largest user,
and not of all.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from fedstrata.common.host.files import writing
from fedstrata.common.learning.readers.data_files import damaged, find, missing
from fedstrata.common.learning.readers.reader_result import Labels, Parts, Samples

# In LEAF's order; every other character is read as a space.
ALPHABET: Final = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
CHARACTERS: Final = 80  # per text of Shakespeare; by chance also the size of the alphabet
WORDS: Final = 25
JSON_BLOCK: Final = 4096  # bytes of a file that are parsed at once
JSON_DEPTH_MOST: Final = 8
TEXT: Final = 4  # index of the text in a tweet: id, date, query, user, text, source
OPTIONS: Final = {
    "femnist": "-s niid --sf 0.05 -k 100 -t sample",
    "shakespeare": "-s niid --sf 1.0 -k 0 -t sample -tf 0.8",
    "sent140": "-s niid --sf 1.0 -k 0 -t sample",
}

_Token = re.compile(r"[\w']+|[.,!?;]")
Encode = Callable[[list[Any]], Samples]


@dataclass(frozen=True, slots=True)
class UserSamples:
    """The encoded samples of a user, in a file from `place` on, of this shape and type, and their
    labels.
    """

    file: BinaryIO
    place: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    labels: Labels

    def read_into(self, rows: Samples) -> None:
        """Fill an array of this shape. Raises OSError."""
        self.file.seek(self.place)
        view = rows.reshape(-1).view(np.uint8).data
        if self.file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise OSError("a temporary file is shorter than it was")


Users = dict[str, UserSamples]


def read_femnist(root: Path) -> Parts:
    """Read images uint8 [N, 1, 28, 28], white paper = 255; 62 classes: digits, A-Z, a-z. Raises
    InvalidExperiment.
    """
    return _read_leaf(root, "femnist", encode=_pixels, labels=_numbers, classes=62, tokens=0)


def read_shakespeare(root: Path) -> Parts:
    """Read texts of 80 characters as uint8 [N, 80], labelled with the next character. Raises
    InvalidExperiment.
    """
    tokens = len(ALPHABET)
    return _read_leaf(
        root, "shakespeare", encode=_characters, labels=_next, classes=tokens, tokens=tokens
    )


def read_sent140(root: Path) -> Parts:
    """Read the first 25 words and punctuation marks as int32 [N, 25]; labels 1 = positive. Raises
    InvalidExperiment.

    With V words in the vocabulary, V is the value of every other word and of the padding of short
    texts.
    """
    fetch = f"{_fetch_leaf('sent140')} && cd ../../models/sent140 && ./get_embs.sh"
    where = [root / "sent140" / "embs.json", root.parent / "models" / "sent140" / "embs.json"]
    places = _vocabulary(find(root, [where], fetch=fetch)[0])

    def words(x: list[Any]) -> Samples:
        rows = np.full((len(x), WORDS), len(places), np.int32)
        for row, tweet in zip(rows, x, strict=True):
            found = [places.get(word, len(places)) for word in _Token.findall(tweet[TEXT])[:WORDS]]
            row[: len(found)] = found
        return rows

    return _read_leaf(
        root, "sent140", encode=words, labels=_numbers, classes=2, tokens=len(places) + 1
    )


def _read_leaf(
    root: Path, name: str, *, encode: Encode, labels: Encode, classes: int, tokens: int
) -> Parts:
    """Read both parts. Raises InvalidExperiment, StorageFailed."""
    with writing(_home()), _scratch() as file:
        train, test = (
            _merge_leaf(root, name, part, file, encode=encode, labels=labels)
            for part in ("train", "test")
        )
        users = tuple(sorted(train))
        places = {user: place for place, user in enumerate(users)}
        return Parts(
            *_join(train),
            *_join(test),
            classes=classes,
            tokens=tokens,
            users=users,
            owners=_owners(train, places),
            test_owners=_owners(test, places),
        )


def _owners(part: Users, places: Mapping[str, int]) -> Labels:
    """Return the user's place of each sample of a part, -1 if it has none."""
    order = sorted(part)
    counts = [len(part[user].labels) for user in order]
    return np.repeat([places.get(user, -1) for user in order], counts)


def _join(users: Users) -> tuple[Samples, Labels]:
    """Return the samples, which the kernel may drop from memory, and the labels of all users,
    sorted.
    """
    order = sorted(users)
    total = sum(len(users[user].labels) for user in order)
    first = users[order[0]]
    with _scratch() as file:
        samples = np.memmap(file, first.dtype, "w+", shape=(total, *first.shape[1:]))
    labels = np.empty(total, np.int64)
    start = 0
    for user in order:
        place = slice(start, start + len(users[user].labels))
        users[user].read_into(samples[place])
        labels[place] = users[user].labels
        start = place.stop
    return samples.view(np.ndarray), labels


def _home() -> Path:
    # imports torch, which a cloud that checks files does without
    from fedstrata.common.learning.stored import folder

    return folder()


def _scratch() -> BinaryIO:
    """Open a file without a name, on the disk of the stored data sets if there is one: others may
    be in memory.
    """
    home = _home()
    if home.is_dir():
        return tempfile.TemporaryFile(dir=home)
    return tempfile.TemporaryFile()


def _merge_leaf(
    root: Path, name: str, part: str, file: BinaryIO, *, encode: Encode, labels: Encode
) -> Users:
    """Return each user's samples, which are written to the file, and labels from all files of
    `train` or `test`.
    """
    paths = paths_of(root, name, part)
    merged: Users = {}
    for path in paths:
        for user, x, y in _leaf_users(path):
            if user in merged:
                raise damaged(
                    path, f"has the user {user!r}, which is also in another file beside it"
                )
            try:
                samples = encode(x)
                wanted = labels(y).astype(np.int64)
            except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
                raise damaged(
                    path, f"has a sample of {user!r} that does not fit {name} ({error})"
                ) from None
            if len(x):
                merged[user] = UserSamples(file, file.tell(), samples.shape, samples.dtype, wanted)
                file.write(np.ascontiguousarray(samples).data)
    if not merged:
        raise damaged(paths[0], "and those beside it have no sample")
    return merged


def paths_of(root: Path, name: str, part: str) -> list[Path]:
    folder = root / name / "data" / part
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise missing(root, f"{folder.absolute()}/*.json", fetch=_fetch_leaf(name))
    return paths


def _leaf_users(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield each user of a file with x and y. Raises InvalidExperiment, also at its end."""
    import ijson  # here, as in each function: no other data set needs it

    found = set[str]()
    try:
        with path.open("rb") as file:
            for user, own in ijson.kvitems(_events(file), "user_data"):
                x = own["x"]
                y = own["y"]
                if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                    raise damaged(path, f"has not as many x as y of the user {user!r}")
                if user in found:
                    raise damaged(path, f"has the user {user!r} twice")
                found.add(user)
                yield user, x, y
            file.seek(0)
            listed = set(next(ijson.items(_events(file), "users")))
    except (OSError, ValueError, TypeError, KeyError, StopIteration, ijson.JSONError) as error:
        raise damaged(
            path, f"is not one of LEAF's files ({type(error).__name__}: {error})"
        ) from None
    if listed != found:
        raise damaged(path, f"lists {len(listed)} users and holds the data of {len(found)}")


def _events(file: BinaryIO) -> Iterator[tuple[str, str, Any]]:
    """Yield ijson's events of a file. Raises ValueError if it is nested more deeply than any of
    these files.

    A prefix has a part for each level, so blocks of the file are small: a block of brackets would
    take gigabytes.
    """
    import ijson

    depth = 0
    for prefix, event, value in ijson.parse(file, buf_size=JSON_BLOCK, use_float=True):
        if event in ("start_map", "start_array"):
            depth += 1
        elif event in ("end_map", "end_array"):
            depth -= 1
        if depth > JSON_DEPTH_MOST:
            raise ValueError(f"nested more than {JSON_DEPTH_MOST} deep")
        yield prefix, event, value


def _pixels(x: list[Any]) -> Samples:
    pixels = np.asarray(x, np.float64).reshape(len(x), 1, 28, 28)
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError("a pixel is not between 0 and 1")
    return np.rint(pixels * 255).astype(np.uint8)  # LEAF divided bytes by 255


def _numbers(y: list[Any]) -> Samples:
    labels = np.asarray(y)
    if not y:
        labels = labels.astype(np.int64)
    if labels.dtype.kind != "i" or labels.ndim != 1:
        raise ValueError("a label is not a whole number")
    return labels.astype(np.int64)


def _characters(x: list[Any], length: int = CHARACTERS) -> Samples:
    if any(len(row) != length for row in x):
        raise ValueError(f"a text is not of {length} characters")
    codes = np.frombuffer("".join(x).encode("utf-32-le"), np.uint32)
    table = np.full(128, ALPHABET.index(" "), np.uint8)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET), dtype=np.uint8)
    return table[np.where(codes < 128, codes, ord(" "))].reshape(len(x), length)


def _next(y: list[Any]) -> Samples:
    return _characters(y, 1)[:, 0]


def _vocabulary(path: Path) -> dict[str, int]:
    """Return the index of each word of `vocab`. Gigabytes of vectors (`emba`) behind it are not
    read.
    """
    import ijson

    try:
        with path.open("rb") as file:
            words = next(ijson.items(_events(file), "vocab"))
            if words and all(isinstance(word, str) for word in words):
                return {word: place for place, word in enumerate(dict.fromkeys(words))}
    except (OSError, ValueError, TypeError, StopIteration, ijson.JSONError) as error:
        raise damaged(path, f"cannot be read ({type(error).__name__}: {error})") from None
    raise damaged(path, 'has no list of words under "vocab"')


def _fetch_leaf(name: str) -> str:
    clone = "git clone https://github.com/TalwalkarLab/leaf"
    return (
        f"{clone} && cd leaf/data/{name} && ./preprocess.sh {OPTIONS[name]} (then data.root = "
        "'leaf/data')"
    )
