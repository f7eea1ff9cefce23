"""Tables: a CSV file, `NAME.csv`, or a file of numpy's arrays, `NAME.npz`.

A CSV file has a header, then a row for each sample, numbers but for classes and users. Columns that
are no target, no user and not ignored are features, float32. In columns of numbers the words of
MISSING are missing values; in columns of texts only empty cells are, for a class may be named None.

A file of arrays has x and y, and if there are x_test and y_test, and user. Nothing is unpickled:
arrays of objects are refused. Sizes are checked before memory is allocated.
"""

from __future__ import annotations

import math
import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.learning.readers.reader_result import (
    MOST_BYTES,
    Parts,
    Refuse,
    check_finite,
    parts_of,
    rows_to_test,
    some,
)
from fedstrata.common.settings.csv_table import FLOAT32_MOST, MISSING, CsvTable, number_in
from fedstrata.common.settings.data import NUMBERS, Data
from fedstrata.common.settings.tables import proposal

FILE_BYTES: Final = MOST_BYTES // 4  # of the file: a cell of two bytes takes eight in memory
ENCODE: Final = "Encode it as numbers, or list the column in data.ignored_columns."
FILL: Final = "Fill in the values, or list columns that lack many in data.ignored_columns."
DROP: Final = "drop"
CLASSES_FEW: Final = 10
# of a column's largest value: what lies closer together differs by rounding alone
ROUNDING: Final = 1e-12
_PADDED: Final = re.compile(r"[+-]?0\d")  # 07 is a name, and another one than 7
KNOWN: Final = ("x", "y", "x_test", "y_test", "user", "user_test")
HEADS: Final = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}

Doubles: TypeAlias = npt.NDArray[np.float64]
# arrays of samples, targets and users; None for those that there are not
Columns: TypeAlias = tuple[Any, Any, Any]


@dataclass(slots=True)
class _Rows:
    """The cells of a file: features float64 [N, F], numbers float64 [N, T], and texts by column,
    [N] each.

    `words`: of each column of texts, the line of the first row with a word of MISSING. `dropped`:
    how many rows of each class were left out, "" for those without a class; `first`: which value
    the first of them lacks.
    """

    path: Path
    x: Doubles
    numbers: Doubles
    texts: dict[str, list[str]]
    words: dict[str, dict[str, int]]
    dropped: Counter[str] = field(default_factory=Counter)
    first: str = ""

    def lacks(self, data: Data, line: int, column: str) -> None:
        """Note that a row has no value. Raises InvalidExperiment unless such rows are left out."""
        where = f"line {line}, column {column!r}"
        if data.missing != DROP:
            remedy = f"Fill it in, or set data.missing = {DROP!r} to leave out such rows."
            raise InvalidExperiment(
                "data.dataset", str(self.path), f"has no value in {where}", remedy
            )
        self.first = self.first or where


def read_csv(data: Data, root: Path, *, test: bool) -> Parts:
    """Read a table; of a private one all rows are for training, or `test`. Raises
    InvalidExperiment.
    """
    path = root / data.dataset

    def refuse(problem: str, remedy: str) -> NoReturn:
        raise InvalidExperiment("data.dataset", str(path), problem, remedy)

    names, rows = _read(data, path, None)
    if data.test_file and not data.private:
        tests = _read(data, root / data.test_file, names)[1]
    else:
        tests = None
    tables = [rows] if tests is None else [rows, tests]
    _leave_out_words(data, tables)
    for each in tables:
        if not len(each.x) and not each.dropped:
            raise InvalidExperiment("data.dataset", str(each.path), "has no rows", "Add some.")
    known = _classes(data, tables, path)
    notes = tuple(_notes(data, tables, known))
    apart = None if tests is None else _arrays(data, tests, known)
    (x, y, user), (x_test, *others) = _divided(
        data, _arrays(data, rows, known), apart, test=test, refuse=refuse
    )
    if data.standardise and not data.private:
        x, x_test = _standardised(x, x_test)
    return parts_of(data, (x, y, user), (x_test, *others), refuse=refuse, names=known, notes=notes)


