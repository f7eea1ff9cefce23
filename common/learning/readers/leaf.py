"""LEAF's JSON: FEMNIST, Shakespeare, Sent140, as `<root>/<name>/data/{train,test}/*.json`.

Each file is {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}. `num_samples` is
ignored: in Shakespeare's test files it exceeds the actual numbers. Files are read one at a time, in any order. Users
are sorted; users without training samples are omitted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.learning.readers.parts import Labels, Parts, Samples, damaged, find, missing

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

Encode = Callable[[list[Any]], Samples]
_Token = re.compile(r"[\w']+|[.,!?;]")


def read_femnist(root: Path) -> Parts:
    """Read images uint8 [N, 1, 28, 28], white paper = 255; 62 classes: digits, A-Z, a-z. Raises InvalidExperiment."""
    return _read(root, "femnist", encode=_pixels, labels=_numbers, classes=62, tokens=0)


def read_shakespeare(root: Path) -> Parts:
    """Read texts of 80 characters as int64 [N, 80], labelled with the next character. Raises InvalidExperiment."""
    tokens = len(ALPHABET)
    return _read(root, "shakespeare", encode=_characters, labels=_next, classes=tokens, tokens=tokens)


def read_sent140(root: Path) -> Parts:
    """Read the first 25 words and punctuation marks as int64 [N, 25]; labels 1 = positive. Raises InvalidExperiment.

    With V words in the vocabulary, V is the value of every other word and of the padding of short texts.
    """
    fetch = f"{_fetch('sent140')} && cd ../../models/sent140 && ./get_embs.sh"
    where = [root / "sent140" / "embs.json", root.parent / "models" / "sent140" / "embs.json"]
    places = _vocabulary(find(root, [where], fetch=fetch)[0])

    def words(x: list[Any]) -> Samples:
        rows = np.full((len(x), WORDS), len(places), np.int64)
        for row, tweet in zip(rows, x, strict=True):
            found = [places.get(word, len(places)) for word in _Token.findall(tweet[TEXT])[:WORDS]]
            row[: len(found)] = found
        return rows

    return _read(root, "sent140", encode=words, labels=_numbers, classes=2, tokens=len(places) + 1)


def _read(root: Path, name: str, *, encode: Encode, labels: Encode, classes: int, tokens: int) -> Parts:
    train, test = (_merge(root, name, part, encode=encode, labels=labels) for part in ("train", "test"))
    users = tuple(sorted(train))
    owners = np.repeat(np.arange(len(users)), [len(train[user][1]) for user in users])
    return Parts(*_join(train), *_join(test), classes=classes, tokens=tokens, users=users, owners=owners)


def _join(users: Mapping[str, tuple[Samples, Labels]]) -> tuple[Samples, Labels]:
    ordered = [users[user] for user in sorted(users)]
    return np.concatenate([x for x, _ in ordered]), np.concatenate([y for _, y in ordered])


def _merge(root: Path, name: str, part: str, *, encode: Encode, labels: Encode) -> dict[str, tuple[Samples, Labels]]:
    """Return each user's samples and labels from all files of `train` or `test`."""
    paths = _paths(root, name, part)
    merged: dict[str, tuple[Samples, Labels]] = {}
    for path in paths:
        for user, (x, y) in _users(path).items():
            if user in merged:
                raise damaged(path, f"has the user {user!r}, which is also in another file beside it")
            try:
                samples, wanted = encode(x), labels(y).astype(np.int64)
            except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
                raise damaged(path, f"has a sample of {user!r} that does not fit {name} ({error})") from None
            if len(x):
                merged[user] = (samples, wanted)
    if not merged:
        raise damaged(paths[0], "and those beside it have no sample")
    return merged


def check_parts(root: Path, name: str) -> None:
    """Raise InvalidExperiment if `train` or `test` of a data set has no file."""
    for part in ("train", "test"):
        _paths(root, name, part)


def _paths(root: Path, name: str, part: str) -> list[Path]:
    folder = root / name / "data" / part
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise missing(root, f"{folder.absolute()}/*.json", fetch=_fetch(name))
    return paths


def _users(path: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    try:
        # Pixels have few values: one shared object per value needs a quarter of the memory.
        tree = json.loads(path.read_text(encoding="utf-8"), parse_float=lru_cache(maxsize=1 << 16)(float))
        users = {user: (own["x"], own["y"]) for user, own in tree["user_data"].items()}
        listed = set(tree["users"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path, f"is not one of LEAF's files ({type(error).__name__}: {error})") from None
    if listed != set(users):
        raise damaged(path, f"lists {len(listed)} users and holds the data of {len(users)}")
    for user, (x, y) in users.items():
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise damaged(path, f"has not as many x as y of the user {user!r}")
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
        raise damaged(path, f"cannot be read ({error})") from None
    raise damaged(path, 'has no list of words under "vocab"')


def _fetch(name: str) -> str:
    clone = "git clone https://github.com/TalwalkarLab/leaf"
    return f"{clone} && cd leaf/data/{name} && ./preprocess.sh {OPTIONS[name]} (then data.root = 'leaf/data')"