def _divided(
    data: Data, rows: Columns, apart: Columns | None, *, test: bool, refuse: Refuse
) -> tuple[Columns, Columns]:
    """Return the rows for training and those for testing: `apart`, or drawn ones; of private data
    all are of one kind.

    Users of private data do not matter.
    """
    if data.private:
        mine = (*rows[:2], None)
        none = (None, None, None)
        if test:
            return (none, mine)
        return (mine, none)
    if apart is not None:
        return rows, apart
    picked = rows_to_test(len(rows[0]), data.test_share, refuse=refuse)
    x, y, user = rows
    if user is None:
        return (x[~picked], y[~picked], None), (x[picked], y[picked], None)
    return (x[~picked], y[~picked], user[~picked]), (x[picked], y[picked], user[picked])


def _standardised(train: Doubles, test: Doubles) -> tuple[Doubles, Doubles]:
    """Return features [N, F], shifted and scaled to mean 0 and deviation 1 over the training rows.

    Those that never change are only shifted: any other value would be enormous beside their
    rounding errors.
    """
    low = train.min(0)
    high = train.max(0)
    mean = train.mean(0)
    deviation = train.std(0)
    changes = (high - low > ROUNDING * np.maximum(abs(low), abs(high))) & (deviation > 0)
    scale = np.where(changes, deviation, 1.0)
    return (train - mean) / scale, (test - mean) / scale


def _arrays(data: Data, rows: _Rows, known: Sequence[str]) -> Columns:
    """Return features float64 [N, F], targets float64 [N, T] or int64 [N], and users, None without
    a column.
    """
    users = None if data.user_column is None else np.array(rows.texts[data.user_column])
    if data.targets == NUMBERS:
        return rows.x, rows.numbers / data.target_scale, users
    places = {name: place for place, name in enumerate(known)}
    return (
        rows.x,
        np.array([places[name] for name in rows.texts[str(data.target_column)]], np.int64),
        users,
    )


def _classes(data: Data, tables: Sequence[_Rows], path: Path) -> list[str]:
    """Return the classes' names in the order of their numbers: listed ones, 0 to n - 1, or those
    that occur, sorted.
    """
    if data.targets == NUMBERS:
        return []
    column = str(data.target_column)
    found = sorted({name for rows in tables for name in rows.texts[column]}, key=_order)
    if data.classes is None:
        if numbers := [
            name
            for name in found
            if (number := number_in(name)) is not None and not number.is_integer()
        ]:
            problem = f"{path} has numbers such as {numbers[0]} in it, which are no classes"
            remedy = "Set data.targets = 'numbers', or list the classes in data.classes."
            raise InvalidExperiment("data.target_column", column, problem, remedy)
        return found
    listed = _listed(data)
    if unknown := [name for name in found if name not in listed]:
        problem = f"{path} also has {some([*map(repr, unknown)], most=5)} in column {column!r}"
        raise InvalidExperiment(
            "data.classes", data.classes, problem, "List all classes, or correct the file."
        )
    return listed


def _listed(data: Data) -> list[str]:
    """Return the names of the classes that the experiment gives, none if it gives none."""
    if isinstance(data.classes, int):
        return [str(place) for place in range(data.classes)]
    names = [_class(name) for name in data.classes or ()]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidExperiment(
            "data.classes", data.classes, f"{twice[0]!r} is listed twice", "List it once."
        )
    return names


def _order(name: str) -> tuple[float, str]:
    """Return the place of a class among others: numbers by value, then texts."""
    number = number_in(name)
    return (math.inf if number is None else number, name)


def _read(data: Data, path: Path, wanted: Sequence[str] | None) -> tuple[list[str], _Rows]:
    """Return the features' names and the cells of a file, whose features should be `wanted`, if
    given.
    """
    try:
        if path.stat().st_size > FILE_BYTES:
            problem = f"has more than {FILE_BYTES >> 30} GiB"
            raise InvalidExperiment("data.dataset", str(path), problem, "Use a part of it.")
        with CsvTable.open("data.dataset", path) as table:
            features = _features(data, table)
            if wanted is not None and features != list(wanted):
                others = ", ".join(sorted({*features} ^ {*wanted})) or "their order"
                problem = f"has other features than {data.dataset}: {others}"
                raise table.wrong(problem, "Give both files the same columns.")
            return features, _cells(data, table, features)
    except FileNotFoundError:
        raise _absent(path) from None
    except OSError as error:
        problem = error.strerror or str(error)
        raise InvalidExperiment("data.root", str(path), problem, "Check the file.") from None


def _cells(data: Data, table: CsvTable, features: Sequence[str]) -> _Rows:
    targets = _targets(data)
    classes = [] if data.targets == NUMBERS else targets
    columns = [*classes]
    if data.user_column is not None:
        columns.append(data.user_column)
    of_numbers = [each for each in targets if each not in classes]
    numbers = table.places([*features, *of_numbers])
    texts = dict(zip(columns, table.places(columns), strict=True))
    values = array("d")
    count = 0
    none = np.empty((0, 0))
    rows = _Rows(table.path, none, none, {name: [] for name in texts}, {name: {} for name in texts})
    for row in table:
        found = [number_in(row[place]) for place in numbers]
        wrong = [
            p
            for p, value in zip(numbers, found, strict=True)
            if value is None or abs(value) > FLOAT32_MOST
        ]
        absent = [place for place in wrong if row[place].strip().lower() in MISSING]
        absent += [place for place in texts.values() if not row[place].strip()]
        if absent:
            rows.lacks(data, table.line, table.header[absent[0]])
            of_class = _class(row[texts[classes[0]]]) if classes else ""
            rows.dropped[of_class] += 1
            continue
        for place in wrong:
            remedy = ENCODE
            if table.header[place] in targets:
                remedy = "Correct it, or set data.targets = 'classes'."
            table.number(row, place, remedy=remedy)
        values.extend(value for value in found if value is not None)  # the others were refused
        for name, place in texts.items():
            text = _class(row[place]) if name in classes else row[place].strip()
            rows.texts[name].append(text)
            if text.lower() in MISSING:
                rows.words[name].setdefault(text, table.line)
        count += 1
    cells = np.array(values, np.float64).reshape(count, len(numbers))
    rows.x = cells[:, : len(features)]
    rows.numbers = cells[:, len(features) :]
    return rows


def _leave_out_words(data: Data, tables: Sequence[_Rows]) -> None:
    """Leave out the rows whose class is a word of MISSING, if all other classes are numbers.

    Raises InvalidExperiment unless such rows are left out.
    """
    target = str(data.target_column)
    words = {word for rows in tables for word in rows.words.get(target, ())}
    others = {
        *(_listed(data) or (name for rows in tables for name in rows.texts.get(target, ())))
    } - words
    if not words or not others or any(number_in(name) is None for name in others):
        return
    for rows in tables:
        for line in sorted(rows.words[target].values()):
            rows.lacks(data, line, target)
        kept = [name not in words for name in rows.texts[target]]
        rows.dropped[""] += kept.count(False) + sum(rows.dropped.pop(word, 0) for word in words)
        rows.x = rows.x[kept]
        rows.texts = {column: [*compress(texts, kept)] for column, texts in rows.texts.items()}
        rows.words[target].clear()


def _notes(data: Data, tables: Sequence[_Rows], known: Sequence[str]) -> Iterator[str]:
    """Yield what the user should know: rows that are left out, by class, and words that are taken
    as they are.

    Raises InvalidExperiment if a class would be lost.
    """
    target = str(data.target_column)
    kept = {name for rows in tables for name in rows.texts.get(target, ())}
    for rows in tables:
        rows.dropped = +rows.dropped
        count = rows.dropped.total()
        total = rows.dropped.total() + len(rows.x)
        lost = [name for name in rows.dropped if name and name not in kept]
        if count and not data.private and (lost or count == total):
            which = f"class {some([*map(repr, lost)])}" if lost else "any class"
            missing = f"the first missing value is in {rows.first}"
            problem = f"leaves no row of {which} in {rows.path}; {missing}"
            raise InvalidExperiment("data.missing", data.missing, problem, FILL)
        if count:
            by_class = []
            for name, n in rows.dropped.most_common():
                of = f"of {name!r}" if name else "without a class"
                by_class.append(f"{n} {of}")
            shown = f" ({some(by_class, most=5)})" if data.targets != NUMBERS else ""
            left_out = f"{count} of {total} rows lack a value and are left out{shown}"
            yield f"{rows.path}: {left_out}, the first in {rows.first}"
        for column, words in rows.words.items():
            for word in words if column != target or data.classes is None else ():
                number = rows.texts[column].count(word)
                name = f"column {column!r} has {word!r} in {number} rows, which counts as a name"
                yield (
                    f"{rows.path}: {name}: in a column of texts only empty cells are missing values"
                )
    rows_in_all = sum(len(rows.x) for rows in tables)
    if data.classes is None and len(known) > max(CLASSES_FEW, rows_in_all // 2):
        yield (
            f"{tables[0].path}: column {target!r} has {len(known)} classes in {rows_in_all} rows. "
            "If it has numbers,"
            " set data.targets = 'numbers'"
        )


def _targets(data: Data) -> list[str]:
    if isinstance(data.target_column, list):
        return data.target_column
    return [str(data.target_column)]


def _features(data: Data, table: CsvTable) -> list[str]:
    """Return the features' names, having checked the header."""
    header = table.header
    named = {
        "target_column": _targets(data),
        "user_column": [data.user_column] if data.user_column else [],
    }
    named["ignored_columns"] = data.ignored_columns
    for key, columns in named.items():
        for column in (each for each in columns if each not in header):
            remedy = proposal(column, header, what="There are")
            raise InvalidExperiment(
                f"data.{key}", column, f"{table.path} has no such column", remedy
            )
    others = {column for columns in named.values() for column in columns}
    features = [name for name in header if name not in others]
    if not features:
        raise table.wrong("has no column that is a feature", "Ignore fewer.")
    return features


def _class(cell: str) -> str:
    """Return the name of a class: a whole number without a point, else the text."""
    number = number_in(cell)
    text = cell.strip()
    whole = (
        number is not None
        and number.is_integer()
        and abs(number) < 1e15
        and not _PADDED.match(text)
    )
    if whole and number is not None:
        return str(int(number))
    return text


def read_npz(data: Data, root: Path, *, test: bool) -> Parts:
    """Read a file; of a private one all samples are for training, or `test`. Raises
    InvalidExperiment.
    """
    path = root / data.dataset

    def refuse(problem: str, remedy: str) -> NoReturn:
        raise InvalidExperiment("data.dataset", str(path), problem, remedy)

    arrays, unread = _npz_arrays(path)
    for needed in ("x", "y"):
        if needed not in arrays:
            held = some(sorted([*arrays, *unread]), most=9) or "none at all"
            refuse(
                f"has no array {needed!r} but {held}",
                "Save x and y, and if you like x_test, y_test and user.",
            )
    for name, values in arrays.items():
        check_finite(values, name, refuse)
    x = arrays["x"]
    y = arrays["y"]
    user = arrays.get("user")
    counts = {each.shape[:1] for each in (x, y, user) if each is not None}
    if data.private:
        unread += [name for name in arrays if name not in ("x", "y")]
    apart = None
    if not data.private:
        if ("x_test" in arrays) != ("y_test" in arrays):
            refuse("has only one of x_test and y_test", "Save both, or none.")
        if "x_test" in arrays:
            apart = arrays["x_test"], arrays["y_test"], arrays.get("user_test")
        elif len(counts) > 1 or () in counts:
            problem = f"has x of {list(x.shape)} and y of {list(y.shape)}"
            refuse(problem, "Give each sample one target, and one user.")
    train, tests = _divided(data, (x, y, user), apart, test=test, refuse=refuse)
    notes = [f"{path}: these arrays are not read: {some(unread)}"] if unread else []
    return parts_of(data, train, tests, refuse=refuse, notes=notes)


def _absent(path: Path) -> InvalidExperiment:
    return InvalidExperiment(
        "data.root", str(path.parent), f"not found: {path.absolute()}", "Put it there."
    )


def _npz_arrays(path: Path) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    """Return the arrays that count, and the names of the others."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            found: dict[str, npt.NDArray[Any]] = {}
            total = 0
            for name in (name for name in KNOWN if name in members):
                info = members[name]
                with archive.open(info) as file:
                    head = HEADS.get(npy.read_magic(file))
                    if head is None:
                        raise ValueError(f"{name} has another version of numpy's format")
                    shape, _, dtype = head(file)
                    if dtype.hasobject or dtype.kind not in "fbiuUS":
                        raise ValueError(f"{name} is an array of {dtype}")
                    count = math.prod(shape)
                    total += count * dtype.itemsize
                    if total > MOST_BYTES or count * dtype.itemsize > info.file_size:
                        raise ValueError(f"{name} of {list(shape)} does not fit into this file")
                with archive.open(info) as file:
                    found[name] = npy.read_array(file, allow_pickle=False)
            return found, sorted(members.keys() - found.keys())
    except FileNotFoundError:
        raise _absent(path) from None
    except (
        OSError,
        ValueError,
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
        RuntimeError,
        KeyError,
    ) as error:
        raise InvalidExperiment(
            "data.dataset", str(path), f"not a sound npz file: {error}", "Save it again."
        ) from None
